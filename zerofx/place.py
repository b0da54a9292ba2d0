"""Gives a model's tensors their values and cuts its parameters, one module at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx import _torch
from zerofx.config import Config, ModelError
from zerofx.layout import Layout
from zerofx.materialise import Materialiser
from zerofx.mesh import ModelParallel
from zerofx.optimizers import LOCAL_STEPS
from zerofx.parallel import Mesh
from zerofx.passes.choose_layout import choose_layout
from zerofx.placing import data_dim
from zerofx.shard import Owner, drop_parameter, shard_parameter, sync_module
from zerofx.stage_plan import Foreign
from zerofx.stored import own_slice
from zerofx.swap import READS, answer_get_parameter, swap_class, swap_unsharded
from zerofx.tensor_parallel import is_marked


class Pipe(NamedTuple):
    """What a pipeline changes: all of its ranks start from the values of one, and `foreign` is what others hold."""

    everyone: dist.ProcessGroup | None = None
    foreign: Foreign = Foreign()


def place(
    model: nn.Module,
    owners: list[Owner],
    materialise: Materialiser,
    ranks: Mesh | None,
    config: Config,
    ignored: Iterable[nn.Parameter],
    pipe: Pipe = Pipe(),  # noqa: B008
) -> tuple[Layout, frozenset[str]]:
    """Makes each rank hold its part of the model; returns how it is stored, and the names of what is ignored.

    With `sync_init` data-parallel ranks, or all of a pipeline, start from the first one's values.

    Raises ModelError on all ranks where tensor-parallel ranks differ in what they have to hold copies of.
    """
    _refuse_lone_slices(owners, ranks)
    ids = {id(param) for param in ignored}
    left_alone = frozenset(name for name, param in model.named_parameters() if id(param) in ids)
    layout = _set_layout([owner for owner in owners if owner.layout.name not in pipe.foreign.params], config)
    for mesh in {owner.storage.mesh for owner in owners if owner.storage is not None}:
        LOCAL_STEPS.add(mesh)
    if ranks is not None:
        LOCAL_STEPS.add(ranks.data)
    _place_modules(model, owners, materialise, ranks, config.sync_init, left_alone, pipe)
    return layout, left_alone


def _refuse_lone_slices(owners: list[Owner], ranks: Mesh | None) -> None:
    """Raises ModelError for slices that would be taken for copies, and get another rank's values."""
    marked = [owner.layout.name for owner in owners if is_marked(owner.param)]
    if marked and ranks is not None and ranks.sizes["dp"] > 1 and "tp" not in ranks.sizes:
        raise ModelError(
            f"parameter {marked[0]!r} is marked as a slice by tensor_model_parallel or model_parallel, and nothing "
            "says which ranks hold the others: pass mpu=..., or mesh=zerofx.Mesh(dp=..., tp=...)"
        )


def _set_layout(owners: list[Owner], config: Config) -> Layout:
    """Decides how each parameter is stored; what no group shares is whole."""
    taken = {owner.layout.name: owner.sliced.taken_dim for owner in owners if owner.sliced is not None}
    world = next((o.storage.mesh.size(data_dim(o.storage.mesh)) for o in owners if o.storage is not None), None)
    if world is not None:
        params = [owner.layout for owner in owners]
        chosen = choose_layout(params, world, config.stage, config.persist_below, taken)
        for owner, stored in zip(owners, chosen, strict=True):
            owner.layout = stored
    return Layout(tuple(owner.layout for owner in owners))


def _place_modules(
    model: nn.Module,
    owners: list[Owner],
    materialise: Materialiser,
    ranks: Mesh | None,
    sync: bool,
    ignored: frozenset[str],
    pipe: Pipe,
) -> None:
    """Gives the model's tensors their values and cuts its parameters, one module at a time.

    `owners` is emptied on the way, so that at no time more than one module is there whole.
    """
    done = set[int]()
    first: dict[int, list[Owner]] = {}
    copies = Copies(ranks.model_parallel if ranks is not None and sync else ModelParallel())
    while owners:
        owner = owners.pop(0)
        first.setdefault(id(owner.places[0][0]), []).append(owner)
    for prefix, module in model.named_modules():
        materialise(prefix, module)
        if ranks is None:
            continue
        over = pipe.everyone or ranks.group("dp")
        start = f"{prefix}." if prefix else ""
        done |= {id(param) for name, param in module._parameters.items() if start + name in ignored}
        if sync and over.size() > 1:
            sync_module(module, over, done)
        for owner in first.pop(id(module), []):
            if owner.layout.name in pipe.foreign.params:
                drop_parameter(owner)
                continue
            copies.note(owner)
            shard_parameter(owner)
        pipe.foreign.drop_others(prefix, module)
    copies.compare()
    if ranks is None:
        swap_unsharded(model)
        return
    for module in model.modules():
        if module is model or READS in module.__dict__:
            swap_class(module)
        elif next(module.parameters(), None) is not None:
            answer_get_parameter(module)


class Copies:
    """Finds out whether tensor-parallel ranks begin with the same values where they hold copies of a parameter."""

    def __init__(self, parallel: ModelParallel) -> None:
        self.tensor = parallel.tensor
        self.sums: dict[str, Tensor] = {}

    def note(self, owner: Owner) -> None:
        """Notes two sums of a parameter that is a copy; what is sliced differs."""
        module, name = owner.places[0]
        param = module._parameters[name]
        if self.tensor.size == 1 or param is None or is_marked(param):
            return
        if owner.sliced is not None and owner.sliced.taken_dim is not None:
            return
        value = own_slice(param)
        value = value if value.is_floating_point() else value.double()
        norm = torch.linalg.vector_norm(value, dtype=torch.float64)
        self.sums[owner.layout.name] = torch.stack([value.sum(dtype=torch.float64), norm])

    def compare(self) -> None:
        """Raises ModelError, on all tensor-parallel ranks, for the first parameter that differs between them."""
        if self.tensor.size == 1:
            return
        mine = torch.stack(list(self.sums.values())).tolist() if self.sums else []
        told: list[list[str]] = [[]] * self.tensor.size
        dist.all_gather_object(told, list(map(str, mine)), group=_torch.process_group(self.tensor.group))
        for place, name in enumerate(self.sums):
            other = next((rank for rank, theirs in enumerate(told) if theirs[place] != told[0][place]), None)
            if other is not None:
                raise ModelError(
                    f"parameter {name!r} has other values on tensor-parallel rank {other} than on rank 0, and nothing "
                    "says that it is sliced: set param.tensor_model_parallel = True on it before zerofx.compile if it "
                    "is, or else start it from the same values, such as from the same seed"
                )
