"""Catches an optimizer's step on gradients that wait to be reduced."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from zerofx.accumulate import Accumulation


class Waiting:
    """The models whose gradients may wait."""

    def __init__(self) -> None:
        self.known = weakref.WeakSet["Accumulation"]()
        self.hook: Any = None

    def add(self, accumulation: Accumulation) -> None:
        self.known.add(accumulation)
        if self.hook is None:
            self.hook = register_optimizer_step_pre_hook(self.check)

    def check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(closure is not None for closure in (*args[1:], *kwargs.values())):
            return  # which makes the step's gradients
        waiting = {id(param): name for each in list(self.known) for name, param in each.waiting().items()}
        names = [waiting[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in waiting]
        if names:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() while gradients wait to be reduced, {len(names)} of them, such as "
                f"that of {names[0]!r}: run forward and backward of the last micro-batch before it outside of "
                "no_sync(), or after set_requires_gradient_sync(True)"
            )


WAITING = Waiting()
