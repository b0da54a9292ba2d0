"""`zerofx.eval_step`: the loss of a batch over all ranks, without gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.step import loss_of, noting
from zerofx.step_arguments import StepArguments, agreed_engine, device_of


def eval_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *,
    microbatches: int = 1,
    loss_weight: Callable[..., Any] | None = None,
) -> Callable[..., Tensor]:
    """A function that returns the loss of a batch: `loss = evaluate(*batch)`. Call it on all ranks together.

    The model runs in evaluation mode and without gradients; afterwards each module has the mode that it had. Batches,
    `loss_fn`, `microbatches` and `loss_weight` are as in zerofx.train_step, and so is the loss: that of the global
    batch, a 0-dim float32 tensor on the model's device, for which nobody has waited.

    Raises:
        ConfigError: an argument is not possible.
        RankMismatchError: ranks differ in the arguments.
    """
    arguments = StepArguments("zerofx.eval_step", loss_fn, loss_weight, microbatches)
    engine = agreed_engine(model, arguments)
    group, device, pipelined = engine.step_group, device_of(model), engine.pipelined

    def evaluate(*batch: Any, **named: Any) -> Tensor:
        with noting(engine), torch.no_grad(), _evaluating(model):
            both = torch.zeros(2, dtype=torch.float64, device=device)
            if pipelined is not None:
                split = functools.partial(arguments.split, engine, batch, named)
                both += torch.stack(pipelined.evaluate(split, lambda part: loss_of(model, arguments, part)))
            for part in arguments.split(engine, batch, named) if pipelined is None else ():
                loss, weight = loss_of(model, arguments, part)
                both[0] += loss
                both[1] += weight
            loss, weight = group.sum(both, "the loss").unbind()
            return (loss / (group.replicas if loss_weight is None else weight)).float()

    return evaluate


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
