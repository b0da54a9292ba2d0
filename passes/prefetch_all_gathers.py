"""Issues all-gathers ahead of their first use, so that they run beside the computation before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from zerofx.collectives import first_wait, issued
from zerofx.program import Invariant, Level, Program


@dataclass(frozen=True)
class PrefetchAllGathers:
    """An all-gather is issued before the one `ahead` places before it is waited for; a bucket counts as one."""

    name: ClassVar[str] = "prefetch-all-gathers"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.GATHERED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.BOUNDED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    ahead: int = 1

    def __call__(self, program: Program) -> None:
        program.under_way["unshard"] = self.ahead + 1
        for graph in program.graphs.values():
            gathers = issued(graph, "unshard")
            waits = [first_wait(gather) for gather in gathers]
            for place, gather in enumerate(gathers[1:], 1):
                _issue_before(gather, waits[max(0, place - self.ahead)])


def _issue_before(gather: Node, place: Node) -> None:
    if place is first_wait(gather):
        return
    for step in reversed(list(_inputs(gather))):
        place.prepend(step)
    place.prepend(gather)


def _inputs(gather: Node) -> Iterator[Node]:
    """What makes the chunks of stored parts, last node first: it reads nothing else."""
    todo = gather.all_input_nodes
    while todo:
        node = todo.pop()
        if node.op == "call_function":
            yield node
            todo += node.all_input_nodes
