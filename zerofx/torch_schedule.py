"""Runs a pipeline's order on torch.distributed.pipelining's runtime: what stages hand to one another, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx import _torch
from zerofx.pipeline import Pipeline
from zerofx.schedules import FORWARD, Messages
from zerofx.stage_graphs import Boundary

Parts = Callable[[int, int], Sequence[Boundary]]
"""What a stage receives for a micro-batch."""


class Compute(Protocol):
    """Runs an action: given what it receives, it returns what is sent on, each time tensors in the order of the stage.

    A forward receives activations and returns those of the next stage, a backward the gradients of what was sent and
    returns those of what was received. The half for the weights has neither.
    """

    def __call__(self, kind: str, stage: int, part: int, received: list[Tensor]) -> list[Tensor]: ...


@dataclass
class Exchange:
    """What is on its way to and from a rank's stages. Tensors that are received get memory when their turn comes."""

    pipeline: Pipeline
    group: dist.ProcessGroup | None
    place: int
    device: torch.device
    receives: Parts
    coming: dict[tuple[bool, int, int], list[Tensor]] = field(default_factory=dict)
    going: dict[tuple[bool, int, int], list[Tensor]] = field(default_factory=dict)
    most: int = 0

    def crossing(self, forward: bool, stage: int, part: int) -> list[Boundary]:
        """What crosses the cut before the stage, or the gradients that come back over the cut behind it."""
        boundaries = self.receives(stage if forward else stage + 1, part)
        return [each for each in boundaries if forward or each.has_gradient]

    def receive(self, forward: bool, stage: int, part: int) -> list[dist.P2POp]:
        made = [
            torch.empty(each.size, dtype=each.dtype, device=self.device) for each in self.crossing(forward, stage, part)
        ]
        self.coming[forward, stage, part] = made
        self.most = max(self.most, len(self.coming))
        peer = self.pipeline.rank_of(stage - 1 if forward else stage + 1)
        return [_message(dist.irecv, each, self.group, peer, forward, stage) for each in made]

    def send(self, forward: bool, stage: int, part: int) -> list[dist.P2POp]:
        peer = self.pipeline.rank_of(stage + 1 if forward else stage - 1)
        sent = self.going.pop((forward, stage, part))
        to = stage + 1 if forward else stage - 1
        return [_message(dist.isend, each, self.group, peer, forward, to) for each in sent]

    def hand_on(self, forward: bool, stage: int, part: int, values: list[Tensor]) -> None:
        """Puts what a stage has made where the next one, or the one before, finds it."""
        neighbour = stage + 1 if forward else stage - 1
        if not 0 <= neighbour < self.pipeline.stages:
            return
        if self.pipeline.rank_of(neighbour) == self.place:
            self.coming[forward, neighbour, part] = values
        else:
            self.going[forward, stage, part] = [value.contiguous() for value in values]


@dataclass
class _Stage:
    """A stage as torch's runtime sees it."""

    stage_index: int
    num_stages: int
    group_rank: int
    group_size: int
    exchange: Exchange
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def get_fwd_recv_ops(self, part: int) -> list[dist.P2POp]:
        return self.exchange.receive(True, self.stage_index, part)

    def get_bwd_recv_ops(self, part: int) -> list[dist.P2POp]:
        return self.exchange.receive(False, self.stage_index, part)

    def get_fwd_send_ops(self, part: int) -> list[dist.P2POp]:
        return self.exchange.send(True, self.stage_index, part)

    def get_bwd_send_ops(self, part: int) -> list[dist.P2POp]:
        return self.exchange.send(False, self.stage_index, part)


def run_order(order: Messages, count: int, exchange: Exchange, compute: Compute, weights: str) -> None:
    """Runs this rank's part of an order of so many micro-batches; its kind `weights` needs no exchange."""
    pipeline = exchange.pipeline

    def run(kind: str, stage: int, part: int) -> None:
        if kind == weights:
            compute(kind, stage, part, [])
            return
        forward = kind == FORWARD
        _torch.wait_for(runtime, forward, stage, part)
        received = exchange.coming.pop((forward, stage, part), [])
        exchange.hand_on(forward, stage, part, compute(kind, stage, part, received))

    mine = pipeline.stages_of(exchange.place)
    stages = [_Stage(stage, pipeline.stages, exchange.place, pipeline.ranks, exchange) for stage in mine]
    runtime = _torch.PipelineRuntime(stages, order, pipeline.places, count, run)
    runtime.run()


def _message(op: Any, tensor: Tensor, group: Any, peer: int, forward: bool, stage: int) -> dist.P2POp:
    """One message to or from a stage: those of different stages, or directions, cannot be taken for one another."""
    return dist.P2POp(op, _wire(tensor), group=group, group_peer=peer, tag=2 * stage + forward)


def _wire(tensor: Tensor) -> Tensor:
    """The tensor as it travels: not every backend sends booleans."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
