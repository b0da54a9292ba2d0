"""Searches layouts of any model: what a block takes is traced once, what layouts make of that are closed forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
from torch import nn

from zerofx.config import Config
from zerofx.pipeline import PipelineError
from zerofx.planning.borders import Borders, borders
from zerofx.planning.capture import Asked, Shapes
from zerofx.planning.hardware import Hardware
from zerofx.planning.micro_batches import TRACED, Rows
from zerofx.planning.pipelines import FEW, MORE, Blocks, Part, blocks_taken, part_of
from zerofx.planning.search import MICROBATCHES, Found, layouts_of, pareto
from zerofx.planning.shapes import Layouts
from zerofx.planning.tensors import exchange_seconds
from zerofx.planning.traced_costs import Taken, Weights, forecast


@dataclass(frozen=True)
class Degrees:
    """What tensor-parallel ranks and stages of a pipeline have to divide."""

    heads: int
    layers: int


def search_traced(
    model_fn: Callable[[], nn.Module],
    batch: Sequence[Any],
    rows: int,
    tokens: int,
    world: int,
    machine: Hardware,
    precision: str,
    loss_fn: Callable[..., Any] | None = None,
) -> Found:
    """All sensible layouts of `world` ranks for steps of `world` such batches, of `rows` rows and `tokens` each.

    Micro-batches of two and of four rows are traced, with two and with three blocks, and no others: numbers grow by the
    same from row to row and from block to block. A model without equal blocks is not cut. Raises ValueError where no
    layout divides ranks and rows.
    """
    micro_batches = Rows.of(model_fn, batch, rows)
    shapes = micro_batches.shapes
    asked = Asked(Config(precision=precision), 1, "gloo" if machine.device == "cpu" else "nccl", loss_fn)
    found = _borders(micro_batches, asked, machine)
    again = ("none",) if shapes.repeats is None else ("none", "full")
    micro = sorted({*MICROBATCHES, *(size for size in range(1, rows + 1) if rows % size == 0)})
    layouts = layouts_of(_degrees(shapes), world, rows * world, machine, recompute=again, micro=micro)
    taken = _taken(micro_batches, asked, layouts, found, machine)
    flops = micro_batches.tape(asked, 1, shapes.blocks).model_flops * rows * world
    bucket = asked.config.bucket_bytes(asked.backend)
    weights = Weights.of(shapes, precision)
    return pareto(forecast(layouts, machine, taken, weights, bucket, flops, tokens * world, precision))


def _degrees(shapes: Shapes) -> Degrees:
    """Layers may be sliced as far as all dims of the blocks' matrices divide."""
    if shapes.repeats is None:
        return Degrees(1, 1)
    prefix = shapes.repeats.prefix
    inside = (param.size for param in shapes.params if param.name.startswith(prefix))
    dims = [each for size in inside if len(size) > 1 for each in size]
    return Degrees(gcd(*dims) if dims else 1, shapes.blocks)


def _borders(micro_batches: Rows, asked: Asked, machine: Hardware) -> Borders | None:
    """What crosses between blocks of micro-batches of the fewest rows; of a model that has none, or cannot do with
    fewer of them, nothing, and it is taken as a whole.
    """
    if micro_batches.shapes.repeats is None:
        return None
    try:
        return borders(micro_batches.of_rows(TRACED[0]), asked, machine)
    except PipelineError:
        micro_batches.uncut()
        return None


def _taken(micro_batches: Rows, asked: Asked, layouts: Layouts, found: Borders | None, machine: Hardware) -> Taken:
    """What blocks take in each layout."""
    shapes = micro_batches.shapes
    pairs, places = np.unique(np.stack([layouts.microbatch, layouts.tp]), axis=1, return_inverse=True)
    made = []
    for rows, parts in pairs.T.tolist():
        crossing = None if found is None else replace(found, crossing=found.crossing * rows // TRACED[0])
        blocks = _blocks(micro_batches, asked, rows, parts, crossing, machine)
        exchanged = 0.0 if crossing is None else exchange_seconds(crossing, machine, parts)
        sent = 0 if crossing is None else crossing.crossing
        made.append([*blocks.block, *blocks.head, *blocks.tail, sent, exchanged, rows * micro_batches.row_bytes])
    return Taken(max(1, shapes.blocks), shapes.buffers, *np.array(made, dtype=float)[places.ravel()].T)


def _blocks(
    micro_batches: Rows, asked: Asked, rows: int, parts: int, found: Borders | None, machine: Hardware
) -> Blocks:
    if found is None:
        nothing = Part(0.0, 0.0, 0.0, 0.0)
        whole = part_of(micro_batches.tape(asked, rows, 0), machine)
        return Blocks(nothing, nothing, whole._replace(transient=max(0.0, whole.transient - whole.saved)))
    few, more = (micro_batches.tape(asked, rows, count) for count in (FEW, MORE))
    return blocks_taken(few, more, found, parts, machine)
