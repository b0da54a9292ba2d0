"""Checks of the physical invariants: how parameters are gathered, gradients reduced and collectives waited for."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from zerofx.aliases import UPDATE
from zerofx.collectives import (
    WAIT,
    Collective,
    collective,
    first_wait,
    is_bucket,
    is_gather,
    is_reduction,
    issued,
)
from zerofx.edit import any_arg
from zerofx.fault import fail
from zerofx.layout import ParamLayout, PerRank
from zerofx.program import (
    Invariant,
    Program,
    Tag,
    gradients,
    handed_over,
    is_saved_only,
    output_node,
    stored_parameters,
    tag,
)
from zerofx.show import DTYPE_NAMES

c10d, zerofx = torch.ops._c10d_functional, torch.ops.zerofx
UNSHARD, REDUCE = zerofx.unshard.default, zerofx.reduce_grad.default


def check_gathered(program: Program) -> None:
    axis = program.mesh.axis("dp")
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            fail(program, Invariant.GATHERED, node, "a marker is left", "replace it by an all-gather")
    for graph, node, known in stored_parameters(program):
        if known.role == "shard" and axis.size > 1:
            _check_is_gathered(program, graph, node, known)
    for graph in program.graphs.values():
        for node in graph.nodes:
            replaced = tag(node)
            if replaced is not None and replaced.role == "unshard":
                _check_gather(program, node, replaced)


def _check_gather(program: Program, node: Node, known: Tag) -> None:
    if is_bucket(node):
        _check_bucket(program, Invariant.GATHERED, node, known)
        return
    axis, param = program.mesh.axis("dp"), program.layout[known.params[0]]
    sent = collective(node)
    if sent is not None and tag(sent.source) not in (known, Tag("shard", known.params)):
        found, remedy = f"it gathers {sent.source.name}", f"gather the stored part of {param.name}"
        fail(program, Invariant.GATHERED, node, found, remedy)
    if sent is not None and sent.args != (axis.size, axis.group):
        found = f"it gathers from {sent.args[0]} ranks over {sent.args[1]}"
        fail(program, Invariant.GATHERED, node, found, f"the axis dp has {axis.size} ranks, over {axis.group}")
    if sent is not None and _misses_per_rank(node, known, program):
        remedy = f"pad them by pad({param.size[param.dim or 0]}, {axis.size})"
        fail(program, Invariant.GATHERED, node, "it gathers chunks that differ by rank", remedy)
    size = list(node.meta["val"].shape)
    if size != list(param.size) and not all(_goes_on(user, known) for user in node.users):
        found, remedy = f"it is read with the shape {size}", f"cut it to {list(param.size)} behind the all-gather"
        fail(program, Invariant.GATHERED, node, found, remedy)


def _check_bucket(program: Program, invariant: Invariant, bucket: Node, known: Tag) -> None:
    """A bucket's tag names the parameter of each place, which is that of the result taken from there."""
    members = cast("list[Node]", bucket.args[0])
    if len(known.params) != len(members):
        found = f"its tag names {', '.join(known.params)} for {len(members)} tensors"
        fail(program, invariant, bucket, found, "name the parameter of each place")
    dtypes = sorted({str(member.meta["val"].dtype).removeprefix("torch.") for member in members})
    if len(dtypes) > 1:
        fail(program, invariant, bucket, f"its tensors are {', '.join(dtypes)}", "give each dtype a bucket of its own")
    for user in bucket.users:
        taken = known.params[cast(int, user.args[1])] if user.target is operator.getitem else None
        if taken is not None and tag(user) != Tag(known.role, (taken,)):
            remedy = "tag it as that, or take the place of its own parameter"
            fail(program, invariant, user, f"it takes place {user.args[1]}, which is that of {taken}", remedy)


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
            if node is shard and user.target is UPDATE:
                continue
            if node is shard and user is output_node(graph) and is_saved_only(graph, node):
                continue
            if user is output_node(graph) or not _goes_on(user, Tag("unshard", known.params)):
                found = f"the shard is read by {user.name}"
                fail(program, Invariant.GATHERED, node, found, "read the gathered parameter")
            if not is_gather(user) and not is_bucket(user):
                todo.append(user)


def check_reduced(program: Program) -> None:
    axis = program.mesh.axis("dp")
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=REDUCE):
            fail(program, Invariant.REDUCED, node, "a marker is left", "replace it by a reduction")
    if axis.size == 1:
        return
    for graph in program.graphs.values():
        for node in graph.nodes:
            known = tag(node)
            if known is None or known.role != "reduce_grad":
                continue
            if is_bucket(node):
                _check_bucket(program, Invariant.REDUCED, node, known)
            elif is_reduction(node):
                _check_reduction(program, node, program.layout[known.params[0]])
    for value, known in chain(gradients(program), handed_over(program)):
        (name,) = known.params
        own = Tag("reduce_grad", (name,))
        count = sum(is_reduction(node) for node in _chain(value, own))
        if count != 1:
            found = f"the gradient of {name} passes {count} reductions"
            fail(program, Invariant.REDUCED, value, found, "reduce it exactly once")
        size, stored = list(value.meta["val"].shape), list(program.layout[name].local_size(axis.size, 0))
        if size != stored or _misses_per_rank(value, own, program):
            found = f"the gradient of {name} has the shape {size} on every rank"
            fail(program, Invariant.REDUCED, value, found, "cut it to the rows that each rank stores")
        found_dtype, dtype = value.meta["val"].dtype, program.layout[name].dtype
        if found_dtype is not dtype:
            found = f"the gradient of {name} is {DTYPE_NAMES[found_dtype]}"
            fail(program, Invariant.REDUCED, value, found, f"cast it back to {DTYPE_NAMES[dtype]}, as the parameter is")
    check_partial(program, Invariant.REDUCED)


def check_partial(program: Program, invariant: Invariant) -> None:
    """A gradient that waits is whole, in the parameter's dtype, and no reduction is behind it."""
    seen = set[Node]()
    for value, known in gradients(program, "partial"):
        param = program.layout[known.params[0]]
        todo = [value]
        while todo:
            node = todo.pop()
            if (tag(node) or Tag("")).role == "reduce_grad":
                found = f"the gradient of {param.name} is reduced, but is to wait for that"
                fail(program, invariant, node, found, "return it as this rank has it")
            if node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        size, dtype = tuple(value.meta["val"].shape), value.meta["val"].dtype
        if (size, dtype) != (param.size, param.dtype):
            found = f"the gradient of {param.name} that waits is {DTYPE_NAMES[dtype]}{list(size)}"
            fail(program, invariant, value, found, f"give it as {DTYPE_NAMES[param.dtype]}{list(param.size)}")


def _check_reduction(program: Program, node: Node, param: ParamLayout) -> None:
    axis = program.mesh.axis("dp")
    right: tuple[Any, ...] = (c10d.reduce_scatter_tensor.default, "avg", axis.size, axis.group)
    if param.dim is None:
        right = (c10d.all_reduce.default, "avg", axis.group)
    sent = cast(Collective, collective(node))
    if (sent.target, *sent.args) != right:
        found = f"it is {_call(sent.target, *sent.args)}"
        fail(program, Invariant.REDUCED, node, found, f"{param.name} needs {_call(*right)}")
    whose = tag(sent.source)
    if whose is not None and whose.role == "reduce_grad" and whose != tag(node):
        found, remedy = f"it reduces {sent.source.name}, of {whose.params[0]}", f"reduce the gradient of {param.name}"
        fail(program, Invariant.REDUCED, node, found, remedy)
    rows = param.padded_rows(axis.size)
    if rows is not None and sent.source.meta["val"].shape[0] != rows:
        found = f"it scatters {sent.source.meta['val'].shape[0]} rows over {axis.size} ranks"
        fail(program, Invariant.REDUCED, node, found, f"pad them to {rows}")


def _call(target: Any, *args: Any) -> str:
    return f"{target.name().split('::')[1]}({', '.join(map(repr, args))})"


def check_bounded(program: Program) -> None:
    for graph in program.graphs.values():
        for role, allowed in program.under_way.items():
            waits = {node: first_wait(node) for node in issued(graph, role)}
            under_way = 0
            for node in graph.nodes:
                under_way += (node in waits) - list(waits.values()).count(node)
                if node in waits and under_way > allowed:
                    found = f"with it {under_way} collectives of {role} are under way"
                    remedy = f"wait for others first: {allowed} may be"
                    fail(program, Invariant.BOUNDED, node, found, remedy)


def check_waited(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.nodes:
            unfinished = str(node.target).startswith("_c10d_functional.") or collective(node) is not None
            if not unfinished or node.target is WAIT:
                continue
            for user in node.users:
                if user.target is not (operator.getitem if is_bucket(node) else WAIT):
                    found = f"{user.name} reads it before it is complete"
                    fail(program, Invariant.WAITED, node, found, "read the result of wait_tensor")
