"""Cuts what is exchanged into rounds of a bounded size, and sums in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """Elements `start` to `end` of the tensor at `place` of a list."""

    place: int
    start: int
    end: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements, of contiguous tensors."""
        return tensors[self.place].view(-1)[self.start : self.end]

    def of_rows(self, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The elements of each rank's row of the tensor."""
        return [row.view(-1)[self.start : self.end] for row in rows[self.place]]


def rounds(sizes: Sequence[int], limit: int) -> Iterator[list[Cut]]:
    """Cuts tensors of these sizes, in rounds of at most `limit` elements each."""
    cuts, free = list[Cut](), max(1, limit)
    for place, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + free)
            cuts.append(Cut(place, start, end))
            free -= end - start
            start = end
            if not free:
                yield cuts
                cuts, free = [], max(1, limit)
    if cuts:
        yield cuts


def mean_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """The mean over ranks, of which `out` may be a part of the first two."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    out.div_(len(parts))
