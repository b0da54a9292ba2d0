"""Waits for reductions of gradients as late as possible, so that they run beside the computation behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zerofx.collectives import issued, only_leaves, results
from zerofx.program import Invariant, Level, Program, output_node


@dataclass(frozen=True)
class DelayWaits:
    """A reduction is waited for before one more than `under_way` would be under way; a bucket counts as one."""

    name: ClassVar[str] = "delay-waits"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.REDUCED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.BOUNDED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    under_way: int = 2

    def __call__(self, program: Program) -> None:
        program.under_way["reduce_grad"] = self.under_way
        for graph in program.graphs.values():
            reductions = issued(graph, "reduce_grad")
            later = [*reductions[self.under_way :], *[output_node(graph)] * self.under_way]
            for reduction, place in zip(reductions, later, strict=False):
                if only_leaves(reduction):
                    for node in results(reduction):
                        place.prepend(node)
