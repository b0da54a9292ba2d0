"""Simulates a pipeline's schedule before it runs: completeness, deadlock, bubble, what is in flight."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.draw_schedule import Placed, gantt
from zerofx.pipeline import LOOPED, SPLITS_BACKWARD, Pipeline, PipelineError
from zerofx.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Messages, Order, messages_of

DURATIONS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}
"""In units of a stage's forward."""


class ScheduleError(PipelineError):
    """A schedule does not compute everything once, or comes to a standstill."""


@dataclass(frozen=True)
class Simulated:
    """How a schedule runs where all stages take equally long and nothing else takes time.

    `in_flight` is for each stage the largest number of micro-batches of which its forward has run and its backward, the
    weights' half as well, has not. `seconds` are in units of a stage's forward, and `bubble` is the share of them in
    which a rank stands still, on the average over ranks; `expected` is the closed form where there is one.
    """

    placed: tuple[tuple[Placed, ...], ...]
    seconds: float
    bubble: float
    in_flight: tuple[int, ...]
    expected: float | None = None

    def gantt(self) -> str:
        """A chart in text: a line for each rank, and in it what it computes when."""
        return gantt(self.placed)


def check_schedule(pipeline: Pipeline, order: Order) -> Simulated:
    """Simulates a schedule. Raises ScheduleError, with a chart up to there, where it cannot run or holds too much."""
    _check_complete(pipeline, order)
    found = simulate(pipeline, order)
    check_messages(pipeline, messages_of(pipeline, order))
    if pipeline.schedule == "1f1b":
        for stage, most in enumerate(found.in_flight):
            if most > (least := min(pipeline.microbatches, pipeline.stages - stage)):
                raise ScheduleError(
                    f"the schedule keeps {most} micro-batches in flight at stage {stage}, and 1F1B at most {least}\n"
                    f"{found.gantt()}"
                )
    return found


def closed_form(pipeline: Pipeline) -> float | None:
    """The share of time in the bubble: (p - 1) / (v m + p - 1) with p ranks of v stages and m micro-batches.

    That is the share of the whole step for GPipe and 1F1B with v = 1 (Huang et al., 2019) and for interleaved schedules
    (Narayanan et al., 2021, who relate it to the time without the bubble).
    """
    if pipeline.schedule in SPLITS_BACKWARD or (pipeline.schedule in LOOPED and pipeline.microbatches % pipeline.ranks):
        return None
    fewer = pipeline.ranks - 1
    return fewer / (pipeline.per_rank * pipeline.microbatches + fewer)


def _check_complete(pipeline: Pipeline, order: Order) -> None:
    counts = Counter(action for actions in order for action in actions)
    for stage in range(pipeline.stages):
        for part in range(pipeline.microbatches):
            forward, whole, first, second = (counts[Action(k, stage, part)] for k in (FORWARD, BACKWARD, INPUT, WEIGHT))
            if forward == 1 and (whole, first, second) in ((1, 0, 0), (0, 1, 1)):
                continue
            raise ScheduleError(
                f"the schedule runs for stage {stage} and micro-batch {part} {forward} forwards, {whole} backwards, "
                f"{first} and {second} of its halves: one forward and one backward, or both halves, is what trains"
            )
    for rank, actions in enumerate(order):
        for action in actions:
            known = 0 <= action.stage < pipeline.stages and 0 <= action.microbatch < pipeline.microbatches
            if not known or pipeline.rank_of(action.stage) != rank:
                raise ScheduleError(f"the schedule lets rank {rank} run {action}, which is not of its stages")


def check_messages(pipeline: Pipeline, messages: Messages) -> None:
    """Raises ScheduleError where ranks stand still if a send ends only when its receive has begun.

    And where two ranks send and receive in different orders.
    """
    done, at = set[tuple[str, int, int]](), [0] * len(messages)
    while any(place < len(actions) for place, actions in zip(at, messages, strict=True)):
        before = list(at)
        for rank, actions in enumerate(messages):
            while at[rank] < len(actions) and _can_go_on(*_named(actions[at[rank]]), pipeline, done):
                done.add(_named(actions[at[rank]]))
                at[rank] += 1
        if at == before:
            waiting = [f"rank {r} with {a[p]}" for r, (p, a) in enumerate(zip(at, messages, strict=True)) if p < len(a)]
            raise ScheduleError(f"the schedule comes to a standstill where sends block: {', '.join(waiting)}")
    sent, received = defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list)
    for rank, actions in enumerate(messages):
        for kind, stage, part in map(_named, actions):
            way = 1 if kind.endswith("_F") else -1
            if kind.startswith("SEND"):
                sent[rank, pipeline.rank_of(stage + way)].append((way, stage + way, part))
            elif kind.startswith("RECV"):
                received[pipeline.rank_of(stage - way), rank].append((way, stage, part))
    for pair in sent.keys() | received.keys():
        if sent[pair] != received[pair]:
            raise ScheduleError(f"rank {pair[0]} sends in another order than rank {pair[1]} receives")


def _named(action: Any) -> tuple[str, int, int]:
    stage, kind, part = action[:3]
    return str(kind.value), stage, part


def _can_go_on(kind: str, stage: int, part: int, pipeline: Pipeline, done: set[tuple[str, int, int]]) -> bool:
    """Whether what an action waits for has happened: for a send the receive, for a computation what it reads."""
    way = 1 if kind.endswith("_F") else -1
    if kind.startswith("SEND"):
        return (kind.replace("SEND", "RECV"), stage + way, part) in done
    if kind.startswith("RECV") or kind == WEIGHT:
        return True
    neighbour = stage - 1 if kind == FORWARD else stage + 1
    if not 0 <= neighbour < pipeline.stages:
        return True
    makes = (FORWARD,) if kind == FORWARD else (BACKWARD, INPUT)
    if pipeline.rank_of(neighbour) == pipeline.rank_of(stage):
        return any((name, neighbour, part) in done for name in makes)
    return ("SEND_F" if kind == FORWARD else "SEND_B", neighbour, part) in done


def simulate(
    pipeline: Pipeline, order: Order, seconds_of: Callable[[Action], float] | None = None, message: float = 0.0
) -> Simulated:
    """Runs an order, each rank as early as it can, where what is sent is there after `message` seconds.

    `seconds_of` says how long an action takes; by default stages take equally long, a backward two forwards.
    Raises ScheduleError where no rank can go on.
    """
    ranks = len(order)
    takes = seconds_of or (lambda action: DURATIONS[action.kind])
    done: dict[Action, float] = {}
    free, at = [0.0] * ranks, [0] * ranks
    placed: list[list[Placed]] = [[] for _ in order]
    flying, most = Counter[int](), Counter[int]()
    left = sum(map(len, order))
    while left:
        before = left
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needs = list(_needs(action, pipeline.stages, done))
                if not all(need in done for need in needs):
                    break
                arrived = (done[n] + (message if pipeline.rank_of(n.stage) != rank else 0.0) for n in needs)
                start = max([free[rank], *arrived])
                free[rank] = done[action] = start + takes(action)
                placed[rank].append(Placed(action, start, free[rank]))
                flying[action.stage] += {FORWARD: 1, INPUT: 0}.get(action.kind, -1)
                most[action.stage] = max(most[action.stage], flying[action.stage])
                at[rank] += 1
                left -= 1
        if left == before:
            raise ScheduleError(_deadlock(pipeline, order, at, done, placed))
    seconds = max(free, default=0.0)
    busy = sum(takes(action) for actions in order for action in actions)
    bubble = 1 - busy / (ranks * seconds) if seconds else 0.0
    in_flight = tuple(most[stage] for stage in range(pipeline.stages))
    return Simulated(tuple(map(tuple, placed)), seconds, bubble, in_flight, closed_form(pipeline))


def _needs(action: Action, stages: int, done: dict[Action, float]) -> Iterator[Action]:
    """What has to be done before an action."""
    kind, stage, part = action
    if kind == FORWARD:
        if stage:
            yield Action(FORWARD, stage - 1, part)
        return
    if kind == WEIGHT:
        yield Action(INPUT, stage, part)
        return
    yield Action(FORWARD, stage, part)
    if stage + 1 < stages:
        half = Action(INPUT, stage + 1, part)
        yield half if half in done else Action(BACKWARD, stage + 1, part)


def _deadlock(
    pipeline: Pipeline, order: Order, at: Sequence[int], done: dict[Action, float], placed: Sequence[Sequence[Placed]]
) -> str:
    waits = list[str]()
    for rank, actions in enumerate(order):
        if at[rank] < len(actions):
            action = actions[at[rank]]
            missing = next(need for need in _needs(action, pipeline.stages, done) if need not in done)
            waits.append(f"rank {rank} waits for {missing} before {action}")
    return f"the schedule comes to a standstill: {'; '.join(waits)}\n{gantt(placed)}"
