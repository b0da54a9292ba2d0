"""Turns a module's parameters into DTensor shards, read through the swapped classes of `zerofx.swap`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerofx.layout import ParamLayout, rows_at
from zerofx.ops import REPLICATED
from zerofx.stale import STALE
from zerofx.stored import stored_part
from zerofx.swap import NAMES, READS, Read


@dataclass
class Owner:
    """The places of one parameter in the model: every (module, name) that holds it, first one first."""

    param: nn.Parameter
    layout: ParamLayout
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def shard_parameter(owner: Owner, mesh: DeviceMesh) -> None:
    """Replaces a parameter by its DTensor part in all its places; `swap_class` makes their modules read it."""
    module, name = owner.places[0]
    part = stored_part(cast("nn.Parameter", module._parameters[name]), owner.layout, mesh)
    STALE.add(owner.param, owner.layout.name)
    dim = REPLICATED if owner.layout.dim is None else owner.layout.dim
    rows = 0 if owner.layout.dim is None else rows_at(owner.layout.size[dim], mesh.size(), mesh.get_local_rank())
    for module, name in owner.places:
        module._parameters[name] = part
        read = Read(owner.layout.size, dim, rows, mesh.get_group().group_name)
        module.__dict__.setdefault(READS, {})[name] = read
        module.__dict__.setdefault(NAMES, {})[name] = owner.layout.name


def drop_parameter(owner: Owner) -> None:
    """Takes a parameter that another rank holds out of all its places."""
    STALE.add(owner.param, owner.layout.name)
    for module, name in owner.places:
        module._parameters[name] = None


def sync_module(module: nn.Module, group: dist.ProcessGroup, done: set[int]) -> None:
    """Gives the module's own parameters and buffers the values of the group's first rank."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is None or isinstance(tensor, DTensor) or id(tensor) in done or tensor.numel() == 0:
            continue
        if not isinstance(tensor, nn.Parameter):  # a parameter is sharded before another module is synchronised
            done.add(id(tensor))
        target = tensor.detach()
        for dim, stride in enumerate(target.stride()):
            if stride == 0:
                target = target.narrow(dim, 0, 1)
        sent = target.contiguous()
        dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else sent, group=group, group_src=0)
        if sent.data_ptr() != target.data_ptr():
            target.copy_(sent)
