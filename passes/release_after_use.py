"""Releases each gathered parameter after its last use in the forward: the backward gathers it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx.program import CASTS, Invariant, Level, Program, mark_recomputed, mark_saved, marked_param, source
from zerofx.verify import SAME_DATA


@dataclass(frozen=True)
class ReleaseAfterUse:
    """Marks every unshard of a sharded parameter, its views and casts as recomputed: the partition saves none.

    Those of the parameters in `keep` are marked as saved: the backward does not gather them again.
    """

    name: ClassVar[str] = "release-after-use"
    level: ClassVar[Level] = Level.LOGICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED, Invariant.MERGED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.RELEASED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    keep: tuple[str, ...] = ()

    def __call__(self, program: Program) -> None:
        program.kept = frozenset(self.keep)
        for graph in program.graphs.values():
            for node in graph.find_nodes(op="call_function", target=torch.ops.zerofx.unshard.default):
                if marked_param(node) in program.kept:
                    mark_saved(node)
                elif program.layout[marked_param(node)].dim is not None:
                    _release(node)
                    if source(node).target in CASTS:
                        mark_recomputed(source(node))


def _release(gathered: Node) -> None:
    todo = [gathered]
    while todo:
        node = todo.pop()
        mark_recomputed(node)
        todo += [user for user in node.users if user.target in SAME_DATA]
