"""Checks that a program keeps its invariants, and says what is wrong with it, where, and what would mend it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch
from torch.fx import Node

from zerofx.collectives import WAIT, is_gather
from zerofx.fault import InvariantError, fail
from zerofx.layout import ParamLayout, PerRank
from zerofx.ops import REPLICATED
from zerofx.program import (
    CASTS,
    Invariant,
    Program,
    Tag,
    gradients,
    is_recomputed,
    is_saved,
    is_saved_only,
    output_node,
    output_tags,
    outputs,
    source,
    stored_parameters,
    stored_part,
    tag,
)
from zerofx.verify_physical import check_bounded, check_gathered, check_partial, check_reduced, check_waited
from zerofx.verify_updates import check_updated

__all__ = ["InvariantError", "check"]

aten, zerofx = torch.ops.aten, torch.ops.zerofx
UNSHARD, REDUCE = zerofx.unshard.default, zerofx.reduce_grad.default
# Ops through which a gathered parameter stays the same data.
SAME_DATA = {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten.reshape.default,
    aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.expand.default,
    aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
    aten.as_strided.default, aten.view.dtype, aten.alias.default, aten.detach.default, operator.getitem,
    aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default, aten._unsafe_view.default, WAIT,
    torch.ops.prims.convert_element_type.default,
}  # fmt: skip
SUMS = {aten.add.Tensor, aten.mul.Tensor, *SAME_DATA}


def check(program: Program) -> None:
    """Raises InvariantError for the first invariant in `program.holds` that the program does not keep."""
    for graph in program.graphs.values():
        graph.lint()
    for invariant in Invariant:
        if invariant in program.holds:
            CHECKS[invariant](program)


def _param_of(program: Program, invariant: Invariant, marker: Node) -> ParamLayout:
    known = tag(marker)
    if known is None or not known.params:
        fail(program, invariant, marker, "it has no tag", "stamp it with the parameter that it stands for")
    return program.layout[known.params[0]]


def _marked(program: Program) -> None:
    for graph, node, known in stored_parameters(program):
        if known.role == "param":
            fail(program, Invariant.MARKED, node, "it is a whole parameter", "run choose-layout first")
        for user in node.users:
            if user is output_node(graph) and is_saved_only(graph, node):
                continue
            if not all(reader.target is UNSHARD for reader in _readers(user)):
                found = f"the stored part is read by {user.name}"
                fail(program, Invariant.MARKED, node, found, "read it through zerofx::unshard")
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            _check_unshard(program, node, _param_of(program, Invariant.MARKED, node))
        for node in graph.find_nodes(op="call_function", target=REDUCE):
            _check_reduce_grad(program, node, _param_of(program, Invariant.MARKED, node))
    for value, known in gradients(program):
        if not _comes_from(value, Tag("reduce_grad", known.params)):
            found = f"the gradient of {known.params[0]} is not reduced"
            fail(program, Invariant.MARKED, value, found, "pass it through zerofx::reduce_grad")
    check_partial(program, Invariant.MARKED)


def _readers(user: Node) -> list[Node]:
    """What reads a stored part: the node itself, or what reads it where it casts the part for a marker."""
    return list(user.users) if user.target in CASTS and (tag(user) or Tag("")).role == "unshard" else [user]


def _check_unshard(program: Program, node: Node, param: ParamLayout) -> None:
    stored, known = stored_part(node), tag(stored_part(node))
    if known == Tag("whole", (param.name,)):
        _check_marker(program, node, replace(param, dim=None), cast("list[int]", node.args[1]))
        return
    if known is None or known.role not in ("shard", "replica") or known.params != (param.name,):
        found = f"it unshards {stored.name}"
        fail(program, Invariant.MARKED, node, found, f"unshard the stored part of {param.name}")
    _check_marker(program, node, param, cast("list[int]", node.args[1]))


def _check_reduce_grad(program: Program, node: Node, param: ParamLayout) -> None:
    grad, known = source(node), tag(source(node))
    if known is not None and known.role == "whole" and known.params != (param.name,):
        found = f"{grad.name} is of {known.params[0]}"
        fail(program, Invariant.MARKED, node, found, f"reduce the gradient of {param.name}")
    if _comes_from(grad, Tag("reduce_grad", (param.name,))):
        fail(program, Invariant.MARKED, node, f"{grad.name} is reduced already", "reduce each gradient once")
    _check_marker(program, node, param, grad.meta["val"].shape)


def _check_marker(program: Program, node: Node, param: ParamLayout, size: Iterable[int]) -> None:
    axis = program.mesh.axis("dp")
    held = 0 if param.dim is None else PerRank("rows", param.size[param.dim], axis.size)
    given = [tuple(size), *node.args[-3:]]
    wanted = [param.size, REPLICATED if param.dim is None else param.dim, held, axis.group]
    if repr(given) != repr(wanted):  # an int that is rank 0's number of rows is none of rows(...)
        found = f"its size, dim, rows and group are {given}"
        fail(program, Invariant.MARKED, node, found, f"the layout says {wanted}")


def _comes_from(node: Node, marker: Tag) -> bool:
    """Whether every way from the node back leads to a marker of that tag, through sums and casts of the stored part."""
    todo, seen = [node], set[Node]()
    while todo:
        node = todo.pop()
        if node.target is not REDUCE and node.target not in SUMS:
            return False
        if node.target is REDUCE and tag(node) != marker:
            return False
        if node.target is not REDUCE and node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return True


def _merged(program: Program) -> None:
    for target, remedy in ((UNSHARD, "merge the reads"), (REDUCE, "add the gradients before they are reduced")):
        for graph in program.graphs.values():
            counts: Counter[str] = Counter()
            for node in graph.find_nodes(op="call_function", target=target):
                name = _param_of(program, Invariant.MERGED, node).name
                counts[name] += 1
                if counts[name] > 1:
                    fail(program, Invariant.MERGED, node, f"the second {target} of {name}", remedy)


def _released(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            param = _param_of(program, Invariant.RELEASED, node)
            if "joint" not in program.graphs or param.dim is None:
                continue
            if param.name in program.kept and not is_saved(node):
                fail(program, Invariant.RELEASED, node, "it may be computed again", "tag it MUST_SAVE")
            if param.name not in program.kept and not is_recomputed(node):
                fail(program, Invariant.RELEASED, node, "it may be saved", "tag it MUST_RECOMPUTE")
        for value, known in zip(outputs(graph), output_tags(graph), strict=True):
            if value is None or known is None or known.role != "saved":
                continue
            origin = _gathered_origin(value, program)
            if origin is not None and not program.kept.issuperset(origin):
                found = f"it holds the gathered {', '.join(origin)} until the backward"
                fail(program, Invariant.RELEASED, value, found, "save the shard and gather again")
    _not_gathered_again(program, Invariant.RELEASED, program.kept)


def _kept(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            if "joint" in program.graphs and not is_saved(node):
                fail(program, Invariant.KEPT, node, "it may be computed again", "tag it MUST_SAVE")
    _not_gathered_again(program, Invariant.KEPT, frozenset(param.name for param in program.layout))


def _not_gathered_again(program: Program, invariant: Invariant, names: frozenset[str]) -> None:
    for node in program.graphs["backward"].nodes if "backward" in program.graphs else ():
        known = tag(node)
        if known is None or known.role != "unshard" or names.isdisjoint(known.params):
            continue
        if node.target is UNSHARD or is_gather(node):
            fail(program, invariant, node, "it is gathered in the backward", "save it in the forward")


def _gathered_origin(node: Node, program: Program) -> tuple[str, ...] | None:
    """The parameters whose gathered data a node holds, or None."""
    while node.op == "call_function":
        known = tag(node)
        if node.target is UNSHARD or is_gather(node):
            params = known.params if known else ()
            return params if any(program.layout[p].dim is not None for p in params) else None
        if node.target not in SAME_DATA:
            return None
        node = node.all_input_nodes[0]
    return None


CHECKS: dict[Invariant, Callable[[Program], None]] = {
    Invariant.MARKED: _marked,
    Invariant.MERGED: _merged,
    Invariant.RELEASED: _released,
    Invariant.KEPT: _kept,
    Invariant.GATHERED: check_gathered,
    Invariant.REDUCED: check_reduced,
    Invariant.WAITED: check_waited,
    Invariant.UPDATED: check_updated,
    Invariant.BOUNDED: check_bounded,
}
