"""Catches an optimizer that was built before its model was sharded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StaleParameters:
    """Parameters that have been replaced: an optimizer that holds one would update what nobody reads."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[nn.Parameter], str, str]] = {}
        self.hook: Any = None

    def add(self, param: nn.Parameter, name: str, event: str = "zerofx.compile") -> None:
        key = id(param)
        self.known[key] = weakref.ref(param, lambda _: self.known.pop(key, None)), name, event
        if self.hook is None:
            self.hook = register_optimizer_step_pre_hook(self.check)

    def check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.known:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                held, name, event = self.known.get(id(param), (None, "", ""))
                if held is not None and held() is param:
                    raise RuntimeError(
                        f"this {type(optimizer).__name__} was built before {event} and holds the old parameter "
                        f"{name!r}: build it from model.parameters() afterwards"
                    )


STALE = StaleParameters()
