"""How ranks are arranged in pipelines: which stages a rank runs, and with whom it shares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofx.agree import agree_in_world
from zerofx.groups import default_group, refuse_other_devices
from zerofx.parallel import Mesh
from zerofx.pipeline import Pipeline, PipelineError


@dataclass(frozen=True)
class Arrangement:
    """One rank's place. `pipe` are the ranks of its pipeline, `data` those that run its stages, and `everyone` both."""

    place: int
    replica: int
    pipe: dist.ProcessGroup | None
    data: Mesh | None
    everyone: dist.ProcessGroup | None

    @property
    def replicas(self) -> int:
        return 1 if self.data is None else self.data.data.size()


ALONE = Arrangement(0, 0, None, None, None)
"""One rank without any group."""


def arrange_pipeline(mesh: Any, device: torch.device, pipeline: Pipeline) -> Arrangement:
    """The ranks of a mesh with the dimensions `pp` and `dp`, by default all of them, those of one stage side by side.

    Raises PipelineError where the pipeline does not fit, and RankMismatchError where ranks ask for different ones.
    """
    ranks = pipeline.ranks
    mesh = mesh.device_mesh if isinstance(mesh, Mesh) else mesh
    if default_group(device):  # meshes of different shapes would wait for one another
        agree_in_world({"the pipeline": repr(pipeline)}, None, None, "zerofx.compile")
    if mesh is None:
        if not dist.is_initialized():
            if ranks > 1:
                raise PipelineError(
                    f"the pipeline has {ranks} ranks and there is no process group: start so many processes by torchrun"
                )
            return ALONE
        world = dist.get_world_size()
        if world % ranks:
            raise PipelineError(
                f"a pipeline of {ranks} ranks does not divide {world} ranks: start a multiple of {ranks}, or take "
                "other stages"
            )
        if ranks == 1 and pipeline.stages > 1 and world > 1:
            raise PipelineError(
                f"zerofx.Pipeline(stages={pipeline.stages}, schedule={pipeline.schedule!r}) has all stages on one "
                f"rank, so that nothing is split: ask for {pipeline.per_rank * world} stages over {world} ranks"
            )
        mesh = init_device_mesh(device.type, (ranks, world // ranks), mesh_dim_names=("pp", "dp"))
    named = isinstance(mesh, DeviceMesh) and set(mesh.mesh_dim_names or ()) == {"pp", "dp"}
    if not named or mesh["pp"].size() != ranks or mesh.size() != dist.get_world_size():
        raise PipelineError(
            f"a pipeline of {ranks} ranks needs a mesh of all ranks with the dimensions 'pp', of size {ranks}, and "
            "'dp', which may be of size 1: make it with init_device_mesh, or leave mesh out"
        )
    refuse_other_devices(mesh, device)
    data, pipe = Mesh(mesh["dp"]), mesh["pp"]
    return Arrangement(pipe.get_local_rank(), data.data.get_local_rank(), pipe.get_group(), data, dist.group.WORLD)
