"""What a situation is: a model, its batches and its training loop, with what a sharded run owes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn

from tests.models import generator
from tests.training import adamw, sgd


class Situation:
    """Made anew for each training run; a subclass says in its docstring what goes wrong elsewhere.

    Sharded training owes the values of one process, unless `refused` has words of the error that it owes instead.
    """

    optimizers = (sgd, adamw)
    worlds: tuple[int, ...] = (2, 3)
    on_inductor = True
    """False where Inductor is known to differ from eager code by itself."""
    options: tuple[dict[str, Any], ...] = ({},)
    """Arguments of zerofx.compile to try beside the stage."""
    micro_batches = 1
    clip: float | None = None
    refused: tuple[str, ...] = ()
    zero_gradients: tuple[str, ...] = ()
    """Parameters that eager code leaves without a gradient, and compiled code gives a zero one, as documented."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        """Numbers that the user's own code has read; they must be those that it reads in one process."""

    def model(self) -> nn.Module:
        raise NotImplementedError

    def batch(self, rank: int, micro: int) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean square of the output."""
        return model(batch).square().mean()

    def groups(self, model: nn.Module) -> Iterable[Any]:
        """What the optimizer is made of: parameters, or groups of them."""
        return model.parameters()

    def backward(self, model: nn.Module, batch: Any, scale: float) -> torch.Tensor:
        loss = self.loss(model, batch)
        (loss * scale).backward()
        return loss.detach()

    def before_step(self, model: nn.Module, step: int) -> None:
        """User code at the start of a step."""

    def before_update(self, model: nn.Module) -> None:
        """User code between the backward and the optimizer."""

    def after_step(self, model: nn.Module) -> None:
        """User code after the optimizer."""

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Asserts what else holds of the sharded model after training, on every rank."""


def rows(*shape: int) -> Callable[[Situation, int, int], torch.Tensor]:
    """A `batch` of normal random numbers."""

    def batch(self: Situation, rank: int, micro: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator(rank, micro))

    return batch


def tokens(vocabulary: int, *shape: int) -> Callable[[Situation, int, int], torch.Tensor]:
    """A `batch` of random token ids."""

    def batch(self: Situation, rank: int, micro: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, shape, generator=generator(rank, micro))

    return batch


def to_one(self: Situation, model: nn.Module, batch: Any) -> torch.Tensor:
    """A `loss`: the mean squared distance of the output from one."""
    return (model(batch) - 1).square().mean()


def buckets(*elements: int) -> tuple[dict[str, Any], ...]:
    """The `options` that try these sizes of buckets, in fp32 elements."""
    return tuple({"bucket_mb": 4 * count / 2**20} for count in elements)
