"""Fused steps that are told on the device by what to divide gradients, and whether to change anything."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

FUSED = frozenset({optim.Adam, optim.AdamW, optim.SGD})
"""Their fused kernels take `grad_scale` and `found_inf`, as torch.amp.GradScaler gives them."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda")


class Told(NamedTuple):
    """0-dim float32 tensors: gradients are divided by the first; a step whose `skip` is 1 leaves all as it was."""

    divisor: Tensor | None
    skip: Tensor | None


def can_fuse(optimizer: optim.Optimizer) -> bool:
    """Whether the optimizer's step has a fused kernel, and nobody has asked for another way."""
    return type(optimizer) in FUSED and all(map(_can_fuse, optimizer.param_groups))


def starts_without_skipping(optimizer: optim.Optimizer) -> bool:
    """Whether a fused step would leave states that it made and did not write, if it were told to skip.

    That is SGD's momentum, for parameters that have none yet.
    """
    return type(optimizer) is optim.SGD and any(
        group["momentum"] and param.grad is not None and "momentum_buffer" not in optimizer.state.get(param, {})
        for group in optimizer.param_groups
        for param in group["params"]
    )


def fuse(stand_in: optim.Optimizer, told: Told) -> None:
    """Makes the step of an optimizer that `can_fuse` a fused one, and tells it."""
    for group in stand_in.param_groups:
        group |= {"fused": True, "foreach": False}
    for param, state in stand_in.state.items():
        if "step" in state:  # other kernels keep it on the CPU
            state["step"] = state["step"].to(param.device)
    cast(Any, stand_in).grad_scale, cast(Any, stand_in).found_inf = told


def _can_fuse(group: dict[str, Any]) -> bool:
    asked = group["fused"] is False or group["foreach"] or group["differentiable"] or group.get("capturable")
    if asked or isinstance(group["weight_decay"], Tensor):
        return False
    return all(param.dtype in DTYPES and param.device.type in DEVICES and _is_dense(param) for param in group["params"])


def _is_dense(param: Tensor) -> bool:
    """Whether the parameter fills its memory without gaps, as fused kernels on CPUs take for granted."""
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.is_contiguous() or torch.empty_like(local, device="meta").stride() == local.stride()
