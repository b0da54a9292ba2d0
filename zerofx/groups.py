"""How the ranks that train a model are arranged, as the user, the model's parameters or torchrun's environment say."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofx import mesh as axes
from zerofx.config import ConfigError
from zerofx.first_group import make_default_group
from zerofx.parallel import TORCHRUN, Mesh
from zerofx.tensor_parallel import mesh_of_parameters


class NotInMeshError(ConfigError):
    """A rank that is not part of the mesh called `zerofx.compile`; the ranks of the mesh go on without it."""


def arrange(model: nn.Module, mesh: Any, mpu: Any, device: torch.device) -> Mesh | None:
    """The ranks that train the model, or None for one rank without any group.

    Raises ConfigError for a mesh without a data-parallel axis, with one for a feature that zerofx does not have, or of
    another device type, for a wrong mpu, and NotInMeshError for a rank outside of the mesh.
    """
    if mesh is not None and mpu is not None:
        raise ConfigError(
            "zerofx.compile(mesh=..., mpu=...) is not possible: both say how ranks are arranged, pass one"
        )
    if mpu is not None:
        return Mesh(mpu, device_type=device.type)
    if mesh is None:
        mesh = mesh_of_parameters(model)
    if mesh is None:
        if not default_group(device):
            return None
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    if not isinstance(mesh, (DeviceMesh, Mesh)):
        raise ConfigError(f"zerofx.compile(mesh=...) takes a DeviceMesh or a zerofx.Mesh, not {type(mesh).__name__}")
    found = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    refuse_other_devices(found.data, device)
    if found.data.get_coordinate() is None:
        raise NotInMeshError("this rank is not part of the mesh: call zerofx.compile on the ranks of the mesh only")
    return found


def refuse_other_devices(mesh: DeviceMesh, device: torch.device) -> None:
    if mesh.device_type != device.type:
        raise ConfigError(
            f"the mesh is of {mesh.device_type} devices but the parameters are on {device.type}: "
            "move the model to the mesh's device first"
        )


def default_group(device: torch.device) -> bool:
    """Whether there is a default process group, which is made from torchrun's environment if need be."""
    if not dist.is_initialized():
        if not all(name in os.environ for name in TORCHRUN):
            return False
        make_default_group("nccl" if device.type == "cuda" else "gloo")
    return True


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that carries a group's collectives of tensors on that device; empty without a group."""
    name = "" if group is None else str(dist.get_backend(group))
    by_device = dict(part.split(":") for part in name.split(",") if ":" in part)
    return by_device.get(device.type, name)


def program_mesh(mesh: DeviceMesh | None) -> axes.Mesh:
    """The mesh as passes see it."""
    if mesh is None:
        return axes.Mesh.of(dp=1)
    return axes.Mesh((axes.Axis("dp", mesh.size(), mesh.get_group().group_name),))
