"""Releases each gathered parameter after its last use in the forward: the backward gathers it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from zerofx.program import Invariant, Level, Program, mark_recomputed, marked_param


@dataclass(frozen=True)
class ReleaseAfterUse:
    """Marks every unshard of a sharded parameter as recomputed, so that the partition saves none."""

    name: ClassVar[str] = "release-after-use"
    level: ClassVar[Level] = Level.LOGICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED, Invariant.MERGED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.RELEASED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for node in graph.find_nodes(op="call_function", target=torch.ops.zerofx.unshard.default):
                if program.layout[marked_param(node)].dim is not None:
                    mark_recomputed(node)
