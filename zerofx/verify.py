"""Checks that a program keeps its invariants, and says what is wrong with it, where, and what would mend it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zerofx.layout import PerRank
from zerofx.ops import REPLICATED
from zerofx.program import Invariant, Program, Tag, output_node, output_tags, outputs, placeholders, tag
from zerofx.text import show_graph

aten, c10d, zerofx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zerofx
UNSHARD, REDUCE = zerofx.unshard.default, zerofx.reduce_grad.default
WAIT = c10d.wait_tensor.default
GATHERS = {c10d.all_gather_into_tensor.default}
REDUCTIONS = {c10d.reduce_scatter_tensor.default, c10d.all_reduce.default}
# Ops through which a gathered parameter stays the same data.
SAME_DATA = {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten.reshape.default, aten.slice.Tensor,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.constant_pad_nd.default, aten._to_copy.default, aten._unsafe_view.default, WAIT,
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


def _fail(program: Program, invariant: Invariant, node: Node, found: str, remedy: str) -> None:
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


def _marked(program: Program) -> None:
    world = program.mesh.axis("dp").size
    for graph, node, known in _stored(program):
        param = program.layout[known.params[0]]
        if known.role == "param":
            _fail(program, Invariant.MARKED, node, "it is a whole parameter", "run choose-layout first")
        for user in node.users:
            if user is output_node(graph) and _is_saved_only(graph, node):
                continue
            if user.target is not UNSHARD:
                found = f"the stored part is read by {user.name}"
                _fail(program, Invariant.MARKED, node, found, "read it through zerofx::unshard")
            size, dim, rows = user.args[1], user.args[2], user.args[3]
            wanted = REPLICATED if param.dim is None else param.dim
            held = 0 if param.dim is None else PerRank("rows", param.size[param.dim], world)
            if tuple(size) != param.size or dim != wanted or rows != held:
                found = f"it unshards {size} on dim {dim} with {rows} rows"
                remedy = f"the layout says {list(param.size)} on dim {wanted} with {held} rows"
                _fail(program, Invariant.MARKED, user, found, remedy)
    for value, known in _gradients(program):
        if not _comes_from(value, {REDUCE}):
            found = f"the gradient of {known.params[0]} is not reduced"
            _fail(program, Invariant.MARKED, value, found, "pass it through zerofx::reduce_grad")


def _comes_from(node: Node, targets: set[object]) -> bool:
    """Whether every way from the node back leads to one of the targets, through sums and casts of the stored part."""
    if node.target in targets:
        return True
    if node.target in {aten.add.Tensor, aten._to_copy.default, aten.mul.Tensor, *SAME_DATA}:
        return all(_comes_from(arg, targets) for arg in node.all_input_nodes)
    return False


def _merged(program: Program) -> None:
    for target, remedy in ((UNSHARD, "merge the reads"), (REDUCE, "add the gradients before they are reduced")):
        for graph in program.graphs.values():
            counts: Counter[str] = Counter()
            for node in graph.find_nodes(op="call_function", target=target):
                name = node.meta["zerofx"].params[0]
                counts[name] += 1
                if counts[name] > 1:
                    _fail(program, Invariant.MERGED, node, f"the second {target.name()} of {name}", remedy)


def _released(program: Program) -> None:
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            cut = program.layout[node.meta["zerofx"].params[0]].dim is not None
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
    world = program.mesh.axis("dp").size
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=UNSHARD):
            _fail(program, Invariant.GATHERED, node, "a marker is left", "replace it by an all-gather")
    for graph, node, known in _stored(program):
        if known.role != "shard" or world == 1:
            continue
        for user in node.users:
            if user is output_node(graph) and _is_saved_only(graph, node):
                continue
            if tag(user) != Tag("unshard", known.params):
                found = f"the shard is read by {user.name}"
                _fail(program, Invariant.GATHERED, node, found, "read the gathered parameter")
    for graph in program.graphs.values():
        for node in graph.nodes:
            if node.target in GATHERS and (known := tag(node)) and known.role == "unshard":
                axis = program.mesh.axis_of_group(node.args[2])
                if node.args[1] != axis.size:
                    found = f"it gathers from {node.args[1]} ranks"
                    _fail(program, Invariant.GATHERED, node, found, f"the axis {axis.name} has {axis.size}")


def _reduced(program: Program) -> None:
    world = program.mesh.axis("dp").size
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=REDUCE):
            _fail(program, Invariant.REDUCED, node, "a marker is left", "replace it by a reduction")
    if world == 1:
        return
    for value, known in _gradients(program):
        count = _reductions_of(value, known)
        if count != 1:
            found = f"the gradient of {known.params[0]} passes {count} reductions"
            _fail(program, Invariant.REDUCED, value, found, "reduce it exactly once")


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
