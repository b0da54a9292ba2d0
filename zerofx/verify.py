"""Checks that a program keeps its invariants, and says what is wrong with it, where, and what would mend it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch.fx import Graph, Node

from zerofx.collectives import WAIT, Collective, collective, is_bucket, is_gather, is_reduction
from zerofx.edit import any_arg
from zerofx.layout import ParamLayout, PerRank
from zerofx.ops import REPLICATED
from zerofx.program import (
    Invariant,
    Program,
    Tag,
    is_recomputed,
    is_saved,
    output_node,
    output_tags,
    outputs,
    placeholders,
    source,
    tag,
)
from zerofx.text import show_graph

aten, c10d, zerofx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zerofx
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


class InvariantError(AssertionError):
    """A program does not keep an invariant that a pass promised."""


def check(program: Program) -> None:
    """Raises InvariantError for the first invariant in `program.holds` that the program does not keep."""
    for graph in program.graphs.values():
        graph.lint()
    for invariant in Invariant:
        if invariant in program.holds:
            CHECKS[invariant](program)


def _fail(program: Program, invariant: Invariant, node: Node, found: str, remedy: str) -> NoReturn:
    name = next(name for name, graph in program.graphs.items() if graph is node.graph)
    lines = show_graph(name, node.graph, program.mesh).splitlines()
    place = next((i for i, line in enumerate(lines) if line.strip().startswith(f"{node.name}:")), 0)
    near = "\n".join(lines[max(place - 5, 0) : place + 5])
    raise InvariantError(
        f"{invariant.name} does not hold ({invariant.value}): {node.name} in {name}: {found}; {remedy}\n{near}"
    )


def _stored(program: Program) -> Iterator[tuple[Graph, Node, Tag]]:
    for graph in program.graphs.values():
        for node in placeholders(graph):
            known = tag(node)
            if known is not None and known.role in ("shard", "replica", "param"):
                yield graph, node, known


def _gradients(program: Program) -> Iterator[tuple[Node, Tag]]:
    for graph in program.graphs.values():
        for value, known in zip(outputs(graph), output_tags(graph), strict=True):
            if value is not None and known is not None and known.role == "grad":
                yield value, known


def _is_saved_only(graph: Graph, node: Node) -> bool:
    pairs = zip(outputs(graph), output_tags(graph), strict=True)
    return all(known is not None and known.role == "saved" for value, known in pairs if value is node)


def _param_of(program: Program, invariant: Invariant, marker: Node) -> ParamLayout:
    known = tag(marker)
    if known is None or not known.params:
        _fail(program, invariant, marker, "it has no tag", "stamp it with the parameter that it stands for")
    return program.layout[known.params[0]]


def _marked(program: Program) -> None:
    for graph, node, known in _stored(program):
        if known.role == "param":
            _fail(program, Invariant.MARKED, node, "it is a whole parameter", "run choose-layout first")
        for user in node.users:
            if user is output_node(graph) and _is_saved_only(graph, node):
                continue
            if user.target is not UNSHARD:
                found = f"the stored part is read by {user.name}"
                _fail(program, Invariant.MARKED, node, found, "read it through zerofx::unshard")
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            _check_unshard(program, node, _param_of(program, Invariant.MARKED, node))
        for node in graph.find_nodes(op="call_function", target=REDUCE):
            _check_reduce_grad(program, node, _param_of(program, Invariant.MARKED, node))
    for value, known in _gradients(program):
        if not _comes_from(value, Tag("reduce_grad", known.params)):
            found = f"the gradient of {known.params[0]} is not reduced"
            _fail(program, Invariant.MARKED, value, found, "pass it through zerofx::reduce_grad")


def _check_unshard(program: Program, node: Node, param: ParamLayout) -> None:
    stored, known = source(node), tag(source(node))
    if known is None or known.role not in ("shard", "replica") or known.params != (param.name,):
        found = f"it unshards {stored.name}"
        _fail(program, Invariant.MARKED, node, found, f"unshard the stored part of {param.name}")
    _check_marker(program, node, param, cast("list[int]", node.args[1]))


def _check_reduce_grad(program: Program, node: Node, param: ParamLayout) -> None:
    grad = source(node)
    if _comes_from(grad, Tag("reduce_grad", (param.name,))):
        _fail(program, Invariant.MARKED, node, f"{grad.name} is reduced already", "reduce each gradient once")
    _check_marker(program, node, param, grad.meta["val"].shape)


def _check_marker(program: Program, node: Node, param: ParamLayout, size: Iterable[int]) -> None:
    axis = program.mesh.axis("dp")
    held = 0 if param.dim is None else PerRank("rows", param.size[param.dim], axis.size)
    given = [tuple(size), *node.args[-3:]]
    wanted = [param.size, REPLICATED if param.dim is None else param.dim, held, axis.group]
    if repr(given) != repr(wanted):  # an int that is rank 0's number of rows is none of rows(...)
        found = f"its size, dim, rows and group are {given}"
        _fail(program, Invariant.MARKED, node, found, f"the layout says {wanted}")


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
                    _fail(program, Invariant.MERGED, node, f"the second {target} of {name}", remedy)


def _released(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            cut = _param_of(program, Invariant.RELEASED, node).dim is not None
            joint = "joint" in program.graphs
            if cut and joint and not is_recomputed(node):
                _fail(program, Invariant.RELEASED, node, "it may be saved", "tag it MUST_RECOMPUTE")
        for value, known in zip(outputs(graph), output_tags(graph), strict=True):
            if value is None or known is None or known.role != "saved":
                continue
            origin = _gathered_origin(value, program)
            if origin is not None:
                found = f"it holds the gathered {', '.join(origin)} until the backward"
                _fail(program, Invariant.RELEASED, value, found, "save the shard and gather again")


def _kept(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            if "joint" in program.graphs and not is_saved(node):
                _fail(program, Invariant.KEPT, node, "it may be computed again", "tag it MUST_SAVE")
    for node in program.graphs["backward"].nodes if "backward" in program.graphs else ():
        if node.target is UNSHARD or is_gather(node):
            _fail(program, Invariant.KEPT, node, "it is gathered in the backward", "save it in the forward")


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


def _gathered(program: Program) -> None:
    axis = program.mesh.axis("dp")
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            _fail(program, Invariant.GATHERED, node, "a marker is left", "replace it by an all-gather")
    for graph, node, known in _stored(program):
        if known.role == "shard" and axis.size > 1:
            _check_is_gathered(program, graph, node, known)
    for graph in program.graphs.values():
        for node in graph.nodes:
            replaced = tag(node) if node.op == "call_function" else None
            if replaced is not None and replaced.role == "unshard":
                _check_gather(program, node, replaced)


def _check_gather(program: Program, node: Node, known: Tag) -> None:
    if is_bucket(node):
        return
    axis, param = program.mesh.axis("dp"), program.layout[known.params[0]]
    sent = collective(node)
    if sent is not None and sent.args != (axis.size, axis.group):
        found = f"it gathers from {sent.args[0]} ranks over {sent.args[1]}"
        _fail(program, Invariant.GATHERED, node, found, f"the axis dp has {axis.size} ranks, over {axis.group}")
    if sent is not None and _misses_per_rank(node, known, program):
        remedy = f"pad them by pad({param.size[param.dim or 0]}, {axis.size})"
        _fail(program, Invariant.GATHERED, node, "it gathers chunks that differ by rank", remedy)
    size = list(node.meta["val"].shape)
    if size != list(param.size) and not all(_goes_on(user, known) for user in node.users):
        found, remedy = f"it is read with the shape {size}", f"cut it to {list(param.size)} behind the all-gather"
        _fail(program, Invariant.GATHERED, node, found, remedy)


def _goes_on(user: Node, known: Tag) -> bool:
    """Whether a reader of a marker's replacement is part of it, alone or in a bucket."""
    theirs = tag(user) or Tag("")
    return theirs == known or (
        is_bucket(user) and theirs.role == known.role and set(known.params) <= set(theirs.params)
    )


def _misses_per_rank(node: Node, known: Tag, program: Program) -> bool:
    """Whether rows are spread unevenly, but no int on the way to the node differs by rank."""
    param, world = program.layout[known.params[0]], program.mesh.axis("dp").size
    uneven = param.dim is not None and param.size[param.dim] % world != 0
    return uneven and not any(any_arg(part.args, PerRank) for part in _chain(node, known))


def _chain(node: Node, known: Tag) -> Iterator[Node]:
    """The nodes of that tag on the way back from a node, as far as they go."""
    todo, seen = [node], set[Node]()
    while todo:
        node = todo.pop()
        if node not in seen and tag(node) == known:
            seen.add(node)
            sent = collective(node)
            todo += [sent.source] if sent else node.all_input_nodes
            yield node


def _check_is_gathered(program: Program, graph: Graph, shard: Node, known: Tag) -> None:
    """All that reads the shard is on its way to an all-gather, which only what replaced its marker is."""
    todo = [shard]
    while todo:
        node = todo.pop()
        for user in node.users:
            if node is shard and user is output_node(graph) and _is_saved_only(graph, node):
                continue
            if user is output_node(graph) or not _goes_on(user, Tag("unshard", known.params)):
                found = f"the shard is read by {user.name}"
                _fail(program, Invariant.GATHERED, node, found, "read the gathered parameter")
            if not is_gather(user) and not is_bucket(user):
                todo.append(user)


def _reduced(program: Program) -> None:
    axis = program.mesh.axis("dp")
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=REDUCE):
            _fail(program, Invariant.REDUCED, node, "a marker is left", "replace it by a reduction")
    if axis.size == 1:
        return
    for graph in program.graphs.values():
        for node in graph.nodes:
            if not is_bucket(node) and is_reduction(node) and (known := tag(node)) and known.role == "reduce_grad":
                _check_reduction(program, node, program.layout[known.params[0]])
    for value, known in _gradients(program):
        (name,) = known.params
        chain = Tag("reduce_grad", (name,))
        count = sum(is_reduction(node) for node in _chain(value, chain))
        if count != 1:
            found = f"the gradient of {name} passes {count} reductions"
            _fail(program, Invariant.REDUCED, value, found, "reduce it exactly once")
        size, stored = list(value.meta["val"].shape), list(program.layout[name].local_size(axis.size, 0))
        if size != stored or _misses_per_rank(value, chain, program):
            found = f"the gradient of {name} has the shape {size} on every rank"
            _fail(program, Invariant.REDUCED, value, found, "cut it to the rows that each rank stores")


def _check_reduction(program: Program, node: Node, param: ParamLayout) -> None:
    axis = program.mesh.axis("dp")
    right: tuple[Any, ...] = (c10d.reduce_scatter_tensor.default, "avg", axis.size, axis.group)
    if param.dim is None:
        right = (c10d.all_reduce.default, "avg", axis.group)
    sent = cast(Collective, collective(node))
    if (sent.target, *sent.args) != right:
        found = f"it is {_call(sent.target, *sent.args)}"
        _fail(program, Invariant.REDUCED, node, found, f"{param.name} needs {_call(*right)}")


def _call(target: Any, *args: Any) -> str:
    return f"{target.name().split('::')[1]}({', '.join(map(repr, args))})"


def _waited(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.nodes:
            unfinished = str(node.target).startswith("_c10d_functional.") or collective(node) is not None
            if not unfinished or node.target is WAIT:
                continue
            for user in node.users:
                if user.target is not (operator.getitem if is_bucket(node) else WAIT):
                    found = f"{user.name} reads it before it is complete"
                    _fail(program, Invariant.WAITED, node, found, "read the result of wait_tensor")


CHECKS: dict[Invariant, Callable[[Program], None]] = {
    Invariant.MARKED: _marked,
    Invariant.MERGED: _merged,
    Invariant.RELEASED: _released,
    Invariant.KEPT: _kept,
    Invariant.GATHERED: _gathered,
    Invariant.REDUCED: _reduced,
    Invariant.WAITED: _waited,
}
