"""Checks what updates parameters in the backward: their gradients, and what is read of them behind it."""

from __future__ import annotations

from typing import cast

from torch.fx import Graph, Node

from zerofx.aliases import UPDATE, last_reads, stored_values
from zerofx.fault import fail
from zerofx.program import Invariant, Program, Tag, gradients, tag


def check_updated(program: Program) -> None:
    for graph in program.graphs.values():
        updates = graph.find_nodes(op="call_function", target=UPDATE)
        if updates:
            _check_once(program, updates)
            _check_reads(program, graph, updates)


def _check_once(program: Program, updates: list[Node]) -> None:
    """Each parameter gets its own gradient, in one update, and no output has another one."""
    taken = {known.params[0] for _, known in gradients(program)}
    for node in updates:
        grads, _, names = cast("tuple[list[Node], list[Node], list[str]]", node.args)
        if tag(node) != Tag("update", tuple(names)) or len(grads) != len(names):
            found = f"it takes {len(grads)} gradients of {', '.join(names)}"
            fail(program, Invariant.UPDATED, node, found, "name the parameter of each, in its tag too")
        for grad, name in zip(grads, names, strict=True):
            known = tag(grad)
            if known is not None and known != Tag("reduce_grad", (name,)):
                found = f"it takes {grad.name}, of {', '.join(known.params)}, for {name}"
                fail(program, Invariant.UPDATED, node, found, f"take the gradient of {name}")
            if name in taken:
                fail(program, Invariant.UPDATED, node, f"it is not the only gradient of {name}", "hand over the sum")
            taken.add(name)


def _check_reads(program: Program, graph: Graph, updates: list[Node]) -> None:
    place = {node: number for number, node in enumerate(graph.nodes)}
    values = stored_values(program, graph)
    reads = last_reads(graph, values)
    for node in updates:
        _, stored, names = cast("tuple[list[Node], list[Node], list[str]]", node.args)
        own = [value for value, name in values.items() if value.op == "placeholder" and name in names]
        if set(stored) != set(own):
            found = f"it writes to {', '.join(each.name for each in stored) or 'nothing'}"
            remedy = f"list all inputs that have its parameters' storage: {', '.join(each.name for each in own) or '-'}"
            fail(program, Invariant.UPDATED, node, found, remedy)
        for name in names:
            if name in reads and place[reads[name]] > place[node]:
                found = f"{reads[name].name} reads {name} behind it"
                fail(program, Invariant.UPDATED, node, found, "update behind the last read")
