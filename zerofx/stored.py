"""The part of a parameter that one rank stores, as a DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerofx.layout import ParamLayout
from zerofx.placing import cut, cut_gathered, data_dim
from zerofx.stale import STALE
from zerofx.tensor_parallel import Storage


def distribute(whole: Tensor, like: DTensor) -> DTensor:
    """The part of `whole` that this rank stores of a parameter stored as `like`. Nothing is communicated."""
    return _stored(cut(whole.detach(), like), like)


def _stored(part: Tensor, like: DTensor) -> DTensor:
    local = part.to(like.to_local().device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def stored_as(value: Tensor, like: DTensor) -> DTensor:
    """A whole tensor, or one stored in another way, as `like` is stored; a collective in the second case.

    One that is sliced over tensor-parallel ranks as `like` is, and whole over the others, is cut without one.
    """
    if not isinstance(value, DTensor):
        return distribute(value, like)
    if value.device_mesh == like.device_mesh:
        return value if value.placements == like.placements else value.redistribute(placements=like.placements)
    dim = data_dim(like.device_mesh)
    if value.placements == (*like.placements[:dim], *like.placements[dim + 1 :]):
        return _stored(cut_gathered(value.to_local(), like), like)
    return distribute(value.full_tensor(), like)


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def stored_part(param: nn.Parameter, layout: ParamLayout, storage: Storage) -> nn.Parameter:
    """The part of a parameter of the model, which may be sliced over tensor-parallel ranks already."""
    mesh, stride = storage.mesh, contiguous_stride(param.shape)
    placements = storage.placements(Replicate() if layout.dim is None else Shard(layout.dim))
    given = own_slice(param)
    whole = DTensor.from_local(given, mesh, placements, run_check=False, shape=param.shape, stride=stride)
    local = cut_gathered(given, whole).clone(memory_format=torch.contiguous_format)
    part = DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=stride)
    new = nn.Parameter(part, requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    if param._backward_hooks:
        new._backward_hooks = param._backward_hooks
    if hooks := getattr(param, "_post_accumulate_grad_hooks", None):
        new._post_accumulate_grad_hooks = hooks
    if param.grad is not None:
        new.grad = stored_as(param.grad, part)
    return new


def own_slice(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor of the model before it is compiled."""
    own = tensor.detach()
    return own.to_local() if isinstance(own, DTensor) else own


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
    new.__dict__.update(param.__dict__)
    new.__dict__.pop("_zerofx_converted", None)
    if param.grad is not None:
        new.grad = convert(param.grad)
    param.__dict__["_zerofx_converted"] = new
    STALE.add(param, name, "a dtype conversion of the model")
    return new
