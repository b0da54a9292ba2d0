"""How each parameter is stored over the data-parallel axis: decided once, read by every pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch


def chunk_rows(size: int, parts: int) -> int:
    """Rows of the largest of `parts` chunks of `size` rows, as `torch.chunk` and DTensor cut them."""
    return -(-size // parts)


def rows_at(size: int, parts: int, rank: int) -> int:
    """Rows that `rank` holds of `size` rows cut into `parts` chunks; the last ranks may hold fewer, or none."""
    chunk = chunk_rows(size, parts)
    return min(max(size - rank * chunk, 0), chunk)


class PerRank(int):
    """An int in a graph that differs by rank: the rows a rank holds of a dim, or the rows it pads.

    Its value is rank 0's, so a graph reads the same on every rank; `at(rank)` is the value for another one.
    """

    kind: Literal["rows", "pad"]
    size: int
    parts: int

    def __new__(cls, kind: Literal["rows", "pad"], size: int, parts: int) -> PerRank:
        self = super().__new__(cls, cls._value(kind, size, parts, 0))
        self.kind, self.size, self.parts = kind, size, parts
        return self

    @staticmethod
    def _value(kind: str, size: int, parts: int, rank: int) -> int:
        rows = rows_at(size, parts, rank)
        return rows if kind == "rows" else chunk_rows(size, parts) - rows

    def at(self, rank: int) -> int:
        return self._value(self.kind, self.size, self.parts, rank)

    def __repr__(self) -> str:
        return f"{self.kind}({self.size}, {self.parts})"

    def __reduce__(self) -> tuple[type[PerRank], tuple[str, int, int]]:
        return PerRank, (self.kind, self.size, self.parts)


@dataclass(frozen=True)
class ParamLayout:
    """One parameter: its whole size, and the dim it is cut on (None: replicated on every rank)."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    requires_grad: bool = True
    tied: tuple[str, ...] = ()

    def with_tied(self, tied: tuple[str, ...]) -> ParamLayout:
        return replace(self, tied=tied)

    @property
    def whole_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize

    def padded_rows(self, world: int) -> int | None:
        """Rows of the dim that is cut, with those that make its chunks equal; None for a replicated parameter."""
        return None if self.dim is None else chunk_rows(self.size[self.dim], world) * world

    def padded_bytes(self, world: int) -> int:
        """Bytes of the gathered parameter with the rows that make its chunks equal."""
        rows = self.padded_rows(world)
        if self.dim is None or not rows:
            return self.whole_bytes
        return self.whole_bytes // self.size[self.dim] * rows

    def local_size(self, world: int, rank: int) -> tuple[int, ...]:
        """Shape of what `rank` stores."""
        if self.dim is None:
            return self.size
        rows = rows_at(self.size[self.dim], world, rank)
        return (*self.size[: self.dim], rows, *self.size[self.dim + 1 :])


@dataclass(frozen=True)
class Layout:
    """All parameters of a model in registration order, tied ones once, under their first name."""

    params: tuple[ParamLayout, ...] = ()

    def __iter__(self) -> Iterator[ParamLayout]:
        return iter(self.params)

    @functools.cached_property
    def by_name(self) -> dict[str, ParamLayout]:
        return {param.name: param for param in self.params}

    def __getitem__(self, name: str) -> ParamLayout:
        if param := self.by_name.get(name):
            return param
        raise KeyError(f"the layout has no parameter {name!r}")

    def gradient_bytes(self, world: int) -> int:
        """Bytes of the whole gradients of all parameters that are trained and stored in parts."""
        return sum(param.padded_bytes(world) for param in self.params if param.requires_grad and param.dim is not None)

    def of(self, names: Iterable[str]) -> Layout:
        """The layout of these parameters alone."""
        wanted = set(names)
        return Layout(tuple(param for param in self.params if param.name in wanted))
