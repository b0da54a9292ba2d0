"""`zerofx.full_params(model)`: a while in which parameters are whole, to be looked at, written or generated with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from zerofx.stored import local_rows
from zerofx.swap import READS

Place = tuple[nn.Module, str]


@contextmanager
def full_params(model: nn.Module, *, from_rank: int | None = None) -> Iterator[None]:
    """Makes the parameters of a compiled model whole, plain and frozen inside the `with`, and keeps what is written.

    Enter it on all ranks together. On leaving, each rank stores its part of what it holds: write the same values on all
    of them, or write on one and name it as `from_rank`, its rank in the group that shares the model. Every rank holds
    the whole model meanwhile. Forwards inside, such as those of `generate()`, gather nothing and have no gradients.

    Raises TypeError for a model whose parameters are not sharded, and RuntimeError where it is entered already.
    """
    places = [(module, name) for module in model.modules() for name in module.__dict__.get(READS, ())]
    stored = {place: place[0]._parameters.get(place[1]) for place in places}
    if not places:
        raise TypeError("zerofx.full_params needs a model that zerofx.compile was called on in a process group")
    if any(param is not None and not isinstance(param, DTensor) for param in stored.values()):
        raise RuntimeError("zerofx.full_params is entered for this model already: leave it first")
    whole = {id(param): _whole(param) for param in stored.values() if param is not None}
    for (module, name), param in stored.items():
        module._parameters[name] = None if param is None else whole[id(param)]
    try:
        yield
    finally:
        for (module, name), param in stored.items():
            held = module._parameters.get(name)
            if param is not None and held is not None and id(param) in whole:
                _store(param, held, from_rank)
                del whole[id(param)]
            module._parameters[name] = param


def _whole(param: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(cast("DTensor", param).full_tensor().detach(), requires_grad=False)


def _store(param: nn.Parameter, whole: Tensor, from_rank: int | None) -> None:
    """Puts this rank's part of the whole values into the parameter."""
    shard = cast("DTensor", param)
    mesh, (placement,) = shard.device_mesh, shard.placements
    value = whole.detach().to(shard.to_local().device)
    if from_rank is not None:
        value = value.contiguous()
        dist.broadcast(value, group=mesh.get_group(), group_src=from_rank)
    if isinstance(placement, Shard):
        value = local_rows(value, placement.dim, mesh.size(), mesh.get_local_rank())
    with torch.no_grad():
        shard.to_local().copy_(value)
