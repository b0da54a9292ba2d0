"""The order in which each rank of a pipeline computes: one list of actions a rank, without what is sent between."""

from __future__ import annotations

from typing import Any, NamedTuple

from zerofx import _torch
from zerofx.pipeline import Pipeline

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""What an action computes: a forward, a whole backward, or its halves, for the stage's inputs and for its weights."""
NAMES = {
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""The schedules whose order torch.distributed.pipelining makes, by its names."""


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = list[list[Action]]
"""What each rank computes, in turn."""
Messages = list[list[Any]]
"""The same with what is sent and received in between, as torch.distributed.pipelining puts it."""


def order_of(pipeline: Pipeline) -> Order:
    """The order of a pipeline's schedule."""
    ranks, count = pipeline.ranks, pipeline.microbatches
    if pipeline.schedule == "gpipe":
        return [_gpipe(rank, count) for rank in range(ranks)]
    if pipeline.schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, count) for rank in range(ranks)]
    made = _torch.schedule_actions(NAMES[pipeline.schedule], ranks, count, pipeline.per_rank)
    return [[Action(*each) for each in actions] for actions in made]


def forwards_of(pipeline: Pipeline, count: int) -> Order:
    """The order in which a batch of so many micro-batches is only evaluated."""
    return [
        [Action(FORWARD, stage, part) for stage in pipeline.stages_of(rank) for part in range(count)]
        for rank in range(pipeline.ranks)
    ]


def messages_of(pipeline: Pipeline, order: Order) -> Messages:
    """The order with sends behind what makes, and receives before what needs, on another rank."""
    return _torch.with_messages([[(a.kind, a.stage, a.microbatch) for a in each] for each in order], pipeline.places)


def _gpipe(rank: int, count: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [Action(kind, rank, part) for kind in (FORWARD, BACKWARD) for part in range(count)]


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[Action]:
    """As many forwards ahead as stages are behind this one, and then a backward and a forward in turn."""
    ahead = min(count, ranks - rank)
    made = [Action(FORWARD, rank, part) for part in range(ahead)]
    for part in range(count):
        made.append(Action(BACKWARD, rank, part))
        if ahead + part < count:
            made.append(Action(FORWARD, rank, ahead + part))
    return made
