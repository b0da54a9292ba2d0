"""Cuts a stage's backward into the half that makes the gradients of its inputs and the half for its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch

Compiler = Callable[[GraphModule], Callable[[list[Any]], Sequence[Any]]]


@dataclass(frozen=True)
class Later:
    """Makes the gradients of a stage's weights, in their order, of tensors in these storages."""

    make: Callable[[], Sequence[Tensor | None]]
    storages: frozenset[int]

    def __call__(self) -> Sequence[Tensor | None]:
        return self.make()


class Halves:
    """The backward of a stage for one call of its forward at a time.

    While `apart` is set it makes the gradients of the inputs only, and puts what makes those of the weights in `later`.
    """

    def __init__(self, weights: Sequence[int], compiler: Compiler) -> None:
        self.weights, self.compiler = list(weights), compiler
        self.apart, self.later = False, list[Later]()

    def compile(self, backward: GraphModule, _: Any = None) -> Callable[[list[Any]], Sequence[Any]]:
        """A backward compiler of AOTAutograd: the graph's outputs are the gradients of the forward's inputs."""
        wanted = [place for place in self.weights if _outputs(backward.graph)[place] is not None]
        first, second = cut_backward(backward, wanted)
        others = len(_outputs(backward.graph)) - len(wanted)
        run_first, run_second = self.compiler(first), self.compiler(second)

        def run(args: list[Any]) -> Sequence[Any]:
            found = list(run_first(args))
            made, live = found[:others], found[others:]
            del found
            if self.apart:
                reads = frozenset(map(_torch.storage_id, live))
                self.later.append(Later(lambda: self._in_order(wanted, run_second(live)), reads))
                return _merge(made, wanted, [None] * len(wanted))
            return _merge(made, wanted, list(run_second(live)))

        return _torch.boxed(run)

    def _in_order(self, wanted: Sequence[int], made: Sequence[Tensor]) -> list[Tensor | None]:
        known = dict(zip(wanted, made, strict=True))
        return [known.get(place) for place in self.weights]


def cut_backward(backward: GraphModule, weights: Sequence[int]) -> tuple[GraphModule, GraphModule]:
    """The two halves of a backward whose outputs at the places `weights` are the gradients of weights.

    The first one returns all other outputs, and then what the second one reads, which returns those of the weights.
    """
    outputs = _outputs(backward.graph)
    late = [outputs[place] for place in weights]
    early = [value for place, value in enumerate(outputs) if place not in set(weights)]
    nodes = [node for node in backward.graph.nodes if node.op != "output"]
    writes = [node for node in nodes if _writes(node)]
    first = _behind([*early, *writes]) | {node for node in nodes if node.op == "placeholder"}
    second = _behind(late) - first
    read = {source for node in second for source in node.all_input_nodes} | {n for n in late if n is not None}
    live = [node for node in nodes if node in first and node in read]
    return (
        _part(backward, [n for n in nodes if n in first], [], [*early, *live]),
        _part(backward, [n for n in nodes if n in second], live, late),
    )


def _part(
    whole: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node | None]
) -> GraphModule:
    graph, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(None if node is None else copies[node] for node in outputs))
    graph.lint()
    return GraphModule(whole, graph)


def _behind(nodes: Sequence[Node | None]) -> set[Node]:
    """These nodes and all that they are computed from."""
    wanted = {node for node in nodes if node is not None}
    if not wanted:
        return wanted
    graph, end = next(iter(wanted)).graph, object()
    flow = nx.DiGraph((source, node) for node in graph.nodes for source in node.all_input_nodes)
    flow.add_edges_from((node, end) for node in wanted)
    return set(nx.ancestors(flow, end))


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _outputs(graph: Graph) -> list[Node | None]:
    (end,) = graph.find_nodes(op="output")
    return [value if isinstance(value, Node) else None for value in end.args[0]]


def _merge(others: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """The values at their places, and the others around them."""
    merged = list(others)
    for place, value in zip(places, values, strict=True):  # places rise
        merged.insert(place, value)
    return merged
