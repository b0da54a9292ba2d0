"""Memory and time of many layouts of a model of which is known what a block takes: closed forms over arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from zerofx.layout import ParamLayout
from zerofx.planning import networks, rates
from zerofx.planning.capture import Shapes
from zerofx.planning.hardware import Hardware
from zerofx.planning.shapes import FULL, SCHEDULES, Layouts
from zerofx.planning.steps import ADDED
from zerofx.planning.stored import MOMENTS, UPDATE
from zerofx.planning.tensors import EXCHANGES
from zerofx.planning.transformer import Forecast
from zerofx.planning.transformer_memory import defers, in_flight

ROUNDED = 0.05
"""The part of a block that a stage may take longer than the even share before it counts as one block more."""
GATHERED = 3
"""Buckets that stage 3 holds: the one in use, the one gathered ahead, and one whose gradient is on its way."""


@dataclass(frozen=True)
class Taken:
    """What a model's parts take for one micro-batch in each layout: seconds of forward and backward, bytes saved for
    the backward and held there besides, of a block, and of what is before and behind all blocks; the bytes that cross
    between blocks, seconds of a block's exchanges among tensor-parallel ranks, and bytes of the micro-batch.
    """

    blocks: int
    buffers: int
    block_forward: Any
    block_backward: Any
    block_saved: Any
    block_transient: Any
    head_forward: Any
    head_backward: Any
    head_saved: Any
    head_transient: Any
    tail_forward: Any
    tail_backward: Any
    tail_saved: Any
    tail_transient: Any
    crossing: Any
    exchanged: Any
    batch: Any


@dataclass(frozen=True)
class Weights:
    """Bytes of parameters inside the blocks, before and behind them, in each of `sliced` by tensor-parallel ranks and
    not; `narrow` is the share of their bytes that travels where autocast reads them in fewer bits.
    """

    inside: tuple[int, int]
    before: tuple[int, int]
    behind: tuple[int, int]
    narrow: float

    @classmethod
    def of(cls, shapes: Shapes, precision: str) -> Weights:
        sums = {"inside": [0, 0], "before": [0, 0], "behind": [0, 0]}
        path, place, cast = None if shapes.repeats is None else shapes.repeats.prefix, "before", 0
        looked_up = {name for name, module in shapes.model.named_modules() if isinstance(module, nn.Embedding)}
        for param in shapes.params:
            if path is not None and param.name.startswith(path):
                place = "behind"
                sums["inside"][_is_whole(param)] += param.whole_bytes
            else:
                sums[place if path is not None else "behind"][_is_whole(param)] += param.whole_bytes
                if param.tied and place == "before":
                    sums["behind"][_is_whole(param)] += 0 if path is None else param.whole_bytes
            if len(param.size) > 1 and param.name.rpartition(".")[0] not in looked_up:
                cast += param.whole_bytes
        whole = max(1, sum(param.whole_bytes for param in shapes.params))
        narrow = 1 - cast / whole / 2 if precision != "fp32" else 1.0
        inside, before, behind = ((pair[0], pair[1]) for pair in sums.values())
        return cls(inside, before, behind, narrow)

    def held(self, layouts: Layouts, place: str) -> Any:
        """Bytes of a rank of the first or last stage, gathered over the data-parallel ranks."""

        def of(pair: tuple[int, int]) -> Any:
            return pair[0] / layouts.tp + pair[1]

        ends = of(self.before) if place == "first" else of(self.behind)
        return of(self.inside) / layouts.pp + np.where(layouts.pp == 1, of(self.before) + of(self.behind), ends)


def _is_whole(param: ParamLayout) -> bool:
    return len(param.size) < 2


def forecast(
    layouts: Layouts,
    hardware: Hardware,
    taken: Taken,
    weights: Weights,
    bucket: int,
    flops: float,
    tokens: int,
    dtype: str,
) -> Forecast:
    """Memory, bytes and time of each layout, by the rules of `zerofx.planning.plan`."""
    depth, k, alone = taken.blocks / layouts.pp, layouts.microbatches, layouts.pp == 1
    forward, backward = _alone(layouts, taken)
    pace = np.where(alone, forward + backward, _pace(layouts, taken, forward + backward))
    held = np.maximum(weights.held(layouts, "first"), weights.held(layouts, "last"))
    total, exposed, sent = _data(layouts, hardware, held, weights.narrow, bucket, (forward, backward))
    message = networks.send_seconds(hardware, taken.crossing / layouts.tp, layouts.dp * layouts.tp)
    bubble = _bubble(layouts, pace) + np.where(alone, 0, 2 * (layouts.pp - 1) * message)
    update = rates.update_seconds(hardware, (UPDATE + 1) * _part(layouts, held))
    exchanged = k * depth * taken.exchanged
    grown = held / np.where(layouts.stage >= 2, layouts.dp, 1)
    busy = k * pace + np.where(alone, (k - 1) * rates.memory_seconds(hardware, ADDED * grown), 0)
    ways = sum(count * networks.ring_bytes(kind, taken.crossing, layouts.tp) for kind, count in EXCHANGES)
    return Forecast(
        layouts=layouts,
        hardware=hardware,
        memory=_memory(layouts, taken, weights, bucket),
        flops=np.full(len(layouts), flops),
        sent={"dp": sent, "tp": k * depth * ways, "pp": np.where(alone, 0, 2 * k * taken.crossing / layouts.tp)},
        compute=busy - exchanged + update,
        communication=total + exchanged,
        exposed=exposed + exchanged,
        bubble=bubble,
        step=busy + bubble + exposed + update,
        tokens=np.full(len(layouts), tokens),
        dtype=dtype,
    )


def _alone(layouts: Layouts, taken: Taken) -> tuple[Any, Any]:
    """Seconds of forward and backward of the whole model."""
    again = np.where(layouts.recompute == FULL, taken.block_forward, 0)
    forward = taken.blocks * taken.block_forward + taken.head_forward + taken.tail_forward
    backward = taken.blocks * (taken.block_backward + again) + taken.head_backward + taken.tail_backward
    return forward, backward


def _pace(layouts: Layouts, taken: Taken, whole: Any) -> Any:
    """Seconds of the slowest stage, forward and backward: whole blocks, spread so that it takes least."""
    head, tail = taken.head_forward + taken.head_backward, taken.tail_forward + taken.tail_backward
    block = np.maximum((whole - head - tail) / taken.blocks, 1e-12)
    return np.maximum(block * np.ceil(whole / layouts.pp / block - ROUNDED), np.maximum(head, tail) + block)


def _bubble(layouts: Layouts, stage: Any) -> Any:
    """(p-1) micro-batches of a stage, 1/v of that interleaved, and nothing for zero-bubble V: see transformer_time."""
    parts = np.where(layouts.schedule == SCHEDULES.index("interleaved-1f1b"), layouts.chunks, 1)
    return np.where(layouts.schedule == SCHEDULES.index("zbv"), 0, (layouts.pp - 1) * stage / parts)


def _part(layouts: Layouts, held: Any) -> Any:
    return held / np.where(layouts.stage >= 1, layouts.dp, 1)


def _once(layouts: Layouts) -> Any:
    """Whether parameters are gathered once a step and kept, apart from the graphs."""
    return (layouts.pp > 1) | ((layouts.microbatches > 1) & (layouts.stage < 3))


def _data(
    layouts: Layouts, hardware: Hardware, held: Any, narrow: float, bucket: int, compute: tuple[Any, Any]
) -> tuple[Any, Any, Any]:
    """Seconds of data-parallel collectives in a step, those that computation waits for, and bytes that a rank sends.

    Collectives of the graphs run beside computation, but for their first or last bucket; those that gather and reduce
    once a step, beside the graphs, are waited for, and on a CPU all are.
    """
    n, k, stage = layouts.dp, layouts.microbatches, layouts.stage
    once, late = _once(layouts), defers(layouts) & ((k > 1) | (layouts.pp > 1))
    narrowed = held * np.where(once, 1.0, narrow)

    def seconds(kind: str, nbytes: Any) -> Any:
        count = np.maximum(1, np.ceil(nbytes / bucket))
        return count * networks.collective_seconds(hardware, kind, nbytes / count, n, layouts.tp)

    def waited(seconds: Any, nbytes: Any, beside: Any) -> Any:
        if hardware.device == "cpu":
            return seconds
        return np.maximum(seconds - beside, seconds / np.maximum(1, np.ceil(nbytes / bucket)))

    gather = np.where(stage > 0, seconds("all_gather", narrowed), 0)
    reduce = np.where(stage == 0, seconds("all_reduce", held), seconds("reduce_scatter", held))
    again = np.where((stage == 3) & ~once, gather, 0)
    reductions, gathers = np.where(late, 1, k), np.where(once, 1, k)
    ahead = np.where(once, gather, waited(gather, narrowed, compute[0]))
    behind = np.where(late, reduce, waited(reduce + again, held, compute[1]))
    total = gathers * (gather + again) + reductions * reduce
    sent = gathers * narrowed * np.choose(stage, [0, 1, 1, np.where(once, 1, 2)])
    sent = (sent + reductions * held * np.where(stage == 0, 2, 1)) * (n - 1) / n
    return total, gathers * ahead + reductions * behind, sent


def _memory(layouts: Layouts, taken: Taken, weights: Weights, bucket: int) -> dict[str, Any]:
    """Bytes of the rank that holds most: one of the first or of the last stage."""
    first, last = (_of_stage(layouts, taken, weights, bucket, place) for place in ("first", "last"))
    larger = sum(first.values()) >= sum(last.values())
    return {name: np.where(larger, first[name], last[name]) for name in first}


def _of_stage(layouts: Layouts, taken: Taken, weights: Weights, bucket: int, place: str) -> dict[str, Any]:
    held, stage, full = weights.held(layouts, place), layouts.stage, layouts.recompute == FULL
    part, alone, spread = _part(layouts, held), layouts.pp == 1, layouts.dp > 1
    saved = taken.blocks / layouts.pp * np.where(full, taken.crossing / layouts.tp, taken.block_saved)
    saved = saved + np.where(alone | (place == "first"), taken.head_saved, 0)
    saved = saved + np.where(alone | (place == "last"), taken.tail_saved, 0)
    at_once = np.maximum(taken.block_transient, np.where(alone | (place == "last"), taken.tail_transient, 0))
    at_once = at_once + np.where(full, taken.block_saved, 0)
    active = saved * in_flight(layouts, place) + at_once
    accumulates = (layouts.microbatches > 1) | ~alone
    whole = np.where((stage < 2) | ~alone, held, part)
    waiting = np.where(accumulates, whole, 0)
    after = np.where(alone, waiting + np.where(accumulates, whole, part), waiting)  # a backward's own beside those
    early = waiting + active >= after  # gradients come as activations go
    kept = np.where(_once(layouts), held, np.where(stage < 3, held * weights.narrow, 0)) * ((stage > 0) & spread)
    beside = accumulates & ((stage < 2) | (layouts.pp > 1))  # no graph has collectives then
    moving = np.where(spread & ~beside, np.minimum(held, GATHERED * bucket), 0)
    return {
        "parameters": part + taken.buffers,
        "gradients": np.where(early, waiting, after),
        "states": MOMENTS * part,
        "activations": np.where(early, active, 0) + taken.batch * layouts.microbatches,
        "buckets": kept + moving,
        "workspace": np.zeros(len(layouts)),
    }
