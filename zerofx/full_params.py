"""`zerofx.full_params(model)`: a while in which parameters are whole, to be looked at, written or generated with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from zerofx.placing import cut_gathered, data_dim, placed_as
from zerofx.stored import own_slice
from zerofx.swap import READS, Read, is_stored
from zerofx.tensor_parallel import as_read

Place = tuple[nn.Module, str]


@contextmanager
def full_params(model: nn.Module, *, from_rank: int | None = None) -> Iterator[None]:
    """Makes the parameters of a compiled model whole, plain and frozen inside the `with`, and keeps what is written.

    Enter it on all ranks together. On leaving, each rank stores its part of what it holds: write the same values on all
    of them, or write on one and name it as `from_rank`, its rank in the group that shares the model. Every rank holds
    the whole model meanwhile; of a parameter that tensor-parallel ranks slice it holds its slice, a DTensor over these
    if it was one. Forwards inside, such as those of `generate()`, gather nothing and have no gradients.

    Raises TypeError for a model whose parameters are not sharded, and RuntimeError where it is entered already.
    """
    places = [(module, name) for module in model.modules() for name in module.__dict__.get(READS, ())]
    stored = {place: place[0]._parameters.get(place[1]) for place in places}
    if not places:
        raise TypeError("zerofx.full_params needs a model that zerofx.compile was called on in a process group")
    reads = {place: place[0].__dict__[READS][place[1]] for place in places}
    if any(param is not None and not is_stored(param, reads[place]) for place, param in stored.items()):
        raise RuntimeError("zerofx.full_params is entered for this model already: leave it first")
    whole = {id(param): _whole(param, reads[place]) for place, param in stored.items() if param is not None}
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


def _whole(param: nn.Parameter, how: Read) -> nn.Parameter:
    part = cast("DTensor", param)
    with torch.no_grad():
        whole = part.redistribute(placements=placed_as(part, Replicate())).to_local().detach().clone()
        return nn.Parameter(whole if how.sliced is None else as_read(whole, how.sliced), requires_grad=False)


def _store(param: nn.Parameter, whole: Tensor, from_rank: int | None) -> None:
    """Puts this rank's part of the whole values into the parameter."""
    shard = cast("DTensor", param)
    mesh = shard.device_mesh
    value = own_slice(whole).to(shard.to_local().device)
    if from_rank is not None:
        value = value.contiguous()
        dist.broadcast(value, group=mesh.get_group(data_dim(mesh)), group_src=from_rank)
    with torch.no_grad():
        shard.to_local().copy_(cut_gathered(value, shard))
