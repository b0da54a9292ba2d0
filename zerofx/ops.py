"""The ops that mark a sharded parameter in a program: `zerofx::unshard`, `unshard_apart` and `reduce_grad`.

All have a real eager body, so a program that no pass has touched is already right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx._torch import group_size
from zerofx.layout import chunk_rows
from zerofx.sequence import PARAM, note_eager, of_param

c10d = cast("Any", torch.ops._c10d_functional)
REPLICATED = -1


@torch.library.custom_op("zerofx::unshard", mutates_args=())
def unshard(shard: Tensor, size: Sequence[int], dim: int, rows: int, group: str) -> Tensor:
    """The whole parameter from this rank's part of it.

    `shard` holds `rows` rows of `dim`; the result has the shape `size`. With `dim` -1 the parameter is replicated and
    the result is a copy. `rows` makes programs of ranks that hold different numbers of rows different programs.
    """
    if dim == REPLICATED:
        return shard.clone()
    parts = group_size(group)
    padded = _pad_rows(shard, dim, chunk_rows(size[dim], parts) - rows).movedim(dim, 0).contiguous()
    note_eager(group, "all_gather_into_tensor", "unshard", padded.numel() * parts, padded.dtype)
    whole: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(padded, parts, group))
    return whole[: size[dim]].movedim(0, dim).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("zerofx::reduce_grad", mutates_args=())
def reduce_grad(grad: Tensor, dim: int, rows: int, group: str) -> Tensor:
    """The mean of a parameter's gradient over the group, cut to the `rows` rows of `dim` that this rank stores.

    With `dim` -1 the whole mean is returned.
    """
    parts = group_size(group)
    if dim == REPLICATED:
        note_eager(group, "all_reduce", "reduce_grad", grad.numel(), grad.dtype)
        reduced: Tensor = c10d.wait_tensor(c10d.all_reduce(grad.contiguous(), "avg", group))
        return reduced
    missing = chunk_rows(grad.shape[dim], parts) * parts - grad.shape[dim]
    padded = _pad_rows(grad, dim, missing).movedim(dim, 0).contiguous()
    note_eager(group, "reduce_scatter_tensor", "reduce_grad", padded.numel() // parts, padded.dtype)
    mean: Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(padded, "avg", parts, group))
    return mean[:rows].movedim(0, dim).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("zerofx::unshard_apart", mutates_args=())
def unshard_apart(
    shard: Tensor, whole: Tensor, size: Sequence[int], dim: int, rows: int, group: str, kept: bool, reduced: bool
) -> Tensor:
    """`unshard` with a whole tensor beside the part: the source if `kept`, and what gets the gradient unless `reduced`.

    A gradient that is not reduced goes to `whole` as it is; a reduced one goes to `shard`, and `whole` has none.
    """
    copy: Tensor = whole.clone() if kept else unshard(shard, size, dim, rows, group)
    return copy


def _pad_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, rows]) if rows else tensor


@unshard.register_fake
def _(shard: Tensor, size: Sequence[int], dim: int, rows: int, group: str) -> Tensor:
    return shard.new_empty(tuple(size))


@unshard_apart.register_fake
def _(shard: Tensor, whole: Tensor, size: Sequence[int], *rest: Any) -> Tensor:
    return shard.new_empty(tuple(size))


@reduce_grad.register_fake
def _(grad: Tensor, dim: int, rows: int, group: str) -> Tensor:
    if dim == REPLICATED:
        return torch.empty_like(grad, memory_format=torch.contiguous_format)
    return grad.new_empty((*grad.shape[:dim], rows, *grad.shape[dim + 1 :]))


def _save_unshard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.dim, ctx.rows, ctx.group = inputs
    ctx.param = PARAM.get()


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    with of_param(ctx.param):
        return reduce_grad(grad, ctx.dim, ctx.rows, ctx.group), None, None, None, None


def _save_unshard_apart(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, ctx.dim, ctx.rows, ctx.group, _, ctx.reduced = inputs
    ctx.param = PARAM.get()


def _unshard_apart_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if not ctx.reduced:
        return None, grad, *[None] * 6
    with of_param(ctx.param):
        return reduce_grad(grad, ctx.dim, ctx.rows, ctx.group), *[None] * 7


def _save_reduce_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, ctx.dim, ctx.rows, ctx.group = inputs
    ctx.size, ctx.param = tuple(grad.shape), PARAM.get()


def _reduce_grad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    with of_param(ctx.param):
        return unshard(grad, ctx.size, ctx.dim, ctx.rows, ctx.group), None, None, None


unshard.register_autograd(_unshard_backward, setup_context=_save_unshard)
unshard_apart.register_autograd(_unshard_apart_backward, setup_context=_save_unshard_apart)
reduce_grad.register_autograd(_reduce_grad_backward, setup_context=_save_reduce_grad)
