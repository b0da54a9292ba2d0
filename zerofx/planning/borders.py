"""What crosses from block to block, and how much of what is around the blocks comes before them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from zerofx.config import PRECISIONS, ConfigError
from zerofx.pipeline import PipelineError
from zerofx.planning.capture import Asked, Shapes
from zerofx.planning.hardware import Hardware
from zerofx.stage_line import Line
from zerofx.whole_graph import WithoutData, modules_of

BLOCKS = 2
"""Blocks of the model that is looked at."""


@dataclass(frozen=True)
class Borders:
    """`crossing` are the bytes of a micro-batch that one block hands to the next. `head_time` and `head_memory` are the
    parts of the seconds, and of the activations, of all that is outside the blocks that come before them.
    """

    crossing: int
    head_time: float
    head_memory: float


def borders(shapes: Shapes, asked: Asked, hardware: Hardware) -> Borders:
    """Cuts the line of a model of a few blocks at the blocks' borders.

    Raises ConfigError for a model without equal blocks, or whose forward cannot be cut between them.
    """
    repeats = shapes.repeats
    if repeats is None:
        raise ConfigError(
            "zerofx.plan(pipeline=..., tensor=...) needs a model with equal blocks in a ModuleList or Sequential, "
            "which are what is cut: leave both out for this one"
        )
    precision = asked.config.precision
    dtype = PRECISIONS[precision] if precision else None

    def autocast() -> AbstractContextManager[None]:
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    with shapes.mode:
        model = shapes.copy_of(BLOCKS)
    whole = WithoutData(_Called(model, asked.loss_fn), torch.device("cpu")).capture(tuple(shapes.inputs), {}, autocast)
    with autocast():
        line = Line(whole, hardware)
    path = f"model.{repeats.path}" if repeats.path else "model"
    names = [{f"{path}.{repeats.start + place}" for place in _block(repeats.period, block)} for block in range(BLOCKS)]
    places = [
        [place for place, node in enumerate(line.nodes) if line.is_own(node) and names[block] & set(modules_of(node))]
        for block in range(BLOCKS)
    ]
    if not all(places):
        raise PipelineError(f"the blocks of {repeats.path!r} cannot be told apart in the graph of the forward")
    first, border, last = min(places[0]), max(places[0]), max(places[-1])
    outside = line.seconds[first] + line.seconds[-1] - line.seconds[last + 1]
    kept = line.activations[first] + line.activations[-1] - line.activations[last + 1]
    return Borders(
        line.crossing_bytes[border],
        line.seconds[first] / outside if outside else 0.0,
        line.activations[first] / kept if kept else 0.0,
    )


def _block(period: int, block: int) -> range:
    return range(period * block, period * (block + 1))


class _Called(nn.Module):
    """Calls a model as a step does."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *batch: object) -> object:
        return self.model(*batch) if self.loss_fn is None else self.loss_fn(self.model, *batch)
