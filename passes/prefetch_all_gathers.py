"""Issues all-gathers ahead of their first use, so that they run beside the computation before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from zerofx.collectives import chunk_steps, first_wait, issued
from zerofx.program import Invariant, Level, Program, output_node


@dataclass(frozen=True)
class PrefetchAllGathers:
    """An all-gather is issued before the one `ahead` places before it is waited for; a bucket counts as one.

    The first `ahead` are issued where the graph begins.
    """

    name: ClassVar[str] = "prefetch-all-gathers"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.GATHERED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.BOUNDED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    ahead: int = 1

    def __call__(self, program: Program) -> None:
        program.under_way["unshard"] = self.ahead + 1
        for graph in program.graphs.values() if self.ahead else ():
            gathers = issued(graph, "unshard")
            waits = [first_wait(gather) for gather in gathers]
            places = [_beginning(graph, gathers[: self.ahead])] * self.ahead + waits
            for gather, place in zip(gathers, places, strict=False):
                for node in (*chunk_steps(gather), gather):
                    place.prepend(node)


def _beginning(graph: Graph, first: list[Node]) -> Node:
    """The first node that is neither an input nor part of the first gathers."""
    own = {*first, *(step for gather in first for step in chunk_steps(gather))}
    node = output_node(graph)
    for other in reversed(graph.nodes):
        if other.op not in ("placeholder", "get_attr") and other not in own:
            node = other
    return node
