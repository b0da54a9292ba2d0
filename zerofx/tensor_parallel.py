"""Parameters that are sliced over tensor-parallel ranks: DTensors of `parallelize_module`, or marked by attributes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zerofx._torch import root_mesh
from zerofx.config import ModelError
from zerofx.parallel import Mesh


@dataclass(frozen=True)
class Sliced:
    """How modules read a parameter that is a DTensor over tensor-parallel ranks; `shape` is that over all of them."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: Any) -> Sliced:
        return self

    @property
    def taken_dim(self) -> int | None:
        """The dim that tensor-parallel ranks cut, which data-parallel ones leave alone."""
        return self.placement.dim % len(self.shape) if isinstance(self.placement, Shard) else None


def sliced_as(param: DTensor) -> Sliced:
    """How a DTensor over one dim of ranks is read."""
    (placement,) = param.placements
    return Sliced(param.device_mesh, placement, param.shape, _contiguous(param.shape))


def as_read(local: Tensor, sliced: Sliced) -> DTensor:
    """The DTensor that modules read, of this rank's whole slice."""
    return DTensor.from_local(
        local, sliced.mesh, (sliced.placement,), run_check=False, shape=sliced.shape, stride=sliced.stride
    )


@dataclass(frozen=True)
class Storage:
    """The mesh that a parameter's parts are on, and its placement along the dim beside the data-parallel one."""

    mesh: DeviceMesh
    tensor: Placement | None = None

    def placements(self, data: Placement) -> tuple[Placement, ...]:
        if self.tensor is None:
            return (data,)
        return tuple(data if name == "dp" else self.tensor for name in self.mesh.mesh_dim_names or ())


def is_marked(param: Tensor) -> bool:
    """Whether a parameter's attributes say, as in Megatron, that each tensor-parallel rank has another slice of it."""
    return any(getattr(param, name, False) is True for name in ("tensor_model_parallel", "model_parallel"))


def is_sequence_parallel(param: Tensor) -> bool:
    """Whether each tensor-parallel rank computes the gradient of its part of the sequence, as Megatron marks it."""
    return getattr(param, "sequence_parallel", False) is True


def mesh_of_parameters(model: nn.Module) -> DeviceMesh | None:
    """The mesh with a dimension `dp` of which the mesh of DTensor parameters is a part, if there is one."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    first = next((param for param in params if isinstance(param, DTensor)), None)
    if first is None:
        return None
    root = root_mesh(first.device_mesh)
    return root if root is not first.device_mesh and "dp" in (root.mesh_dim_names or ()) else None


class Slices:
    """What a model's parameters are over the tensor-parallel ranks of a mesh."""

    def __init__(self, params: Iterable[Tensor], ranks: Mesh | None) -> None:
        self.ranks, self.root = ranks, None if ranks is None else ranks.device_mesh
        self.known: dict[tuple[int, Placement, tuple[int, ...]], Sliced] = {}
        first = next((param for param in params if isinstance(param, DTensor)), None)
        self.axis = None if first is None else self._axis_of(first.device_mesh)
        self.stored_on: DeviceMesh | None = None
        if self.root is not None and self.axis is not None:
            names = tuple(name for name in self.root.mesh_dim_names or () if name in ("dp", self.axis))
            self.stored_on = self.root if names == self.root.mesh_dim_names else self.root[names]

    def sliced(self, name: str, param: Tensor) -> Sliced | None:
        """None for what is no DTensor. Raises ModelError for a DTensor that is not sliced over the one axis."""
        if not isinstance(param, DTensor):
            return None
        mesh = param.device_mesh
        if self.axis is None or self._axis_of(mesh) != self.axis:
            raise ModelError(
                f"parameter {name!r} is a DTensor already, over ranks {mesh.mesh.tolist()} of the dimensions "
                f"{mesh.mesh_dim_names}, which are no axis beside 'dp' of {self.ranks}: pass the model before it is "
                "sharded; where it is parallelised over tensor-parallel ranks, pass mesh=, the DeviceMesh of both"
            )
        (placement,) = param.placements
        if type(placement) not in (Shard, Replicate):
            raise ModelError(
                f"parameter {name!r} is a DTensor placed as {placement}: parallelise it with Shard or Replicate"
            )
        if param.is_meta:
            raise ModelError(
                f"parameter {name!r} is a DTensor on the meta device: give the model its device and values before "
                "zerofx.compile, with model.to_empty(device=...) and its initialisation"
            )
        key = id(mesh), placement, param.shape  # one for all of a kind, so that code is shared
        return self.known.setdefault(key, sliced_as(param))

    def storage(self, param: Tensor, sliced: Sliced | None) -> Storage:
        """Where a parameter is stored: over the data-parallel ranks, and beside DTensors over tensor-parallel ones.

        There, what is no DTensor and not marked is a copy on each tensor-parallel rank.
        """
        assert self.ranks is not None
        if self.stored_on is None or (sliced is None and is_marked(param)):
            return Storage(self.ranks.data)
        return Storage(self.stored_on, Replicate() if sliced is None else sliced.placement)

    def _axis_of(self, mesh: DeviceMesh) -> str | None:
        """The axis that the ranks of a mesh are along, other than `dp`."""
        if mesh.ndim != 1 or self.root is None or self.root.ndim == 1:
            return None
        names = [name for name in self.root.mesh_dim_names or () if name != "dp"]
        for name in sorted(names, key=lambda each: each not in (mesh.mesh_dim_names or ())):
            if self.root[name].mesh.tolist() == mesh.mesh.tolist():
                return name
        return None


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = list[int](), 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return tuple(stride)
