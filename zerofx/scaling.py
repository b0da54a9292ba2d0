"""The scale of the loss: constant, or dynamic by DeepSpeed's rule, kept up on the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LossScaleError(RuntimeError):
    """Gradients overflow at the smallest loss scale that is allowed."""


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that follows overflows, by the rule and with the defaults of DeepSpeed's dynamic loss scale.

    Attributes:
        initial: the scale of the first step.
        window: that many steps in a row without an overflow multiply the scale by `factor` and refill the hysteresis.
        hysteresis: overflows, in a row or not, until one divides the scale by `factor`; each later one does, too, until
            a window without overflow refills it.
        minimum: the smallest scale; an overflow that should divide it raises LossScaleError.
        factor: what the scale is multiplied and divided by.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        for field in ("initial", "minimum", "factor"):
            value = getattr(self, field)
            if type(value) not in (int, float) or not (value > 0 and isfinite(value)):
                raise ValueError(f"DynamicLossScale({field}={value!r}) is not possible: it must be a number above 0")
        for field in ("window", "hysteresis"):
            if type(value := getattr(self, field)) is not int or value < 1:
                raise ValueError(f"DynamicLossScale({field}={value!r}) is not possible: it must be an int, 1 or more")
        if self.factor <= 1 or self.initial < self.minimum:
            raise ValueError(f"{self} is not possible: factor must be above 1, and initial not below minimum")


class ScaleState(NamedTuple):
    """0-dim tensors: the scale, the steps since the last overflow or growth, the hysteresis left, and whether an
    overflow found the scale at its minimum.
    """

    scale: Tensor
    clean: Tensor
    hysteresis: Tensor
    stuck: Tensor


def begin(options: DynamicLossScale, device: torch.device) -> ScaleState:
    return ScaleState(
        torch.full((), options.initial, dtype=torch.float32, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
        torch.full((), options.hysteresis, dtype=torch.int64, device=device),
        torch.zeros((), dtype=torch.bool, device=device),
    )


def advance(options: DynamicLossScale, state: ScaleState, overflow: Tensor) -> ScaleState:
    """The state behind a step that overflowed or did not; nothing of it is read on the host."""
    scale, clean, hysteresis, stuck = state
    absorbed, clean = hysteresis > 1, torch.where(overflow, 0, clean + 1)
    grown, grow = scale * options.factor, clean == options.window
    grown = torch.where(grown.isfinite(), grown, scale)
    lowered = (scale / options.factor).clamp(min=options.minimum)
    return ScaleState(
        torch.where(overflow, torch.where(absorbed, scale, lowered), torch.where(grow, grown, scale)),
        torch.where(grow, 0, clean),
        torch.where(overflow & absorbed, hysteresis - 1, torch.where(grow, options.hysteresis, hysteresis)),
        stuck | (overflow & ~absorbed & (scale <= options.minimum)),
    )


class LossScale:
    """The loss scale of one training: none, a constant, or a dynamic one."""

    def __init__(self, asked: float | DynamicLossScale | None, device: torch.device) -> None:
        self.options = asked if isinstance(asked, DynamicLossScale) else None
        self.state: ScaleState | None = None
        self.scale: Tensor | None = None
        self._seen: tuple[Tensor, torch.cuda.Event] | None = None
        if self.options is not None:
            self.state = begin(self.options, device)
            self.scale = self.state.scale
        elif isinstance(asked, (int, float)):
            self.scale = torch.full((), float(asked), dtype=torch.float32, device=device)

    def update(self, overflow: Tensor) -> None:
        """Goes on by the verdict over a step; on CPUs a scale that is stuck at its minimum raises here."""
        if self.options is None or self.state is None:
            return
        self.state = advance(self.options, self.state, overflow)
        self.scale = self.state.scale
        if overflow.is_cuda and self._seen is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied = self.state.stuck.to("cpu", non_blocking=True)
            event.record()
            self._seen = copied, event
        elif not overflow.is_cuda:
            self._refuse_stuck(self.state.stuck)

    def check(self) -> None:
        """Raises LossScaleError where a GPU has told that the scale is stuck at its minimum; it is not waited for."""
        if self._seen is not None and self._seen[1].query():  # type: ignore[no-untyped-call]
            copied, self._seen = self._seen[0], None
            self._refuse_stuck(copied)

    def _refuse_stuck(self, stuck: Tensor) -> None:
        assert self.options is not None
        if stuck.item():
            raise LossScaleError(
                f"gradients overflow at the smallest loss scale, {self.options.minimum:g}, with no hysteresis left: "
                "the loss is not finite, or its gradients exceed fp16; look at the loss, or train with precision='bf16'"
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; reading them waits for the device."""
        if self.state is None:
            return {}
        scale, clean, hysteresis, _ = self.state
        return {"scale": scale.item(), "clean": int(clean.item()), "hysteresis": int(hysteresis.item())}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if self.state is None:
            if saved:
                raise ValueError("the saved loss scale is dynamic and this one is not: pass loss_scale='dynamic'")
            return
        if saved.keys() != {"scale", "clean", "hysteresis"}:
            raise ValueError(f"a saved loss scale has scale, clean and hysteresis, this one has {sorted(saved)}")
        told = (saved["scale"], saved["clean"], saved["hysteresis"], False)
        fields = zip(self.state, told, strict=True)
        self.state = ScaleState(*(torch.full_like(tensor, value) for tensor, value in fields))
        self.scale = self.state.scale
        self._seen = None
