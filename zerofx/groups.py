"""The process group that a model is sharded over: the user's, or one made from torchrun's environment."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofx.config import ConfigError
from zerofx.mesh import Axis, Mesh
from zerofx.unsupported import refuse_dimensions


class NotInMeshError(ConfigError):
    """A rank that is not part of the mesh called `zerofx.compile`; the ranks of the mesh go on without it."""


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def data_parallel_mesh(mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh | None:
    """The 1-dimensional mesh to shard over, or None for one rank without any group.

    Raises ConfigError for a mesh of several dimensions without one named `dp`, with one for a feature that zerofx does
    not have, or of another device type, and NotInMeshError for a rank outside of the mesh.
    """
    if mesh is None:
        if not default_group(device):
            return None
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"zerofx.compile(mesh=...) takes a DeviceMesh, not {type(mesh).__name__}")
    if mesh.device_type != device.type:
        raise ConfigError(
            f"the mesh is of {mesh.device_type} devices but the parameters are on {device.type}: "
            "move the model to the mesh's device first"
        )
    if mesh.ndim > 1:
        refuse_dimensions(mesh.mesh_dim_names or (), mesh.shape if mesh.mesh_dim_names else ())
        if "dp" not in (mesh.mesh_dim_names or ()):
            raise ConfigError(
                f"the mesh has the axes {mesh.mesh_dim_names} and none is named 'dp': name the data-parallel axis 'dp'"
            )
        mesh = mesh["dp"]
    if mesh.get_coordinate() is None:
        raise NotInMeshError("this rank is not part of the mesh: call zerofx.compile on the ranks of the mesh only")
    return mesh


def default_group(device: torch.device) -> bool:
    """Whether there is a default process group, which is made from torchrun's environment if need be."""
    if not dist.is_initialized():
        if not all(name in os.environ for name in TORCHRUN):
            return False
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return True


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that carries a group's collectives of tensors on that device; empty without a group."""
    name = "" if group is None else str(dist.get_backend(group))
    by_device = dict(part.split(":") for part in name.split(",") if ":" in part)
    return by_device.get(device.type, name)


def program_mesh(mesh: DeviceMesh | None) -> Mesh:
    """The mesh as passes see it."""
    if mesh is None:
        return Mesh.of(dp=1)
    return Mesh((Axis("dp", mesh.size(), mesh.get_group().group_name),))
