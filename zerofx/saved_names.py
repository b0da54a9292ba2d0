"""What a checkpoint calls things: parameters, buffers and optimizer states by the names that plain PyTorch uses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from zerofx import _torch
from zerofx.manifest import CheckpointError
from zerofx.optimizers import COUNTS
from zerofx.stored import contiguous_stride
from zerofx.swap import READS

if TYPE_CHECKING:
    from zerofx.engine import Engine

Path = tuple[str, ...]
"""The place of a tensor in what torch.distributed.checkpoint saves; with dots between, it is the tensor's key there."""

Tensors = dict[Path, Tensor]
MODEL: Path = ("model",)
STATES: Path = ("optimizer", "state")
GROUPS: Path = ("optimizer", "param_groups")

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def bare(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = cast("nn.Module", model._orig_mod)
        else:
            return model


def clean(name: str) -> str:
    """A name without what torch.compile and checkpointing wrap around modules."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def group_of(model: Any) -> dist.ProcessGroup | None:
    """The ranks that save and load a model together: those that share its parameters, else all."""
    if not isinstance(model, nn.Module):  # which is refused on all ranks
        return dist.group.WORLD if dist.is_initialized() else None
    engine: Engine | None = model.__dict__.get("_zerofx_engine")
    if engine is not None:
        return _group_of_engine(engine, model)
    if not dist.is_initialized():
        return None
    for param in model.parameters():
        if isinstance(param, DTensor) and param.device_mesh.ndim == 1:
            return param.device_mesh.get_group()
    return dist.group.WORLD


def _group_of_engine(engine: Engine, model: nn.Module) -> dist.ProcessGroup | None:
    """Those that share parameters or have the stages of one pipeline; with DTensors over more axes, all ranks.

    Raises CheckpointError where ranks beside these are in the default group.
    """
    shared = engine.step_group
    if not any(mesh.ndim > 1 for mesh in _meshes(model)):
        return _torch.process_group(shared.name) if shared.world > 1 else None
    ranks = shared.world * prod(axis.size for axis in engine.parallel.axes)
    if ranks != dist.get_world_size():
        raise CheckpointError(
            f"the model is sliced over {ranks} ranks and the default group has {dist.get_world_size()}: save models "
            "whose DTensors are sliced where all ranks train one model"
        )
    return dist.group.WORLD


def slice_of(model: nn.Module) -> dict[str, int]:
    """The rank's place along the axes of an mpu, whose slices a checkpoint cannot join."""
    engine: Engine | None = model.__dict__.get("_zerofx_engine")
    if engine is None or any(mesh.ndim > 1 for mesh in _meshes(model)):
        return {}
    sliced = {axis.name for axis in engine.parallel.axes}
    return {axis: place for axis, place in engine.parallel.coordinates if axis in sliced}


def refuse_shared_folder(model: Any, folder: str) -> None:
    """Raises CheckpointError, on all ranks, where ranks with different slices name the same folder. Collective."""
    engine: Engine | None = model.__dict__.get("_zerofx_engine") if isinstance(model, nn.Module) else None
    for axis in engine.parallel.axes if engine is not None and slice_of(model) else ():
        told: list[Any] = [None] * axis.size
        dist.all_gather_object(told, folder, group=_torch.process_group(axis.group))
        if len(set(told)) < axis.size:
            raise CheckpointError(
                f"ranks along {axis.name!r} have different slices of the model and the same folder {folder}: give each "
                "slice one of its own, named by the coordinates of zerofx.Mesh, such as f'{step}/tp{tp_rank}'"
            )


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    return [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]


def refuse_model(model: Any) -> None:
    """Raises CheckpointError for a model in a state that cannot be saved or loaded into."""
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"the model is a {type(model).__name__}, not a torch.nn.Module: pass the model")
    for name, param in model.named_parameters():
        if param.is_meta:
            raise CheckpointError(
                f"parameter {name!r} is on the meta device and has no values: call zerofx.compile, or "
                "model.to_empty(device=...), first"
            )
        if isinstance(param.grad, DTensor) and any(place.is_partial() for place in param.grad.placements):
            raise CheckpointError(
                f"gradients wait to be reduced, such as that of {name!r}, and a checkpoint has no gradients: run the "
                "last micro-batch outside of no_sync() and the optimizer's step first, or zero_grad()"
            )
    for module in model.modules():
        params = (module._parameters.get(name) for name in module.__dict__.get(READS, ()))
        if not all(param is None or isinstance(param, DTensor) for param in params):
            raise CheckpointError("the model is inside zerofx.full_params: leave it first")


@torch.no_grad()
def refuse_not_finite(model: nn.Module) -> None:
    """Raises CheckpointError where a parameter that trains has become nan or inf on this rank."""
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        if not param.requires_grad or not local.is_floating_point() or local.sum(dtype=torch.float32).isfinite():
            continue
        if not local.isfinite().all():
            raise CheckpointError(
                f"parameter {name!r} holds nan or inf, as after a step whose loss was not finite: go on from the last "
                "checkpoint, with another batch or a lower rate"
            )


class Names:
    """The names of one model on one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.of_param: dict[int, str] = {}
        self.params: dict[str, nn.Parameter] = {}
        for name, param in model.named_parameters():
            self.of_param[id(param)] = clean(name)
            self.params[clean(name)] = param
        self.sharded = any(isinstance(param, DTensor) for param in self.params.values())
        self.values: dict[str, Any] = {clean(name): value for name, value in model.state_dict().items()}
        every = {clean(name): param for name, param in model.named_parameters(remove_duplicate=False)}
        self.every = {name: id(param) for name, param in every.items()}
        self.own = {
            (*MODEL, name)
            for name, value in self.values.items()
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and (name not in every or self.sharded)
        }
        """Plain tensors that each rank has its own: buffers, and parameters that zerofx was told to ignore."""

    def tensors(self) -> Tensors:
        """The model's parameters and buffers, in the memory that they have in the model."""
        return {(*MODEL, name): value for name, value in self.values.items() if isinstance(value, Tensor)}

    def without(self, known: set[str]) -> set[str]:
        """The model's tensors that have none of the known names. Tied parameters may have been saved under one name."""
        held = {self.every[name] for name in known & self.every.keys()}
        return {path[-1] for path in self.tensors() if path[-1] not in known and self.every.get(path[-1]) not in held}

    def objects(self) -> dict[str, Any]:
        """What modules add to their state dict beside tensors."""
        return {name: value for name, value in self.values.items() if not isinstance(value, Tensor)}

    def load(self, objects: dict[str, Any]) -> None:
        """Lets the model take what was read into its tensors, by its own hooks."""
        state = self.model.state_dict()
        self.model.load_state_dict({name: objects.get(clean(name), value) for name, value in state.items()})

    def name(self, param: Any, optimizer: optim.Optimizer) -> str:
        found = self.of_param.get(id(param))
        if found is None:
            raise CheckpointError(
                f"the {type(optimizer).__name__} has a parameter that is not the model's: build it from "
                "model.parameters(), after zerofx.compile"
            )
        return found

    def groups(self, optimizer: optim.Optimizer) -> list[dict[str, Any]]:
        """The optimizer's groups with their options, and the names of their parameters."""
        return [
            {**group, "params": [self.name(param, optimizer) for param in group["params"]]}
            for group in optimizer.param_groups
        ]

    def is_own(self, name: str) -> bool:
        return self.sharded and not isinstance(self.params[name], DTensor)


class States:
    """An optimizer's states by the name of their parameter: tensors, and values such as numbers."""

    def __init__(self, names: Names, optimizer: optim.Optimizer) -> None:
        self.tensors: Tensors = {}
        self.own = set[Path]()
        self.known: dict[str, list[str]] = {}
        """The tensors that each parameter has a state in."""
        self.values: dict[str, dict[str, Any]] = {}
        for param, state in optimizer.state.items():
            name = names.name(param, optimizer)
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    _refuse_nested(value, name, key, optimizer)
                    self.values.setdefault(name, {})[key] = value
                    continue
                place = (*STATES, name, key)
                self.known.setdefault(name, []).append(key)
                self.tensors[place] = _reduced(value, param, name, key, optimizer)
                if names.is_own(name):
                    self.own.add(place)


def _refuse_nested(value: Any, name: str, key: Any, optimizer: optim.Optimizer) -> None:
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps tensors in a {type(value).__name__} as its state {key!r} of {name!r}, "
            "which cannot be saved in parts: save optimizer.state_dict() yourself"
        )


def _reduced(value: Tensor, param: Tensor, name: str, key: str, optimizer: optim.Optimizer) -> Tensor:
    """A state as it can be saved. Raises CheckpointError for one of which nobody knows how it is cut."""
    if isinstance(value, DTensor):
        if any(place.is_partial() for place in value.placements):
            return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        return value
    cut = isinstance(param, DTensor) and any(place.is_shard() for place in param.placements)
    if cut and value.ndim:
        raise CheckpointError(
            f"{type(optimizer).__name__}'s state {key!r} of {name!r} is a plain tensor, and nobody knows how ranks "
            "share it: keep it as a DTensor like its parameter"
        )
    return value


def blank_state(param: Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Where a saved state is read into: cut as its parameter if it has its shape, else whole on each rank."""
    if key in COUNTS and not size:
        return torch.empty(size, dtype=dtype)
    if not isinstance(param, DTensor):
        return torch.empty(size, dtype=dtype, device=param.device)
    if size == param.shape:
        local = torch.empty_like(param.to_local(), dtype=dtype, memory_format=torch.contiguous_format)
        stride = contiguous_stride(size)
        mesh, placements = param.device_mesh, param.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)
    whole = torch.empty(size, dtype=dtype, device=param.device)
    if not size:
        return whole
    return DTensor.from_local(whole, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)


def fingerprint(value: Any) -> str:
    """Tells whether two ranks hold the same: tensors by their content, all else by how it prints."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        found.update(_content(leaf))
    shown = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else leaf, value)
    found.update(repr(shown).encode())
    return found.hexdigest()


def _content(leaf: Any) -> bytes:
    if not isinstance(leaf, Tensor):
        return b""
    plain = leaf.detach().cpu().contiguous()
    return f"{plain.dtype} {tuple(plain.shape)} ".encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def listed(names: Iterable[str]) -> str:
    """A few of the names, and how many there are."""
    known = sorted(names)
    return ", ".join(map(repr, known[:3])) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
