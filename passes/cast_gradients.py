"""With `reduce_dtype`, reduces gradients in that dtype and casts the means back: half the bytes travel for bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx.edit import Replacement
from zerofx.program import Invariant, Level, Program, cast_to, source
from zerofx.show import DTYPES

REDUCE, CAST = torch.ops.zerofx.reduce_grad.default, torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class CastGradients:
    """A gradient that autocast's backward has just cast from that dtype is reduced as it was before the cast.

    It comes behind the partition, which would merge the reductions of gradients that are equal.
    """

    name: ClassVar[str] = "cast-gradients"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MERGED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "changes"

    dtype: str = "bf16"

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for marker in graph.find_nodes(op="call_function", target=REDUCE):
                _reduce_in(DTYPES[self.dtype], marker)


def _reduce_in(dtype: torch.dtype, marker: Node) -> None:
    grad = whole = source(marker)
    stored = grad.meta["val"].dtype
    if stored is dtype or not stored.is_floating_point:
        return
    new = Replacement(marker)
    if cast_to(grad) is stored and source(grad).meta["val"].dtype is dtype:
        grad = source(grad)
    else:
        grad = new.call(CAST, grad, dtype)
    reduced = new.call(REDUCE, grad, *marker.args[1:])
    new.finish(new.call(CAST, reduced, stored))
    if not whole.users:
        marker.graph.erase_node(whole)
