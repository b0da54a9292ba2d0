"""How ranks are arranged in pipelines: which stages a rank runs, and with whom it shares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zerofx.agree import agree_in_world
from zerofx.groups import arrange, default_group
from zerofx.mesh import ModelParallel
from zerofx.mpu import PIPELINE, name
from zerofx.parallel import Mesh
from zerofx.pipeline import Pipeline, PipelineError
from zerofx.tensor_parallel import mesh_of_parameters


class Place(NamedTuple):
    """Where a rank is along each axis, and the seed that it came with."""

    pipe: int
    replica: int
    slice: int
    seed: int


@dataclass(frozen=True)
class Arrangement:
    """One rank's place, and its groups; `places` are those of all ranks.

    `pipe` are the ranks of its pipeline, and `model` these and those that slice their layers, all of which train on one
    batch. `everyone` are the ranks of all pipelines that hold the same slices. `hosts` are all ranks, in a group that
    no GPU takes part in.
    """

    ranks: Mesh | None = None
    places: tuple[Place, ...] = (Place(0, 0, 0, 0),)
    rank: int = 0
    pipe: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None
    hosts: dist.ProcessGroup | None = None

    @property
    def place(self) -> int:
        return self.places[self.rank].pipe

    @property
    def replica(self) -> int:
        return self.places[self.rank].replica

    @property
    def replicas(self) -> int:
        return 1 + max(each.replica for each in self.places)

    @property
    def parallel(self) -> ModelParallel:
        """The ranks beside `everyone` that hold parts of this rank's model."""
        if self.ranks is None:
            return ModelParallel()
        known = self.ranks.model_parallel
        return replace(
            known,
            pipeline=ModelParallel().pipeline,
            coordinates=tuple(each for each in known.coordinates if each[0] != "pp"),
        )

    def group_of(self, stages: Sequence[int]) -> dist.ProcessGroup:
        """The ranks at these places of this rank's pipeline. All ranks make the groups of all pipelines together."""
        own = self.places[self.rank]
        members = {(p.replica, p.slice): self._ranks(p, stages) for p in self.places}
        return _groups(members)[own.replica, own.slice]

    def _ranks(self, of: Place, stages: Sequence[int]) -> list[int]:
        known = {(p.pipe, p.replica, p.slice): rank for rank, p in enumerate(self.places)}
        return [known[stage, of.replica, of.slice] for stage in stages]

    def with_slices(self) -> Arrangement:
        """The same with groups of the ranks of one batch, and of one slice."""
        batches, slices = dict[Any, list[int]](), dict[Any, list[int]]()
        for rank, each in enumerate(self.places):
            batches.setdefault(each.replica, []).append(rank)
            slices.setdefault(each.slice, []).append(rank)
        own = self.places[self.rank]
        return replace(self, model=_groups(batches)[own.replica], everyone=_groups(slices)[own.slice])


def _groups(members: dict[Any, list[int]]) -> dict[Any, dist.ProcessGroup]:
    return {key: cast("dist.ProcessGroup", dist.new_group(ranks)) for key, ranks in members.items()}


ALONE = Arrangement()
"""One rank without any group."""


def arrange_pipeline(model: nn.Module, mesh: Any, mpu: Any, device: torch.device, pipeline: Pipeline) -> Arrangement:
    """The ranks of a mesh with the dimensions `pp` and `dp`, and `tp` for sliced layers, or of an mpu.

    By default all ranks are in pipelines, those of one stage side by side. Raises PipelineError where the pipeline does
    not fit, and RankMismatchError where ranks ask for different ones.
    """
    if default_group(device):  # meshes of different shapes would wait for one another
        facts = {"the pipeline": repr(pipeline), "whether there is an mpu": mpu is not None}
        agree_in_world(facts, None, None, "zerofx.compile")
    elif pipeline.ranks > 1:
        raise PipelineError(
            f"the pipeline has {pipeline.ranks} ranks and there is no process group: start so many processes by "
            "torchrun"
        )
    else:
        return replace(ALONE, places=(Place(0, 0, 0, torch.initial_seed()),))
    if mesh is None and mpu is None and mesh_of_parameters(model) is None:
        mesh = _of_all_ranks(device, pipeline)
    ranks = arrange(model, mesh, mpu, device)
    assert ranks is not None
    _refuse_other_sizes(ranks, pipeline, mpu is not None)
    at = ranks.coordinates
    place = Place(at.get("pp", 0), at["dp"], at.get("tp", 0), torch.initial_seed())
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, tuple(place))
    pipe = ranks.group("pp") if "pp" in at else None
    places, world = tuple(Place(*each) for each in told), dist.group.WORLD
    hosts = world if device.type == "cpu" else dist.new_group(backend="gloo")
    made = Arrangement(ranks, places, dist.get_rank(), pipe, pipe, world, hosts)
    return made.with_slices() if ranks.sizes.get("tp", 1) > 1 else made


def _of_all_ranks(device: torch.device, pipeline: Pipeline) -> Any:
    world, ranks = dist.get_world_size(), pipeline.ranks
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
    return init_device_mesh(device.type, (ranks, world // ranks), mesh_dim_names=("pp", "dp"))


def _refuse_other_sizes(ranks: Mesh, pipeline: Pipeline, of_mpu: bool) -> None:
    """Raises PipelineError where the ranks along `pp` are not those of the pipeline, or some ranks are left out."""
    sizes = ranks.sizes
    product = sizes.get("pp", 1) * sizes["dp"] * sizes.get("tp", 1)
    if sizes.get("pp", 1) == pipeline.ranks and product == dist.get_world_size():
        return
    if of_mpu:
        raise PipelineError(
            f"a pipeline of {pipeline.ranks} ranks needs an mpu whose {name(PIPELINE)}() has as many, and this one's "
            f"has {sizes.get('pp', 1)}: give the mpu get_{PIPELINE}_group, _rank and _world_size, or take other stages"
        )
    raise PipelineError(
        f"a pipeline of {pipeline.ranks} ranks needs a mesh of all ranks with the dimensions 'pp', of size "
        f"{pipeline.ranks}, and 'dp', which may be of size 1, and 'tp' where layers are sliced: make it with "
        "init_device_mesh, or leave mesh out"
    )
