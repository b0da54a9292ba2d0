"""What ends a step: one all-reduce for loss, norm and verdict, then the update, scaled and clipped on its way."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, optim

from zerofx import _torch
from zerofx.fused import Told, starts_without_skipping
from zerofx.mesh import Axis, ModelParallel
from zerofx.norm import local_gradients, powers
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

    @classmethod
    def of_axis(cls, axis: Axis) -> Group:
        return cls(axis.group, axis.size, axis.size)

    def sum(self, values: Tensor, what: str) -> Tensor:
        """The sum of all ranks' values, in place; no rank's host waits for its GPU."""
        return self.reduce(values, what, dist.ReduceOp.SUM)

    def reduce(self, values: Tensor, what: str, op: dist.ReduceOp.RedOpType) -> Tensor:
        """The same by another operation."""
        if self.world > 1:
            with of_param(what):
                note_eager(self.name, "all_reduce", "step", values.numel(), values.dtype)
            dist.all_reduce(values, op=op, group=_torch.process_group(self.name))
        return values


class Totals(NamedTuple):
    """0-dim float64 tensors, over all ranks: the sum of the squares of the gradients as they are, scaled and not yet
    divided, each element counted once; the sum of the losses over the data-parallel ranks; and that of the weights.
    """

    squares: Tensor
    loss: Tensor
    weight: Tensor


def totals(
    optimizer: optim.Optimizer,
    loss: Tensor,
    weight: Tensor,
    group: Group,
    parallel: ModelParallel,
    updates: Updates | None = None,
) -> Totals:
    """Adds up what all ranks have.

    A parameter that zerofx.compile was told to ignore is another one on each rank. Of gradients that are gone,
    `updates` has the norms.
    """
    squares = powers(local_gradients(_params(optimizer), parallel), 2.0, loss)
    if updates is not None:
        squares = squares + updates.squares(loss)
    for axis in parallel.axes:
        squares = Group.of_axis(axis).sum(squares, "the norm of the gradients")
    return Totals(*group.sum(torch.stack([squares, loss, weight]), "the loss and the norm of the gradients").unbind())


def _params(optimizer: optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


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
        for grads in local_gradients(_params(optimizer), ModelParallel()).values():
            _torch.multiply(grads, factor)
    optimizer.step()
