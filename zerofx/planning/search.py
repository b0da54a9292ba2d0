"""Goes through all sensible ways of training a transformer over a number of ranks; keeps those that no other beats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zerofx.planning.hardware import Hardware
from zerofx.planning.hardware import load as load_hardware
from zerofx.planning.shapes import RECOMPUTE, SCHEDULES, Layouts, Shape
from zerofx.planning.software import ZEROFX, Software
from zerofx.planning.transformer import Forecast, foresee

CHUNKS = (1, 2, 3, 4, 6, 8)
MICROBATCHES = tuple(2**power for power in range(9))  # sequences in each


class Sliceable(Protocol):
    """What says how far a model can be cut: tensor-parallel ranks divide `heads`, stages of a pipeline `layers`."""

    @property
    def heads(self) -> int: ...

    @property
    def layers(self) -> int: ...


@dataclass(frozen=True)
class Found:
    """What a search came to: a forecast of every layout, and the places of those that are worth a look.

    Attributes:
        forecast: of all layouts.
        front: places of the Pareto front of memory and time among layouts that fit, fastest first: each next one is
            slower and takes less memory.
        closest: the place of the layout that takes least memory, whether it fits or not.
    """

    forecast: Forecast
    front: tuple[int, ...]
    closest: int

    @property
    def best(self) -> int:
        """The place of the fastest layout that fits. Raises ValueError where none does, with what is missing."""
        if self.front:
            return self.front[0]
        peak, allowed = float(self.forecast.peak[self.closest]), self.forecast.hardware.memory_bytes
        raise ValueError(
            f"none of {len(self.forecast.layouts):,} layouts fits into {allowed / 1e9:.1f} GB a rank: the least takes "
            f"{peak / 1e9:.1f} GB, {(peak - allowed) / 1e9:.1f} GB too much; take more ranks, or more memory"
        )

    def rows(self) -> list[dict[str, Any]]:
        """The front as dictionaries: the layout, `seconds` of a step, `peak_bytes`, `mfu`, `tokens_per_second`."""
        forecast = self.forecast
        chosen = forecast.layouts[list(self.front)].rows() if self.front else iter(())
        return [
            row
            | {
                "seconds": float(forecast.step[place]),
                "peak_bytes": float(forecast.peak[place]),
                "mfu": float(forecast.mfu[place]),
                "tokens_per_second": float(forecast.tokens_per_second[place]),
            }
            for place, row in zip(self.front, chosen, strict=True)
        ]


def search(
    shape: Shape,
    world: int,
    batch: int,
    hardware: str | Hardware,
    software: Software = ZEROFX,
    dtype: str = "bf16",
    *,
    stages: Sequence[int] = (0, 1, 2, 3),
    recompute: Sequence[str] = RECOMPUTE,
    tensor: Sequence[int] | None = None,
    pipeline: Sequence[int] | None = None,
) -> Found:
    """All sensible layouts of `world` ranks for steps of `batch` sequences.

    Sensible are tensor-parallel ranks that divide the heads and are in one node, pipelines whose stages have equally
    many layers, micro-batches that divide each rank's part of the batch, ZeRO's stages 1 to 3 over more than one
    data-parallel rank, and stage 3 without a pipeline. `tensor` and `pipeline` say which degrees to try, else all.

    Raises ValueError where no layout divides ranks and batch.
    """
    machine = load_hardware(hardware)
    layouts = layouts_of(shape, world, batch, machine, stages, recompute, tensor, pipeline)
    return pareto(foresee(shape, layouts, machine, software, dtype))


def pareto(forecast: Forecast) -> Found:
    """The layouts that fit, and of which none other is as fast and takes as little memory."""
    order = np.lexsort((forecast.peak, forecast.step))
    order = order[forecast.fits[order]]
    peaks = forecast.peak[order]
    lowest = np.minimum.accumulate(peaks)
    first = np.r_[True, lowest[1:] < lowest[:-1]] if len(order) else np.zeros(0, bool)
    return Found(forecast, tuple(int(place) for place in order[first]), int(np.argmin(forecast.peak)))


def layouts_of(
    shape: Sliceable,
    world: int,
    batch: int,
    hardware: Hardware,
    stages: Sequence[int] = (0, 1, 2, 3),
    recompute: Sequence[str] = RECOMPUTE,
    tensor: Sequence[int] | None = None,
    pipeline: Sequence[int] | None = None,
    micro: Sequence[int] = MICROBATCHES,
) -> Layouts:
    """The layouts that `search` goes through; `micro` are the sizes of micro-batches to try."""
    for name, given, allowed in (("recompute", recompute, RECOMPUTE), ("stages", stages, range(4))):
        if not given or not set(given) <= set(allowed):
            raise ValueError(f"{name}={given!r} is not possible: give some of {', '.join(map(repr, allowed))}")
    if world < 1 or batch < 1:
        raise ValueError(f"world={world} and batch={batch} are not possible: give numbers of 1 or more")
    node = hardware.ranks_per_node
    slices = [t for t in tensor or _divisors(world) if world % t == 0 and shape.heads % t == 0 and t <= node]
    depths = [p for p in pipeline or _divisors(world) if world % p == 0 and shape.layers % p == 0]
    again = [RECOMPUTE.index(each) for each in recompute]
    columns = []
    for tp, pp in itertools.product(slices, depths):
        dp = world // (tp * pp)
        if world % (tp * pp) or batch % dp:
            continue
        columns += _over(shape, (dp, tp, pp), batch // dp, micro, stages, again)
    if not columns:
        raise ValueError(
            f"no layout divides {world:,} ranks and {batch:,} sequences of a step among data-, tensor- and "
            f"pipeline-parallel ranks of {shape.layers} layers and {shape.heads} heads: take a batch that is a "
            "multiple of the ranks, or other ranks"
        )
    return Layouts(*np.array(columns).T)


def _over(
    shape: Sliceable,
    ranks: tuple[int, int, int],
    rows: int,
    micro: Sequence[int],
    stages: Sequence[int],
    again: Sequence[int],
) -> list[tuple[int, ...]]:
    """The layouts of one arrangement of ranks, each of which has `rows` sequences in a step."""
    dp, tp, pp = ranks
    useful = [stage for stage in stages if (stage == 0 or dp > 1) and (stage < 3 or pp == 1)] or [0]
    sequence = (0, 1) if tp > 1 else (0,)
    made: list[tuple[int, ...]] = []
    for size in (each for each in micro if rows % each == 0):
        count = rows // size
        ways = itertools.product(_schedules(shape, pp, count), useful, again, sequence)
        made += [
            (dp, tp, pp, stage, size, count, redone, schedule, chunks, sliced)
            for (schedule, chunks), stage, redone, sliced in ways
        ]
    return made


def _schedules(shape: Sliceable, pp: int, count: int) -> list[tuple[int, int]]:
    """Schedules of a pipeline and stages of each rank; those with several need as many micro-batches as ranks."""
    if pp == 1:
        return [(0, 1)]
    found = [(SCHEDULES.index("1f1b"), 1)]
    if count >= pp and count % pp == 0:
        interleaved = SCHEDULES.index("interleaved-1f1b")
        found += [(interleaved, v) for v in CHUNKS[1:] if shape.layers % (pp * v) == 0]
    if count >= pp and shape.layers % (2 * pp) == 0:
        found.append((SCHEDULES.index("zbv"), 2))
    return found


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
