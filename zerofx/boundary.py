"""What ends a step: one all-reduce for loss, norm and verdict, then the update, scaled and clipped on its way."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.tensor import DTensor, Replicate

from zerofx import _torch
from zerofx.fused import Told, starts_without_skipping
from zerofx.optimizers import LOCAL_STEPS
from zerofx.sequence import note_eager, of_param
from zerofx.updates import Updates

CLIP_EPS = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


class Group(NamedTuple):
    """The ranks that share a model, by the name of their process group, and how many batches they train on together."""

    name: str
    world: int
    replicas: int

    def sum(self, values: Tensor, what: str) -> Tensor:
        """The sum of all ranks' values, in place; no rank's host waits for its GPU."""
        if self.world > 1:
            with of_param(what):
                note_eager(self.name, "all_reduce", "step", values.numel(), values.dtype)
            dist.all_reduce(values, group=_torch.process_group(self.name))
        return values


class Totals(NamedTuple):
    """0-dim float64 tensors, over all ranks: the sum of the squares of the gradients as they are, scaled and not yet
    divided, each element counted once; the sum of the losses; and that of the weights.
    """

    squares: Tensor
    loss: Tensor
    weight: Tensor


def totals(
    optimizer: optim.Optimizer,
    loss: Tensor,
    weight: Tensor,
    group: Group,
    elsewhere: Container[int] = (),
    updates: Updates | None = None,
) -> Totals:
    """Adds up what all ranks have, but for parameters that are counted elsewhere, by their ids.

    A parameter that zerofx.compile was told to ignore is another one on each rank. Of gradients that are gone,
    `updates` has the norms.
    """
    parts, copies = map(_torch.norms, _local_gradients(optimizer, elsewhere))
    if updates is not None:
        parts, copies = [*parts, *updates.parts], [*copies, *updates.copies]
    squares = _squares(parts, loss) + _squares(copies, loss) / group.replicas
    return Totals(*group.sum(torch.stack([squares, loss, weight]), "the loss and the norm of the gradients").unbind())


def _local_gradients(optimizer: optim.Optimizer, elsewhere: Container[int] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of which each rank has its own part, and those of which each has a copy."""
    parts, copies = list[Tensor](), list[Tensor]()
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = None if id(param) in elsewhere else param.grad
            if not isinstance(grad, DTensor):
                parts += [] if grad is None else [grad]
                continue
            if grad.placements != param.placements:
                raise RuntimeError(
                    f"a gradient is placed as {grad.placements} and its parameter as {param.placements}: leave "
                    "gradients to the step, and change them in a hook before the optimizer's step"
                )
            (copies if grad.placements == (Replicate(),) else parts).append(grad.to_local())
    return parts, copies


def _squares(norms: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(norms).double().square().sum() if norms else torch.zeros_like(like)


def clip_factor(norm: Tensor, clip: float | None) -> Tensor | None:
    """What gradients of that norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does."""
    return None if clip is None else (clip / (norm + CLIP_EPS)).clamp(max=1.0)


def update(optimizer: optim.Optimizer, factor: Tensor | None, skip: Tensor | None) -> None:
    """Steps the optimizer on its gradients times `factor`, unless `skip` is true.

    A fused step learns both on the device. Any other one is not called where `skip` is true, which the host waits for.
    """
    if LOCAL_STEPS.can_tell(optimizer) and not (skip is not None and starts_without_skipping(optimizer)):
        told = Told(None if factor is None else factor.reciprocal().float(), None if skip is None else skip.float())
        with LOCAL_STEPS.telling(optimizer, told):
            optimizer.step()
        return
    if skip is not None and skip.item():
        return
    if factor is not None:
        _torch.multiply([grad for grads in _local_gradients(optimizer) for grad in grads], factor)
    optimizer.step()
