"""Looks a model over before anything is changed: what cannot be sharded is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerofx._torch import local_tensor
from zerofx.blocks import has_blocks
from zerofx.config import ConfigError, ModelError
from zerofx.layout import ParamLayout
from zerofx.parallel import Mesh
from zerofx.shard import Owner
from zerofx.tensor_parallel import Slices, is_sequence_parallel
from zerofx.unsupported import WRAPPERS, wrapper_of


def parameters_of(ignored: Iterable[nn.Parameter], model: nn.Module) -> list[nn.Parameter]:
    """What `ignored_params` holds. Raises ConfigError for anything but parameters of the model, such as their names."""
    found = list(ignored) if isinstance(ignored, Iterable) else [ignored]
    known = {id(param) for param in model.parameters()}
    for place, each in enumerate(found):
        if not isinstance(each, nn.Parameter):
            raise ConfigError(
                f"zerofx.compile(ignored_params=...) takes parameters, not {type(each).__name__}: pass those of the "
                "model, such as model.head.parameters()"
            )
        if id(each) not in known:
            raise ConfigError(
                f"zerofx.compile(ignored_params=...): number {place}, of shape {tuple(each.shape)}, is no parameter of "
                "the model: pass those of the model itself, after moving it to its device"
            )
    return found


def refuse_model(model: nn.Module) -> None:
    """Raises ModelError for what is no module, or is already compiled or wrapped."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"zerofx.compile takes a torch.nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"its submodule {name!r}" if name else "this model"
        if "_zerofx_engine" in module.__dict__:
            raise ModelError(f"zerofx.compile was already called on {where}: compile a model once")
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ModelError(f"torch.compile was already applied to {where}: pass the model itself, zerofx compiles it")
        if wrapper := wrapper_of(type(module)):
            raise ModelError(f"{where} is wrapped in {wrapper}: {WRAPPERS[wrapper]}")
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f"{where} is a ScriptModule, which cannot be traced: pass the Python module")
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ModelError(f"{where} has sparse gradients, which cannot be reduced: make it with sparse=False")


def refuse_without_blocks(model: nn.Module) -> None:
    if not has_blocks(model):
        raise ModelError(
            "zerofx.compile(per_block=True) is not possible: no ModuleList, Sequential or ModuleDict in this model "
            "holds two modules of one class: leave per_block out"
        )


def find_owners(model: nn.Module, ignored: list[nn.Parameter], ranks: Mesh | None = None) -> list[Owner]:
    """Every parameter to shard, in registration order, with all the places that hold it.

    Raises ModelError for a parameter that cannot be sharded, or that is also kept where it would not be replaced.
    """
    owners: dict[int, Owner] = {}
    skipped = {id(param) for param in ignored}
    slices = Slices((param for param in model.parameters() if id(param) not in skipped), ranks)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None or id(param) in skipped:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if id(param) not in owners:
                _refuse_parameter(full, param)
                sliced = slices.sliced(full, param)
                size = tuple(local_tensor(param).shape if isinstance(param, DTensor) else param.shape)
                owner = Owner(param, ParamLayout(full, size, param.dtype, None, param.requires_grad), sliced=sliced)
                if ranks is not None:
                    owner.storage = slices.storage(param, sliced)
                    if is_sequence_parallel(param) and sliced is None and ranks.model_parallel.tensor.size > 1:
                        owner.summed = ranks.model_parallel.tensor.group
                owners[id(param)] = owner
            if (module, name) not in owners[id(param)].places:
                owners[id(param)].places.append((module, name))
                owners[id(param)].names.append(full)
    for owner in owners.values():
        owner.layout = owner.layout.with_tied(tuple(owner.names[1:]))
    _refuse_copies(model, owners)
    _refuse_mixed_devices(owners)
    return list(owners.values())


def _refuse_parameter(name: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ModelError(f"parameter {name!r} is not initialised yet: run the lazy module once before zerofx.compile")
    if param.is_complex():
        raise ModelError(
            f"parameter {name!r} is complex, which cannot be reduced: store it as two real ones (torch.view_as_real), "
            "or pass it in ignored_params"
        )


def _refuse_copies(model: nn.Module, owners: dict[int, Owner]) -> None:
    for prefix, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            if attribute in ("_parameters", "_modules", "_buffers", "_flat_weights", "_flat_weight_refs"):
                continue
            for tensor in tensors_in(value, depth=2):
                if id(tensor) in owners:
                    where = f"{prefix}.{attribute}" if prefix else attribute
                    raise ModelError(
                        f"parameter {owners[id(tensor)].layout.name!r} is also kept in the attribute {where!r}, "
                        "which would go on holding the old one: read it from its module instead"
                    )


def tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """A tensor, or those in lists, sets and dicts, nested as deep as `depth`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)


def _refuse_mixed_devices(owners: dict[int, Owner]) -> None:
    devices = {str(o.param.device): o.layout.name for o in owners.values() if not o.param.is_meta}
    if len(devices) > 1:
        told = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ModelError(f"parameters are on several devices ({told}): move the model to one device")
