"""`zerofx.Mesh`: the ranks of a training along named axes, and the process groups of this one."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofx.agree import agree_in_world
from zerofx.config import ConfigError
from zerofx.first_group import make_default_group
from zerofx.mesh import Axis, ModelParallel
from zerofx.mpu import DATA, MODEL, PIPELINE, TENSOR, Kind, Said, disagreement, read_mpu, said
from zerofx.unsupported import refuse_dimensions

AXES = ("pp", "dp", "tp")
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, from which the default process group is made."""


class Mesh:
    """Ranks along up to three axes: `dp` shares the batch, `tp` slices layers, `pp` has different layers.

    Made on all ranks together, from one of three:

        zerofx.Mesh(dp=2, tp=2)                # sizes; of ranks 0, 1, 2 and 3, 0 and 1 slice layers between them
        zerofx.Mesh(device_mesh)               # a DeviceMesh whose dimensions have these names, in any order
        zerofx.Mesh(mpu)                       # any object with the functions of Megatron's mpu

    Sizes arrange all ranks of the default group in row-major order, those of the last axis named next to each other.
    An `mpu` needs `get_model_parallel_rank()`, `..._group()`, `..._world_size()` and the same of `data_parallel`;
    `tensor_model_parallel` and `pipeline_model_parallel` are used where they are there, otherwise all ranks of a
    model-parallel group slice layers.

    Attributes:
        sizes: the number of ranks along each axis; `dp` is always there.
        coordinates: this rank's place along each axis, such as `{"dp": 1, "tp": 0}`, from which to name its files in a
            checkpoint: ranks that differ in `dp` only hold parts of the same tensors.
        device_mesh: the DeviceMesh, if made from one or from sizes; `device_mesh["tp"]` is for `parallelize_module`.

    Raises:
        ConfigError: an axis has another name, sizes do not multiply to the number of ranks, or a function of the mpu is
            missing or contradicts another one.
        RankMismatchError: the ranks' arguments or mpus differ; it names the function.
    """

    def __init__(self, source: Any = None, /, *, device_type: str | None = None, **sizes: int) -> None:
        self.device_mesh: DeviceMesh | None = None
        self._groups = dict[str, dist.ProcessGroup]()
        kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(source, DeviceMesh):
            self._of_dimensions(source)
        elif source is None:
            self._of_dimensions(_arranged(sizes, kind))
        else:
            self._of_mpu(source, kind)
        if source is not None and sizes:
            given = type(source).__name__
            raise ConfigError(f"zerofx.Mesh takes sizes or a {given}, not both: leave out {_told(sizes)}")
        self.sizes = {axis: group.size() for axis, group in self._groups.items()}
        self.coordinates = {axis: group.rank() for axis, group in self._groups.items()}

    def __repr__(self) -> str:
        return f"zerofx.Mesh({_told(self.sizes)}, coordinates={self.coordinates})"

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis. Raises KeyError for an axis that the mesh does not have."""
        if axis in self._groups:
            return self._groups[axis]
        raise KeyError(f"the mesh has the axes {list(self._groups)}, not {axis!r}")

    @property
    def model_parallel(self) -> ModelParallel:
        """What a compiled model keeps."""
        axes = {axis: Axis(axis, group.size(), group.group_name) for axis, group in self._groups.items()}
        none = ModelParallel()
        return ModelParallel(
            axes.get("tp", none.tensor), axes.get("pp", none.pipeline), tuple(sorted(self.coordinates.items()))
        )

    def _of_dimensions(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ())
        refuse_dimensions(names, mesh.shape if names else ())
        if mesh.ndim == 1 and names[0] not in AXES:
            names = ("dp",)
        if "dp" not in names:
            shape = (1, *mesh.shape)
            raise ConfigError(
                f"the mesh has the axes {mesh.mesh_dim_names} and none is named 'dp': name the data-parallel axis "
                f"'dp', or add one of one rank: init_device_mesh({mesh.device_type!r}, {shape}, "
                "mesh_dim_names=('dp', ...))"
            )
        self.device_mesh = mesh
        self.data = mesh if mesh.ndim == 1 else mesh["dp"]
        if mesh.get_coordinate() is None:
            return
        self._groups = {name: mesh.get_group(dim) for dim, name in enumerate(names) if name in AXES}

    def _of_mpu(self, mpu: Any, kind: str) -> None:
        if not dist.is_initialized():
            raise ConfigError("an mpu needs process groups: call torch.distributed.init_process_group first")
        problem: Exception | None = None
        kinds: dict[str, Kind] = {}
        told: Said = {}
        try:
            kinds = read_mpu(mpu)
            told = said(kinds)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        caller = "zerofx.Mesh(mpu)"
        everyone = agree_in_world({"how ranks are arranged": "an mpu"}, problem, told, caller)
        found = disagreement(everyone)
        agree_in_world({}, ConfigError(found) if found else None, None, caller)  # each rank raises it itself
        axes = {"pp": PIPELINE, "dp": DATA, "tp": TENSOR}
        if TENSOR not in kinds and (PIPELINE not in kinds or len(kinds[PIPELINE].ranks) == 1):
            axes["tp"] = MODEL  # whose ranks all slice the same layers
        self._groups = {axis: kinds[of].group for axis, of in axes.items() if of in kinds}
        self.data = DeviceMesh.from_group(kinds[DATA].group, kind, mesh_dim_names=("dp",))


def _arranged(sizes: dict[str, int], kind: str) -> DeviceMesh:
    """A DeviceMesh of all ranks, once these agree on the sizes."""
    if not dist.is_initialized():
        if missing := [name for name in TORCHRUN if name not in os.environ]:
            raise ConfigError(
                f"zerofx.Mesh({_told(sizes)}) needs all ranks, and torchrun has not set {', '.join(missing)}: start "
                "the script by `python -m torch.distributed.run --nproc-per-node RANKS script.py`, or call "
                "torch.distributed.init_process_group first"
            )
        make_default_group("nccl" if kind == "cuda" else "gloo")
    problem = None
    if why := _wrong(sizes, dist.get_world_size()):
        problem = ConfigError(f"zerofx.Mesh({_told(sizes)}) is not possible: {why}")
    agree_in_world({"the sizes of the mesh": tuple(sizes.items())}, problem, None, "zerofx.Mesh")
    if "dp" not in sizes:
        sizes = {"dp": 1} | sizes
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _wrong(sizes: dict[str, Any], world: int) -> str:
    """Why sizes do not arrange the ranks; empty where they do."""
    if unknown := [axis for axis in sizes if axis not in AXES]:
        return f"there is no axis {unknown[0]!r}, the axes are {', '.join(AXES)}"
    if wrong := [axis for axis, size in sizes.items() if type(size) is not int or size < 1]:
        return f"{wrong[0]} must be an int, 1 or more"
    product = prod(sizes.values())
    if product == world:
        return ""
    return f"the sizes multiply to {product}, and there are {world} ranks: start {product}, or change the sizes"


def _told(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size!r}" for axis, size in sizes.items())
