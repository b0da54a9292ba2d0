"""Checks that a program keeps its invariants, and says what is wrong with it, where, and what would mend it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NoReturn, cast

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zerofx.layout import ParamLayout, PerRank
from zerofx.mesh import Axis
from zerofx.ops import REPLICATED
from zerofx.program import Invariant, Program, Tag, marked_param, output_node, output_tags, outputs, placeholders, tag
from zerofx.text import show_graph

aten, c10d, zerofx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zerofx
UNSHARD, REDUCE = zerofx.unshard.default, zerofx.reduce_grad.default
WAIT = c10d.wait_tensor.default
GATHERS = {c10d.all_gather_into_tensor.default}
ALL_REDUCES = {c10d.all_reduce.default}
REDUCTIONS = {c10d.reduce_scatter_tensor.default, *ALL_REDUCES}
# Ops through which a gathered parameter stays the same data.
SAME_DATA = {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten.reshape.default,
    aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.expand.default,
    aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
    aten.as_strided.default, aten.view.dtype, aten.alias.default, aten.detach.default, operator.getitem,
    aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default, aten._unsafe_view.default, WAIT,
    torch.ops.prims.convert_element_type.default,
}  # fmt: skip


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
    source, size, dim, rows, group = cast("tuple[Node, list[int], int, int, str]", node.args)
    known = tag(source)
    if known is None or known.role not in ("shard", "replica") or known.params != (param.name,):
        found = f"it unshards {source.name}"
        _fail(program, Invariant.MARKED, node, found, f"unshard the stored part of {param.name}")
    if tuple(size) != param.size or not _fits(program, param, dim, rows, group):
        found = f"it unshards {list(size)} on dim {dim} with {rows} rows over {group}"
        _fail(program, Invariant.MARKED, node, found, _layout_says(program, param))


def _check_reduce_grad(program: Program, node: Node, param: ParamLayout) -> None:
    grad, dim, rows, group = cast("tuple[Node, int, int, str]", node.args)
    size = grad.meta["val"].shape
    if _comes_from(grad, Tag("reduce_grad", (param.name,))):
        _fail(program, Invariant.MARKED, node, f"{grad.name} is reduced already", "reduce each gradient once")
    if tuple(size) != param.size or not _fits(program, param, dim, rows, group):
        found = f"it reduces {list(size)} on dim {dim} with {rows} rows over {group}"
        _fail(program, Invariant.MARKED, node, found, _layout_says(program, param))


def _fits(program: Program, param: ParamLayout, dim: int, rows: int, group: str) -> bool:
    """Whether a marker's last arguments are those of the layout, on every rank."""
    axis = program.mesh.axis("dp")
    if param.dim is None:
        return (dim, group) == (REPLICATED, axis.group)
    held = [rows.at(rank) if isinstance(rows, PerRank) else rows for rank in range(axis.size)]
    wanted = [param.local_size(axis.size, rank)[param.dim] for rank in range(axis.size)]
    return (dim, group, held) == (param.dim, axis.group, wanted)


def _layout_says(program: Program, param: ParamLayout) -> str:
    axis = program.mesh.axis("dp")
    if param.dim is None:
        return f"the layout says {list(param.size)}, replicated over {axis.group}"
    held = PerRank("rows", param.size[param.dim], axis.size)
    return f"the layout says {list(param.size)} on dim {param.dim} with {held} rows over {axis.group}"


def _comes_from(node: Node, marker: Tag) -> bool:
    """Whether every way from the node back leads to a marker of that tag, through sums and casts of the stored part."""
    if node.target is REDUCE:
        return tag(node) == marker
    if node.target in {aten.add.Tensor, aten.mul.Tensor, *SAME_DATA}:
        return all(_comes_from(arg, marker) for arg in node.all_input_nodes)
    return False


def _merged(program: Program) -> None:
    for target, remedy in ((UNSHARD, "merge the reads"), (REDUCE, "add the gradients before they are reduced")):
        for graph in program.graphs.values():
            counts: Counter[str] = Counter()
            for node in graph.find_nodes(op="call_function", target=target):
                name = marked_param(node)
                counts[name] += 1
                if counts[name] > 1:
                    _fail(program, Invariant.MERGED, node, f"the second {target} of {name}", remedy)


def _released(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            cut = program.layout[marked_param(node)].dim is not None
            joint = "joint" in program.graphs
            if cut and joint and node.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
                _fail(program, Invariant.RELEASED, node, "it may be saved", "tag it MUST_RECOMPUTE")
        for value, known in zip(outputs(graph), output_tags(graph), strict=True):
            if value is None or known is None or known.role != "saved":
                continue
            origin = _gathered_origin(value, program)
            if origin is not None:
                found = f"it holds the gathered {', '.join(origin)} until the backward"
                _fail(program, Invariant.RELEASED, value, found, "save the shard and gather again")


def _gathered_origin(node: Node, program: Program) -> tuple[str, ...] | None:
    """The parameters whose gathered data a node holds, or None."""
    while node.op == "call_function":
        known = tag(node)
        if node.target is UNSHARD or node.target in GATHERS:
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
            if replaced is None or replaced.role != "unshard":
                continue
            if node.target in GATHERS and (node.args[1], node.args[2]) != (axis.size, axis.group):
                found = f"it gathers from {node.args[1]} ranks over {node.args[2]}"
                remedy = f"the axis dp has {axis.size} ranks, over {axis.group}"
                _fail(program, Invariant.GATHERED, node, found, remedy)
            size = program.layout[replaced.params[0]].size
            if any(tag(user) != replaced for user in node.users) and tuple(node.meta["val"].shape) != size:
                found = f"it is read with the shape {list(node.meta['val'].shape)}"
                _fail(program, Invariant.GATHERED, node, found, f"cut it to {list(size)} behind the all-gather")


def _check_is_gathered(program: Program, graph: Graph, shard: Node, known: Tag) -> None:
    """All that reads the shard is on its way to an all-gather, which only what replaced its marker is."""
    todo = [shard]
    while todo:
        node = todo.pop()
        for user in node.users:
            if node is shard and user is output_node(graph) and _is_saved_only(graph, node):
                continue
            if user is output_node(graph) or tag(user) != Tag("unshard", known.params):
                found = f"the shard is read by {user.name}"
                _fail(program, Invariant.GATHERED, node, found, "read the gathered parameter")
            if user.target not in GATHERS:
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
            if node.target in REDUCTIONS and (known := tag(node)) and known.role == "reduce_grad":
                _check_reduction(program, node, axis)
    for value, known in _gradients(program):
        count = _reductions_of(value, known)
        if count != 1:
            found = f"the gradient of {known.params[0]} passes {count} reductions"
            _fail(program, Invariant.REDUCED, value, found, "reduce it exactly once")
        stored = program.layout[known.params[0]].local_size(axis.size, 0)
        if tuple(value.meta["val"].shape) != stored:
            found = f"the gradient of {known.params[0]} has the shape {list(value.meta['val'].shape)}"
            _fail(program, Invariant.REDUCED, value, found, f"reduce it to the {list(stored)} that the rank stores")


def _check_reduction(program: Program, node: Node, axis: Axis) -> None:
    _, how, *ranks = node.args
    if how != "avg":
        _fail(program, Invariant.REDUCED, node, f"it reduces with {how!r}", "gradients are averaged: use 'avg'")
    wanted = [axis.group] if node.target in ALL_REDUCES else [axis.size, axis.group]
    if ranks != wanted:
        found = f"it reduces over {', '.join(map(str, ranks))}"
        _fail(program, Invariant.REDUCED, node, found, f"the axis dp is {', '.join(map(str, wanted))}")


def _reductions_of(node: Node, grad: Tag) -> int:
    """Reductions tagged with the gradient's parameter on the way back from an output, as far as its chain goes."""
    count, todo, seen = 0, [node], set[Node]()
    while todo:
        node = todo.pop()
        if node in seen or tag(node) != Tag("reduce_grad", grad.params):
            continue
        seen.add(node)
        count += node.target in REDUCTIONS
        todo += node.all_input_nodes
    return count


def _waited(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.nodes:
            if not str(node.target).startswith("_c10d_functional.") or node.target is WAIT:
                continue
            for user in node.users:
                if user.target is not WAIT:
                    found = f"{user.name} reads it before it is complete"
                    _fail(program, Invariant.WAITED, node, found, "read the result of wait_tensor")


CHECKS: dict[Invariant, Callable[[Program], None]] = {
    Invariant.MARKED: _marked,
    Invariant.MERGED: _merged,
    Invariant.RELEASED: _released,
    Invariant.GATHERED: _gathered,
    Invariant.REDUCED: _reduced,
    Invariant.WAITED: _waited,
}
