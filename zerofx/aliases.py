"""Which values of a graph have the storage of a stored parameter, and where that is read for the last time."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

import zerofx.updating  # noqa: F401  registers the op
from zerofx.collectives import WAIT, collective, is_bucket
from zerofx.liveness import PARAMETERS, SAME_STORAGE
from zerofx.program import Program, is_view, output_tags, outputs, pair_saved, placeholders, tag

UPDATE = torch.ops.zerofx.update.default


def stored_values(program: Program, graph: Graph) -> dict[Node, str]:
    """The values of a graph that have the storage of a stored parameter, with its name, in the graph's order."""
    found: dict[Node, str] = {}
    saved = _saved_storage(program, graph)
    for node in graph.nodes:
        known = tag(node)
        if node.op == "placeholder" and known is not None and known.role in PARAMETERS:
            found[node] = known.params[0]
        elif node in saved:
            found[node] = saved[node]
        elif node.op == "call_function" and _is_same_storage(node) and node.all_input_nodes[0] in found:
            found[node] = found[node.all_input_nodes[0]]
    return found


def _saved_storage(program: Program, graph: Graph) -> dict[Node, str]:
    """The inputs of a backward that its forward has saved and that have the storage of a stored parameter."""
    forward = program.graphs.get("forward")
    if forward is None or graph is forward:
        return {}
    values = stored_values(program, forward)
    pairs = zip(outputs(forward), output_tags(forward), strict=True)
    saved = [value for value, known in pairs if value is not None and known is not None and known.role == "saved"]
    places = pair_saved([value.name for value in saved], placeholders(graph))
    return {node: values[saved[place]] for node, place in places.items() if saved[place] in values}


def last_reads(graph: Graph, values: Mapping[Node, str]) -> dict[str, Node]:
    """For each parameter with values in the graph, the node behind which none of them is read, updates aside.

    A collective reads what it sends until it has been waited for.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[str, Node] = {}
    for value, name in values.items():
        readers = [user for user in value.users if user.op != "output" and user.target is not UPDATE]
        for node in (value, *(until for reader in readers for until in _until(reader))):
            if name not in found or place[node] > place[found[name]]:
                found[name] = node
    return found


def _until(reader: Node) -> list[Node]:
    """The nodes until which a reader needs what it reads."""
    if not is_bucket(reader) and collective(reader) is None:
        return [reader]
    results = list(reader.users) if is_bucket(reader) else [reader]
    return [reader, *(user for result in results for user in result.users if user.target is WAIT)]


def _is_same_storage(node: Node) -> bool:
    return bool(node.all_input_nodes) and (
        node.target in SAME_STORAGE or node.target is operator.getitem or is_view(node)
    )
