"""The part of a parameter that one rank stores, as a DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerofx.layout import ParamLayout, chunk_rows, rows_at
from zerofx.stale import STALE


def distribute(whole: Tensor, like: DTensor) -> DTensor:
    """The part of `whole` that this rank stores of a parameter stored as `like`. Nothing is communicated."""
    mesh, (placement,) = like.device_mesh, like.placements
    local = whole.detach()
    if isinstance(placement, Shard):
        local = local_rows(local, placement.dim, mesh.size(), mesh.get_local_rank())
    local = local.to(like.to_local().device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=contiguous_stride(whole.shape)
    )


def stored_as(value: Tensor, like: DTensor) -> DTensor:
    """A whole tensor, or one stored in another way, as `like` is stored; a collective in the second case."""
    if not isinstance(value, DTensor):
        return distribute(value, like)
    if value.placements == like.placements:
        return value
    return value.redistribute(placements=like.placements)


def local_rows(whole: Tensor, dim: int, world: int, rank: int) -> Tensor:
    """A view of the rows of `dim` that `rank` stores."""
    size = whole.shape[dim]
    chunk = chunk_rows(size, world)
    return whole.narrow(dim, min(rank * chunk, size), rows_at(size, world, rank))


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def stored_part(param: nn.Parameter, layout: ParamLayout, mesh: DeviceMesh) -> nn.Parameter:
    local = param.detach()
    placement: Shard | Replicate = Replicate()
    if layout.dim is not None:
        placement = Shard(layout.dim)
        local = local_rows(local, layout.dim, mesh.size(), mesh.get_local_rank())
    local = local.clone(memory_format=torch.contiguous_format)
    stride = contiguous_stride(param.shape)
    part = DTensor.from_local(local, mesh, [placement], run_check=False, shape=param.shape, stride=stride)
    new = nn.Parameter(part, requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    if param._backward_hooks:
        new._backward_hooks = param._backward_hooks
    if hooks := getattr(param, "_post_accumulate_grad_hooks", None):
        new._post_accumulate_grad_hooks = hooks
    if param.grad is not None:
        new.grad = distribute(param.grad, part)
    return new


def converted(param: nn.Parameter, convert: Callable[[Tensor], Tensor], name: str) -> nn.Parameter:
    """The parameter after `convert`: itself where nothing changes, else a new one, the same for tied places."""
    with torch.no_grad():
        value = cast("DTensor", convert(param))
    if value.device.type != cast("DTensor", param).device_mesh.device_type:
        raise RuntimeError(f"a compiled model stays on its device: move it to {value.device} before zerofx.compile")
    if value.dtype == param.dtype:
        return param
    known = param.__dict__.get("_zerofx_converted")
    if known is not None and known.dtype == value.dtype:
        return cast("nn.Parameter", known)
    new = nn.Parameter(value, requires_grad=param.requires_grad)
    if param.grad is not None:
        new.grad = convert(param.grad)
    param.__dict__["_zerofx_converted"] = new
    STALE.add(param, name, "a dtype conversion of the model")
    return new
