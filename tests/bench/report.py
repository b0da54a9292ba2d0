"""From the raw figures of a run to rows: ratios to the floor, memory, traffic, compile time, agreement of the loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.contestants import BY_NAME, FLOOR, MIB, PRECISIONS, REFERENCE, Traffic
from tests.bench.gpt import SIZES, elements
from tests.bench.launch import Run
from tests.bench.measure import WARMUP, WIRE
from tests.bench.wire import GATHER, GATHER_P2P, REDUCE, SCATTER, SCATTER_P2P

WALL, CPU = "wall_seconds", "cpu_seconds"
POLICIES = {
    "stage 0": {REDUCE: 1},
    "stages 1 and 2": {GATHER: 1, SCATTER: 1},
    "stage 3": {GATHER: 2, SCATTER: 1},
    "stages 1 and 2 of isend/irecv": {GATHER_P2P: 1, SCATTER_P2P: 1},
    "stage 3 of isend/irecv": {GATHER_P2P: 2, SCATTER_P2P: 1},
}


@dataclass(frozen=True)
class Ratio:
    """A contestant's median step over the floor's of the same round: the median, least and most of all rounds."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """One contestant. Bytes are those of the rank that has most; None is what was not measured or means nothing."""

    contestant: str
    problem: str = ""
    wall: Ratio | None = None
    cpu: Ratio | None = None
    floor_and_wire: float | None = None
    heap_steady: float | None = None
    heap_peak: float | None = None
    resident_peak: float | None = None
    bytes_sent: int | None = None
    bytes_sent_are_the_policy: bool = False
    compile_cold_seconds: float | None = None
    compile_warm_seconds: float | None = None
    loss_difference: float | None = None


@dataclass(frozen=True)
class WireRow:
    """Collectives over all the model's parameters: wall and CPU seconds over those of the floor's step."""

    what: str
    wall: float
    cpu: float


@dataclass(frozen=True)
class Report:
    """A whole run, worked out. `floor_seconds` are the floor's median wall and CPU seconds, None without a floor."""

    rows: tuple[Row, ...]
    wire: tuple[WireRow, ...]
    floor_seconds: tuple[float, float] | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def heading(settings: dict[str, Any]) -> str:
    return f"{settings['size']}, {settings['precision']}, {settings['ranks']} ranks, {settings['rounds']} rounds"


def report(settings: dict[str, Any], runs: Sequence[Run]) -> Report:
    good = [run for run in runs if not run.problem]
    floor = [run for run in good if run.contestant == FLOOR]
    wire = wire_rows(floor, [run for run in good if run.contestant == WIRE])
    names = [name for name in settings["contestants"] if name != WIRE]
    rows = tuple(row(name, runs, wire, settings) for name in names)
    seconds = (median_step(floor, WALL), median_step(floor, CPU)) if floor else None
    return Report(rows, wire, seconds)


def row(name: str, runs: Sequence[Run], wire: Sequence[WireRow], settings: dict[str, Any]) -> Row:
    mine = [run for run in runs if run.contestant == name]
    good = [run for run in mine if not run.problem]
    problem = next((run.problem for run in mine if run.problem), "" if mine else "did not run")
    if not good:
        return Row(name, problem)
    floor, reference = (
        [run for run in runs if run.contestant == other and not run.problem] for other in (FLOOR, REFERENCE)
    )
    contestant, last = BY_NAME[name], good[-1]
    counted = last.ranks[0]["bytes_sent"]
    ranks = 1 if contestant.whole_batch else settings["ranks"]
    count, dtype = elements(SIZES[settings["size"]]), PRECISIONS[settings["precision"]]
    sent = contestant.traffic.bytes_sent(count, ranks, dtype) if counted is None else counted
    return Row(
        contestant=name,
        problem=problem,
        wall=ratio(good, floor, WALL),
        cpu=ratio(good, floor, CPU),
        floor_and_wire=None if contestant.whole_batch else bound(contestant.traffic, wire),
        heap_steady=most(last, "heap_steady_bytes"),
        heap_peak=most(last, "heap_peak_bytes"),
        resident_peak=most(last, "resident_peak_bytes"),
        bytes_sent=sent,
        bytes_sent_are_the_policy=counted is None,
        compile_cold_seconds=next((compile_seconds(run) for run in good if run.round == 0), None),
        compile_warm_seconds=min((compile_seconds(run) for run in good if run.round > 0), default=None),
        loss_difference=loss_difference(good, reference) if contestant.agrees and reference else None,
    )


def wire_rows(floor: Sequence[Run], runs: Sequence[Run]) -> tuple[WireRow, ...]:
    """Each collective alone, then what the policies make of them; nothing without a floor to compare with."""
    if not floor or not runs:
        return ()
    step = median_step(floor, WALL), median_step(floor, CPU)

    def cost(name: str, kind: str) -> float:
        per_rank = [[rank[name][kind] for rank in run.ranks] for run in runs]
        return statistics.median(max(ranks) for run in per_rank for ranks in zip(*run, strict=True))

    names = list(runs[0].ranks[0])
    alone = {name: (cost(name, WALL) / step[0], cost(name, CPU) / step[1]) for name in names}
    rows = [WireRow(name, *costs) for name, costs in alone.items()]
    for policy, uses in POLICIES.items():
        wall, cpu = (sum(times * alone[name][kind] for name, times in uses.items()) for kind in (0, 1))
        rows.append(WireRow(policy, wall, cpu))
    return tuple(rows)


def bound(traffic: Traffic, wire: Sequence[WireRow]) -> float | None:
    """One floor and the collectives of a policy after it, nothing overlapped, in floors."""
    if not wire:
        return None
    wall = {row.what: row.wall for row in wire}
    uses = {GATHER: traffic.all_gathers, SCATTER: traffic.reduce_scatters, REDUCE: traffic.all_reduces}
    return 1 + sum(times * wall[name] for name, times in uses.items())


def steps(run: Run, kind: str) -> list[float]:
    """Seconds of every step, each those of the rank that took longest."""
    return [max(ranks) for ranks in zip(*(rank[kind] for rank in run.ranks), strict=True)]


def median_step(runs: Sequence[Run], kind: str) -> float:
    return statistics.median(seconds for run in runs for seconds in steps(run, kind)[WARMUP:])


def ratio(runs: Sequence[Run], floor: Sequence[Run], kind: str) -> Ratio | None:
    """Over the floor in the rounds that both have; None where they have none."""
    floors = {run.round: median_step([run], kind) for run in floor}
    per_round = [median_step([run], kind) / floors[run.round] for run in runs if run.round in floors]
    return Ratio(statistics.median(per_round), min(per_round), max(per_round)) if per_round else None


def compile_seconds(run: Run) -> float:
    """What the warm-up steps took beyond as many median ones."""
    return max(0.0, sum(steps(run, WALL)[:WARMUP]) - WARMUP * median_step([run], WALL))


def loss_difference(runs: Sequence[Run], reference: Sequence[Run]) -> float:
    """The largest difference of the mean loss over ranks from the reference's, over all steps."""
    expected = reference[0].ranks[0]["losses"]
    means = [
        [statistics.fmean(losses) for losses in zip(*(rank["losses"] for rank in run.ranks), strict=True)]
        for run in runs
    ]
    return max(abs(loss - other) for mean in means for loss, other in zip(mean, expected, strict=True))


def most(run: Run, figure: str) -> float:
    return max(rank[figure] for rank in run.ranks)


def mebibytes(count: float) -> float:
    return count / MIB
