"""One step's micro-batches through the stages of one rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.batches import MicroBatch
from zerofx.pipeline import SPLITS_BACKWARD
from zerofx.schedules import FORWARD, INPUT, WEIGHT, Messages
from zerofx.stage_gather import Released
from zerofx.stage_graphs import Boundary
from zerofx.stage_plan import Variant
from zerofx.stage_run import StageRun, begin_at, begin_with
from zerofx.torch_schedule import Exchange, run_order
from zerofx.unfit import in_one_line
from zerofx.watch import tell

if TYPE_CHECKING:
    from zerofx.pipelined import Pipelined

Split = Callable[[], Sequence[MicroBatch]]
"""Splits this rank's batch."""
Loss = Callable[[MicroBatch], tuple[Tensor, Any]]
"""The loss of a micro-batch as it counts in the sum over all, and its weight; it calls the model once."""


class Call(NamedTuple):
    """A call of the model for a micro-batch: the tensors that it was given, and the stages for such ones."""

    leaves: list[Any]
    variant: Variant


@dataclass
class Step:
    """On the rank of the last stage `loss` and `weight` add up over the micro-batches.

    `problem` is what this rank has raised, and `broken` whether it no longer computes anything. With `released`,
    parameters are gathered for each computation.
    """

    home: Pipelined
    compute_loss: Loss
    scale: Tensor | None
    loss: Tensor
    weight: Tensor
    parts: Sequence[MicroBatch] = ()
    order: Messages = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    runs: dict[int, StageRun] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    released: Released | None = None
    problem: Exception | None = None
    broken: bool = False

    def run(self) -> None:
        """Runs the step's order. A rank that fails goes on with zeros, so that all come to its end and hear of it.

        Where others wait in collectives of its stage meanwhile, the watch tells them, and ends all ranks.
        """

        def receives(stage: int, part: int) -> Sequence[Any]:
            return self.calls[part].variant.stages[stage].receives

        def compute(kind: str, stage: int, part: int, received: list[Tensor]) -> list[Tensor]:
            try:
                return self._compute(kind, stage, part, received)
            except Exception as error:
                tell(
                    f"a step failed on rank {dist.get_rank()}, for which others of its stage wait: {in_one_line(error)}"
                )
                raise

        exchange = Exchange(self.home.pipeline, self.home.where.pipe, self.home.where.place, self.home.device, receives)
        run_order(self.order, len(self.parts), exchange, compute, WEIGHT)

    def _compute(self, kind: str, stage: int, part: int, received: list[Tensor]) -> list[Tensor]:
        """Runs an action, or zeros in its place; what it raises, other ranks wait for this one in vain."""
        with nullcontext() if self.released is None else self.released.there(self._reads(kind, stage, part)):
            try:
                if not self.broken:
                    return self._act(kind, stage, part, received)
            except Exception as error:
                if self._others_wait():
                    raise
                self.problem, self.broken = self.problem or error, True
        return self._nothing(kind, stage, part)

    def _others_wait(self) -> bool:
        """Whether a rank that does not compute keeps others waiting in collectives that it cannot know of.

        What the half for the weights gathers is known where the half for the inputs has run only.
        """
        home = self.home
        gathers = self.released is not None and home.where.replicas > 1
        return home.where.parallel.tensor.size > 1 or (gathers and home.pipeline.schedule in SPLITS_BACKWARD)

    def _reads(self, kind: str, place: int, part: int) -> list[str]:
        """The parameters that a computation reads; the half for the weights needs those that it has kept, if any."""
        names = self.calls[part].variant.stages[place].names("param")
        if kind == WEIGHT and self.released is not None:
            kept = {each for later in self.runs[place].later[part] for each in later.storages}
            return [name for each, name in self.released.ids.items() if each in kept and name in names]
        return names

    def _act(self, kind: str, stage: int, part: int, received: list[Tensor]) -> list[Tensor]:
        if kind == FORWARD:
            return self._forward(stage, part, received)
        if kind == WEIGHT:
            self.runs[stage].weights(part, self.calls[part].variant.stages[stage])
            return []
        return self._backward(stage, part, received, apart=kind == INPUT)

    def _nothing(self, kind: str, place: int, part: int) -> list[Tensor]:
        """Zeros in the place of what an action makes."""
        stage = self.calls[part].variant.stages[place]
        sent = [each for each in stage.receives if each.has_gradient] if kind != FORWARD else stage.sends
        return [self._zeros(each) for each in sent if kind != WEIGHT]

    def _zeros(self, boundary: Boundary) -> Tensor:
        return torch.zeros(boundary.size, dtype=boundary.dtype, device=self.home.device)

    def _forward(self, place: int, part: int, received: list[Tensor]) -> list[Tensor]:
        call, run = self.calls[part], self.runs[place]
        stage = call.variant.stages[place]
        training = torch.is_grad_enabled()
        leaves = [
            value.detach().requires_grad_(training and boundary.has_gradient)
            for value, boundary in zip(received, stage.receives, strict=True)
        ]
        inputs = run.inputs(stage, call.leaves)
        with self.home.engine.autocast():
            outputs = run.forward(part, self.home.compiled_for(place, call.variant, [*inputs, *leaves]), inputs, leaves)
        if place < self.home.pipeline.stages - 1:
            return [value.detach() for value in outputs]
        self.home.answer = [call.variant.whole.result(outputs)]
        try:
            with self.home.in_step(part):
                loss, weight = self.compute_loss(self.parts[part])
        except Exception as error:  # its backward runs all the same, in which other ranks may wait for this one
            self.problem = self.problem or error
            loss, weight = sum((value.sum() * 0 for value in outputs if value.requires_grad), self.loss * 0), 0.0
        self.loss += loss.detach()
        self.weight += weight
        if training:
            self.losses[part] = loss if self.scale is None else loss * self.scale
        return []

    def _backward(self, place: int, part: int, received: list[Tensor], apart: bool) -> list[Tensor]:
        variant, run = self.calls[part].variant, self.runs[place]
        stage = variant.stages[place]
        last = place == self.home.pipeline.stages - 1
        begin = begin_at(self.losses.pop(part)) if last else begin_with(received, stage.sends)
        grads = run.backward(part, self.home.compiled[place, variant.key, True], begin, apart)
        made = list[Tensor]()
        for grad, boundary in zip(grads, stage.receives, strict=True):
            if boundary.has_gradient:
                made.append(self._zeros(boundary) if grad is None else grad)
        return made
