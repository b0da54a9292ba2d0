"""Steps of several micro-batches, in all the ways in which their gradients may be reduced, and in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.ranks import rows

Around = Callable[[nn.Module, int, int], AbstractContextManager[None]]


def net_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(rows(seed)).square().mean()


def by_no_sync(model: nn.Module, number: int, count: int) -> AbstractContextManager[None]:
    return nullcontext() if number == count - 1 else model.no_sync()


def by_flag(model: nn.Module, number: int, count: int) -> AbstractContextManager[None]:
    model.set_requires_gradient_sync(number == count - 1)
    return nullcontext()


def always(model: nn.Module, number: int, count: int) -> AbstractContextManager[None]:
    return nullcontext()


def deferring(model: nn.Module, number: int, count: int) -> AbstractContextManager[None]:
    return model.__dict__["_zerofx_engine"].micro_batch(number == 0, number == count - 1, True)


def reducing(model: nn.Module, number: int, count: int) -> AbstractContextManager[None]:
    return model.__dict__["_zerofx_engine"].micro_batch(number == 0, number == count - 1, False)


def run(model: nn.Module, seed: int, count: int, around: Around, loss: Any = net_loss) -> None:
    """One step's micro-batches of this rank."""
    for number in range(count):
        with around(model, number, count):
            loss(model, 100 * seed + 10 * number + dist.get_rank()).backward()


def expect(plain: nn.Module, seed: int, count: int, loss: Any = net_loss) -> None:
    """All ranks' micro-batches of the step in one process."""
    world = dist.get_world_size()
    for number in range(count):
        for rank in range(world):
            (loss(plain, 100 * seed + 10 * number + rank) / world).backward()


WAYS = [by_no_sync, deferring, reducing]
