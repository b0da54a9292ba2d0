"""Casts stored parts instead of gathered parameters, where all reads want the narrower dtype: fewer bytes travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx.edit import Replacement
from zerofx.program import CASTS, Invariant, Level, Program, cast_to, is_kept, marked_param, source

UNSHARD = torch.ops.zerofx.unshard.default


@dataclass(frozen=True)
class SinkCasts:
    """Under autocast a matmul reads its weight in bf16; a weight read in two dtypes is gathered as it is stored."""

    name: ClassVar[str] = "sink-casts"
    level: ClassVar[Level] = Level.LOGICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED, Invariant.MERGED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for marker in graph.find_nodes(op="call_function", target=UNSHARD):
                if program.layout[marked_param(marker)].dim is not None and not is_kept(marker):
                    _sink(marker)


def _sink(marker: Node) -> None:
    casts = list(marker.users)
    dtype = cast_to(casts[0]) if casts else None
    if dtype is None or any(cast_to(user) is not dtype for user in casts) or source(marker).target in CASTS:
        return
    if dtype.itemsize >= marker.meta["val"].itemsize or not dtype.is_floating_point:
        return
    new = Replacement(marker)
    part = new.call(casts[0].target, source(marker), *casts[0].args[1:], **casts[0].kwargs)
    gathered = new.call(UNSHARD, part, *marker.args[1:])
    for user in casts:
        user.replace_all_uses_with(gathered)
        marker.graph.erase_node(user)
    marker.graph.erase_node(marker)
