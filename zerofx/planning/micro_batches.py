"""Tapes of a micro-batch of any number of rows, from two that are traced: numbers grow by the same from row to row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zerofx.planning.capture import Asked, Shapes
from zerofx.planning.tape import DepthError, Tape

TRACED = (2, 4)
"""Rows of the micro-batches that are traced; one alone would make dims of one element, which other graphs come of."""


@dataclass
class Rows:
    """A model's tapes for micro-batches of any number of rows of a batch whose first dim, of all tensors that have as
    many there, are rows.
    """

    shapes: Shapes
    rows: int
    made: dict[int, Shapes] = field(default_factory=dict)

    @classmethod
    def of(cls, model_fn: Callable[[], nn.Module], batch: Sequence[Any], rows: int) -> Rows:
        return cls(Shapes(model_fn, batch), rows)

    def tape(self, asked: Asked, rows: int, blocks: int) -> Tape:
        """The tape of so many rows and blocks; traced where graphs of other rows differ in more than numbers."""
        fewer, more = (self.of_rows(traced).tape(asked, blocks) for traced in TRACED)
        try:
            return fewer.larger(more, (rows - TRACED[0]) / (TRACED[1] - TRACED[0]))
        except DepthError:
            return self.of_rows(rows).tape(asked, blocks)

    def of_rows(self, rows: int) -> Shapes:
        """The shapes of micro-batches of so many rows."""
        if rows not in self.made:
            shapes = self.made[rows] = copy.copy(self.shapes)
            shapes.tapes = {}
            with shapes.mode:
                shapes.inputs = tree_map_only(torch.Tensor, lambda tensor: self._resized(tensor, rows), shapes.inputs)
        return self.made[rows]

    def uncut(self) -> None:
        """Takes the model as a whole from here on, without looking for blocks."""
        self.shapes.uncut()
        self.made.clear()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the batch."""
        return sum(tensor.nbytes for tensor in self.of_rows(TRACED[0]).tensors) // TRACED[0]

    def _resized(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != self.rows:
            return tensor
        return tensor.new_empty((rows, *tensor.shape[1:]), requires_grad=tensor.requires_grad)
