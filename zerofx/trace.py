"""Traces a training step into a program for any number of ranks: no process group, no memory for parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from zerofx import _torch
from zerofx.capture import Capture
from zerofx.check_model import find_owners, refuse_model
from zerofx.config import Config
from zerofx.layout import Layout
from zerofx.mesh import Mesh
from zerofx.program import Program
from zerofx.recipe import passes_of


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
    Parameters enter whole, and the program is that of a rank before it is made that of one rank: see `Program`.

    Raises what torch.compile with fullgraph=True raises where the step is no single graph, and ModelError for a model
    that cannot be sharded.
    """
    captures: list[_Traced] = []
    with _torch.fake_tensors():
        model, inputs = model_fn(), tree_map_only(torch.Tensor, _on_cpu, list(example_inputs))
        refuse_model(model)
        owners = find_owners(model, [])
        names = {id(owner.param): owner.layout.name for owner in owners}
        layout = Layout(tuple(owner.layout for owner in owners))

        def graph_backend(gm: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            params = {place: names[id(value)] for place, value in enumerate(given) if id(value) in names}
            capture = _Traced(params, passes_of(config, backend), Mesh.of(dp=world), layout, rank=0)
            captures.append(capture)
            _torch.aot_compile(gm, given, _as_it_is, capture.infer_whole, capture.partition)
            return gm.forward

        def step(*batch: Any) -> Any:
            with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
                return model(*batch) if loss_fn is None else loss_fn(model, *batch)

        step.__code__ = step.__code__.replace()  # Dynamo keeps compiled code by code object
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, **_torch.own_limit()}
        torch.compile(step, backend=graph_backend, **options)(*inputs)
    (capture,) = captures
    assert capture.program is not None
    return capture.program


@dataclass
class _Traced(Capture):
    """Keeps its program, which stays that of all ranks."""

    program: Program | None = None

    def _settle(self, program: Program) -> None:
        self.program = program

    def infer_whole(self, gm: GraphModule, _: Any) -> GraphModule:
        self.infer(gm.graph)
        return gm


def _as_it_is(gm: GraphModule, _: Any) -> GraphModule:
    return gm


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data of the same shape, strides and dtype."""
    size, stride = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)
