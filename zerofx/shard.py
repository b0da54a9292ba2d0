"""Turns a module's parameters into DTensor shards, read through the swapped classes of `zerofx.swap`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from zerofx.layout import ParamLayout, rows_at
from zerofx.ops import REPLICATED
from zerofx.placing import data_dim
from zerofx.stale import STALE
from zerofx.stored import own_slice, stored_part
from zerofx.swap import NAMES, READS, Read
from zerofx.tensor_parallel import Sliced, Storage


@dataclass
class Owner:
    """The places of one parameter in the model: every (module, name) that holds it, first one first.

    `summed` names the group over which each rank's gradient is to be added up before it counts, if any.
    """

    param: nn.Parameter
    layout: ParamLayout
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sliced: Sliced | None = None
    storage: Storage | None = None
    summed: str = ""


def shard_parameter(owner: Owner) -> None:
    """Replaces a parameter by its DTensor part in all its places; `swap_class` makes their modules read it."""
    assert owner.storage is not None
    mesh = owner.storage.mesh
    axis = data_dim(mesh)
    module, name = owner.places[0]
    part = stored_part(cast("nn.Parameter", module._parameters[name]), owner.layout, owner.storage)
    STALE.add(owner.param, owner.layout.name)
    dim, rows = REPLICATED, 0
    if owner.layout.dim is not None:
        dim = owner.layout.dim
        rows = rows_at(owner.layout.size[dim], mesh.size(axis), mesh.get_local_rank(axis))
    for module, name in owner.places:
        module._parameters[name] = part
        read = Read(owner.layout.size, dim, rows, mesh.get_group(axis).group_name, owner.sliced, owner.summed)
        module.__dict__.setdefault(READS, {})[name] = read
        module.__dict__.setdefault(NAMES, {})[name] = owner.layout.name


def drop_parameter(owner: Owner) -> None:
    """Takes a parameter that another rank holds out of all its places."""
    STALE.add(owner.param, owner.layout.name)
    for module, name in owner.places:
        module._parameters[name] = None


def sync_module(module: nn.Module, group: dist.ProcessGroup, done: set[int]) -> None:
    """Gives the module's own parameters and buffers the values of the group's first rank."""
    stored = module.__dict__.get(READS, {})
    own = [param for name, param in module._parameters.items() if name not in stored]
    for tensor in (*own, *module._buffers.values()):
        if tensor is None or id(tensor) in done or tensor.numel() == 0:
            continue
        if not isinstance(tensor, nn.Parameter):  # a parameter is sharded before another module is synchronised
            done.add(id(tensor))
        target = own_slice(tensor)
        for dim, stride in enumerate(target.stride()):
            if stride == 0:
                target = target.narrow(dim, 0, 1)
        sent = target.contiguous()
        dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else sent, group=group, group_src=0)
        if sent.data_ptr() != target.data_ptr():
            target.copy_(sent)
