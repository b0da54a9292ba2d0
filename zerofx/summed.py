"""Reads of parameters whose gradients each tensor-parallel rank computes in part, as in sequence parallelism."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

c10d = cast("Any", torch.ops._c10d_functional)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: str) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return c10d.wait_tensor(c10d.all_reduce(grad.contiguous(), "sum", ctx.group)), None


def sum_gradient(value: Tensor, group: str) -> Tensor:
    """The value; its gradient is the sum of those of all ranks of the group."""
    return cast("Tensor", cast("Any", _SumGradient).apply(value, group))
