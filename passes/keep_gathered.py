"""Keeps each gathered parameter from the forward for the backward, so that it is gathered once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from zerofx.program import Invariant, Level, Program, mark_saved

UNSHARD = torch.ops.zerofx.unshard.default


@dataclass(frozen=True)
class KeepGathered:
    """Marks every unshard as saved: the partition may not compute one again in the backward."""

    name: ClassVar[str] = "keep-gathered"
    level: ClassVar[Level] = Level.LOGICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED, Invariant.MERGED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.KEPT})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for node in graph.find_nodes(op="call_function", target=UNSHARD):
                mark_saved(node)
