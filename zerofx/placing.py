"""The data-parallel dim of the mesh of a stored parameter, beside which there may be a tensor-parallel one."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from zerofx.layout import chunk_rows, rows_at


def data_dim(mesh: DeviceMesh) -> int:
    """The dim over which zerofx stores parts, of the mesh of a stored parameter."""
    return 0 if mesh.ndim == 1 else (mesh.mesh_dim_names or ()).index("dp")


def data_placement(value: DTensor) -> Placement:
    return value.placements[data_dim(value.device_mesh)]


def placed_as(param: DTensor, placement: Placement) -> tuple[Placement, ...]:
    """The parameter's placements with another one over the data-parallel ranks."""
    dim = data_dim(param.device_mesh)
    return tuple(placement if place == dim else own for place, own in enumerate(param.placements))


def local_rows(whole: Tensor, dim: int, world: int, rank: int) -> Tensor:
    """A view of the rows of `dim` that `rank` stores."""
    size = whole.shape[dim]
    chunk = chunk_rows(size, world)
    return whole.narrow(dim, min(rank * chunk, size), rows_at(size, world, rank))


def cut(whole: Tensor, like: DTensor, skip: int | None = None) -> Tensor:
    """A view of the part of a whole tensor that this rank stores of a parameter; mesh dim `skip` has cut it already.

    No two mesh dims cut one dim of a parameter, so their order does not matter.
    """
    for place, placement in enumerate(like.placements):
        if isinstance(placement, Shard) and place != skip:
            mesh = like.device_mesh
            whole = local_rows(whole, placement.dim, mesh.size(place), mesh.get_local_rank(place))
    return whole


def cut_gathered(gathered: Tensor, like: DTensor) -> Tensor:
    """The same of what is whole over the data-parallel ranks, but not over tensor-parallel ones."""
    placement, dim = data_placement(like), data_dim(like.device_mesh)
    if not isinstance(placement, Shard):
        return gathered
    mesh = like.device_mesh
    return local_rows(gathered, placement.dim, mesh.size(dim), mesh.get_local_rank(dim))
