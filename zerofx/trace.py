"""Traces a training step into a program for any number of ranks: no process group, no memory for parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from zerofx import _torch
from zerofx.capture import Capture
from zerofx.check_model import find_owners, refuse_model
from zerofx.config import Config, ModelError
from zerofx.decide import Decision
from zerofx.layout import Layout, rows_at
from zerofx.mesh import Mesh
from zerofx.ops import REPLICATED, unshard
from zerofx.passes.choose_layout import choose_layout
from zerofx.program import Program
from zerofx.recipe import passes_of
from zerofx.shard import Owner
from zerofx.swap import READS, Read, swap_class


def trace(
    model_fn: Callable[[], nn.Module],
    example_inputs: Sequence[Any],
    config: Config,
    world: int,
    backend: str = "nccl",
    *,
    loss_fn: Callable[..., Any] | None = None,
    autocast: torch.dtype | None = None,
) -> Program:
    """The program that the passes make of `loss_fn(model, *example_inputs)` and its backward, over `world` ranks.

    `model_fn` makes the model; its tensors have no data and are on the CPU, and of `example_inputs` only shapes and
    dtypes are read, so that they may be on the meta device. Ops are those of the CPU. `loss_fn` calls the model by
    default; `autocast` is the dtype of the torch.autocast region around it. `backend` is that of the process group.
    Modules read parameters as in a model that `zerofx.compile` was called on, so the program is the one that its ranks
    share; see `Program`.

    Raises what torch.compile with fullgraph=True raises where the step is no single graph, and ModelError for a model
    that cannot be sharded.
    """
    with _torch.fake_tensors():
        model, inputs = model_fn(), tree_map_only(torch.Tensor, on_cpu, list(example_inputs))
        return trace_made(model, inputs, config, world, backend, loss_fn=loss_fn, autocast=autocast)


def trace_made(
    model: nn.Module,
    inputs: Sequence[Any],
    config: Config,
    world: int,
    backend: str = "nccl",
    *,
    loss_fn: Callable[..., Any] | None = None,
    autocast: torch.dtype | None = None,
) -> Program:
    """The same for a model and inputs that have no data, inside the mode in which they were made.

    The model's parameters are replaced by their parts.
    """
    captures: list[_Traced] = []
    refuse_model(model)
    if elsewhere := sorted({str(t.device) for t in model.state_dict().values()} - {"cpu"}):
        raise ModelError(
            f"model_fn made tensors on {', '.join(elsewhere)}: they have no data anyway, leave them on cpu"
        )
    owners = find_owners(model, [])
    names = {id(owner.param): owner.layout.name for owner in owners}
    mesh, layout = Mesh.of(dp=world), Layout(tuple(owner.layout for owner in owners))
    if world > 1:
        layout = choose_layout(layout, world, config.stage, config.persist_below)
        names = _shard(model, owners, layout, mesh)

    def graph_backend(gm: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        params = {place: names[id(value)] for place, value in enumerate(given) if id(value) in names}
        decision = Decision(recompute=config.recompute or 0.0)
        order = passes_of(config, backend)
        capture = _Traced(params, order, mesh, layout, 0, decision, in_parts=world > 1)
        captures.append(capture)
        _torch.aot_compile(gm, given, _as_it_is, capture.infer_whole, capture.partition)
        return gm.forward

    def step(*batch: Any) -> Any:
        with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            return model(*batch) if loss_fn is None else loss_fn(model, *batch)

    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, **_torch.own_limit()}
    torch.compile(_torch.own_code(step), backend=graph_backend, **options)(*inputs)
    (capture,) = captures
    assert capture.program is not None
    return capture.program


def _shard(model: nn.Module, owners: Sequence[Owner], layout: Layout, mesh: Mesh) -> dict[int, str]:
    """Replaces parameters by the parts that rank 0 stores, and makes modules read them whole; returns names by id."""
    axis = mesh.axis("dp")
    names: dict[int, str] = {}
    for owner, param in zip(owners, layout, strict=True):
        part = nn.Parameter(torch.empty(param.local_size(axis.size, 0), dtype=param.dtype), param.requires_grad)
        names[id(part)] = param.name
        rows = 0 if param.dim is None else rows_at(param.size[param.dim], axis.size, 0)
        read = Read(param.size, REPLICATED if param.dim is None else param.dim, rows, axis.group)
        for module, name in owner.places:
            module._parameters[name] = part
            module.__dict__.setdefault(READS, {})[name] = read
    for module in list(model.modules()):
        if READS in module.__dict__:
            swap_class(module)
            module.__class__ = _traced_class(cast("Any", type(module)))
    return names


@functools.cache
def _traced_class(base: Any) -> type:
    """The class of a sharded module whose stored parts are plain tensors."""
    body = {name: property(functools.partial(_read, name)) for name in base.zerofx_names}
    return type(base.__name__, (base,), body, zerofx_made=True)


def _read(name: str, module: nn.Module) -> torch.Tensor:
    size, dim, rows, group, *_ = module.__dict__[READS][name]
    whole: torch.Tensor = unshard(module._parameters[name], size, dim, rows, group)
    return whole


@dataclass
class _Traced(Capture):
    """Keeps its program, which stays that of all ranks."""

    program: Program | None = None

    def _localise(self, program: Program) -> None:
        self.program = program

    def infer_whole(self, gm: GraphModule, _: Any) -> GraphModule:
        self.infer(gm.graph)
        return gm


def _as_it_is(gm: GraphModule, _: Any) -> GraphModule:
    return gm


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data of the same shape, strides and dtype."""
    size, stride = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)
