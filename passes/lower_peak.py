"""Where a step holds most, gathers later, makes gradients behind their parameters, and waits earlier for reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from zerofx.collectives import first_wait, is_bucket, issued, only_leaves, results
from zerofx.kernels import flops
from zerofx.liveness import Life, forward_life, halves
from zerofx.program import Invariant, Level, Program, tag

Move = tuple[list[Node], Node]
"""Nodes, in order, and the node before which they are to stand."""
Undo = Callable[[], None]


@dataclass(frozen=True)
class LowerPeak:
    """Moves are made only where the forecast for the step is lower with them, and at most `moves`.

    What runs beside a collective still does: an all-gather that is issued later stays before a matrix product or the
    like, if one stood between it and its wait, and a reduction that is waited for earlier stays behind one. An
    all-gather passes no other collective. A gradient that is reduced alone, and what is computed for nothing else, go
    behind the last read of its gathered parameter, which is released before the gradient is there.
    """

    name: ClassVar[str] = "lower-peak"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset(
        {Invariant.GATHERED, Invariant.REDUCED, Invariant.WAITED, Invariant.BOUNDED}
    )
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    moves: int = 16

    def __call__(self, program: Program) -> None:
        made = list[Undo]()
        for _ in range(self.moves):
            undo, lower = _lower(program)
            if undo is None:
                break
            made = [] if lower else [*made, undo]
        for undo in reversed(made):  # they made the peak shorter, but not lower
            undo()


def _lower(program: Program) -> tuple[Undo | None, bool]:
    """Makes the first move that lowers the peak, or the number of places where it is, if there is one.

    Returns what undoes it, and whether the peak is lower.
    """
    lives = _lives(program)
    now = _height(lives)
    graph, life = max(lives, key=lambda each: max(each[1].curve()))
    steps = Steps.of(graph, life)
    for move in (*_later_gathers(steps), *_later_gradients(steps), *_earlier_waits(steps)):
        undo = _make(*move)
        height = _height(_lives(program))
        if height < now:
            return undo, height[0] < now[0]
        undo()
    return None, False


def _lives(program: Program) -> list[tuple[Graph, Life]]:
    graphs = list(program.graphs.values())
    if len(graphs) == 1:
        return [(graphs[0], forward_life(graphs[0]))]
    return list(zip(graphs, halves(program.graphs["forward"], program.graphs["backward"]), strict=True))


def _height(lives: list[tuple[Graph, Life]]) -> tuple[int, int]:
    """The most bytes that are held, and at how many nodes."""
    curve = [now for _, life in lives for now in life.curve()]
    return max(curve), curve.count(max(curve))


@dataclass(frozen=True)
class Steps:
    """A graph's nodes in order, with their places; the places where it holds most, and those of matrix products."""

    nodes: list[Node]
    at: dict[Node, int]
    life: Life
    peaks: list[int]
    products: list[int]
    gathers: list[Node]
    reductions: list[Node]

    @classmethod
    def of(cls, graph: Graph, life: Life) -> Steps:
        nodes, curve = list(graph.nodes), life.curve()
        return cls(
            nodes,
            {node: place for place, node in enumerate(nodes)},
            life,
            [place for place, now in enumerate(curve) if now == max(curve)],
            [place for place, node in enumerate(nodes) if node.op == "call_function" and flops(node)],
            issued(graph, "unshard"),
            issued(graph, "reduce_grad"),
        )


def _later_gathers(steps: Steps) -> Iterator[Move]:
    """The all-gathers under way at the peak, each with the last place of the peak that it can be moved behind."""
    collectives = sorted(steps.at[node] for node in (*steps.gathers, *steps.reductions))
    for gather in steps.gathers:
        begin, end = steps.at[gather], steps.at[first_wait(gather)]
        end = min([end, *(place for place in collectives if place > begin)])
        hiding = [place for place in steps.products if begin < place < steps.at[first_wait(gather)]]
        end = min([end, *hiding[-1:]])
        behind = [place for place in steps.peaks if begin < place < end]
        if behind:
            members = [node for node in gather.users if is_bucket(gather) and steps.at[node] <= behind[-1]]
            yield [*_chunks(gather), gather, *members], steps.nodes[behind[-1] + 1]


def _chunks(gather: Node) -> list[Node]:
    """What makes the chunks of stored parts, in order: it reads nothing else, and nothing else reads it."""
    found, todo = set[Node](), list(gather.all_input_nodes)
    while todo:
        node = todo.pop()
        if node.op == "call_function":
            found.add(node)
            todo += node.all_input_nodes
    return [node for node in gather.graph.nodes if node in found]


def _later_gradients(steps: Steps) -> Iterator[Move]:
    """The gradients that are reduced alone and there at the peak together with their parameter, which is read later."""
    ends = _last_reads(steps)
    for reduction in steps.reductions:
        known = tag(reduction)
        if is_bucket(reduction) or known is None or known.params[0] not in ends:
            continue
        end = ends[known.params[0]]
        moved = [node for node in _only_for(reduction) if steps.at[node] <= end]
        if not moved or steps.at[first_wait(reduction)] <= end:
            continue
        passed = range(steps.at[moved[0]], end + 1)
        others = [steps.at[other] for other in steps.reductions if other is not reduction and reduction in moved]
        orderly = not any(place > steps.at[reduction] and place in passed for place in others)
        if orderly and any(p in passed for p in steps.peaks) and not any(_must_stay(steps.nodes[p]) for p in passed):
            yield moved, steps.nodes[end + 1]


def _last_reads(steps: Steps) -> dict[str, int]:
    """Where each gathered parameter is read for the last time, by name."""
    found: dict[str, int] = {}
    for node in steps.nodes:
        known = tag(node)
        if known is not None and known.role == "unshard" and len(known.params) == 1 and node.op == "call_function":
            for storage in steps.life.owners[node.name]:
                if storage in steps.life.spans:
                    found[known.params[0]] = max(found.get(known.params[0], 0), steps.life.spans[storage][1])
    return found


def _earlier_waits(steps: Steps) -> Iterator[Move]:
    """The reductions under way at the peak, whose gradients are let go of before it."""
    for reduction in steps.reductions:
        begin, end = steps.at[reduction], steps.at[first_wait(reduction)]
        hiding = [place for place in steps.products if begin < place < end]
        before = [place for place in steps.peaks if hiding and hiding[0] < place < end]
        parts = results(reduction)
        if before and only_leaves(reduction) and steps.nodes[before[0]] not in parts:
            yield parts, steps.nodes[before[0]]


def _only_for(reduction: Node) -> list[Node]:
    """A reduction and what is computed for nothing else, in order."""
    found = {reduction}
    for node in reversed(list(reduction.graph.nodes)):
        if node.op == "call_function" and node.users and found.issuperset(node.users):
            found.add(node)
    return [node for node in reduction.graph.nodes if node in found]


def _must_stay(node: Node) -> bool:
    """Whether the order of a node and its neighbours matters beyond what they read of each other."""
    schema = getattr(node.target, "_schema", None)
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return drawn or (schema is not None and schema.is_mutable)


def _make(nodes: list[Node], target: Node) -> Undo:
    """Moves the nodes before the target, and returns what moves them back."""
    before = [(node, node.next) for node in nodes]
    for node in nodes:
        target.prepend(node)

    def undo() -> None:
        for node, following in reversed(before):
            following.prepend(node)

    return undo
