"""Runs one stage's forward and backward on micro-batches, on whole parameters that are there for the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from zerofx import _torch
from zerofx.backends import inductor, interpret_in_halves, run_alone
from zerofx.capture import Capture
from zerofx.stage_graphs import Boundary, Stage
from zerofx.stage_halves import Halves, Later

Call = Callable[..., Any]


class Compiled(NamedTuple):
    """A stage compiled for inputs of one kind, and its backward where that runs in halves."""

    call: Call
    halves: Halves | None


def compile_stage(
    stage: Stage, inputs: Sequence[Any], capture: Capture, backend: str, key: str, in_halves: bool
) -> Compiled:
    """Compiles a stage for inputs like these, in the grad mode of now; `in_halves` cuts its backward in two."""
    module, places = _without_relays(stage)
    weights = [place for place, each in enumerate(stage.inputs) if each.kind == "param"]
    halves = None
    if in_halves and torch.is_grad_enabled():
        halves = Halves(weights, _torch.inductor_graph if backend == "inductor" else lambda gm: run_alone(gm.graph, gm))
    if backend == "inductor":
        compiler = None if halves is None else halves.compile
        call = inductor(capture, key, module, inputs, use_caches=halves is None, backward_compiler=compiler)
    else:
        call = interpret_in_halves(capture, module, inputs, None if halves is None else halves.compile)

    def run(*args: Any) -> list[Tensor]:
        made = call(*args)
        return [args[source] if place < 0 else made[place] for place, source in places]

    return Compiled(run, halves)


def _without_relays(stage: Stage) -> tuple[GraphModule, list[tuple[int, int]]]:
    """The stage's module without outputs that are its inputs, and where each output is: there, or among the inputs."""
    graph = Graph()
    copies: dict[Any, Any] = {}
    graph.graph_copy(stage.module.graph, copies)
    inputs = {copies[node]: place for place, node in enumerate(stage.module.graph.find_nodes(op="placeholder"))}
    (end,) = stage.module.graph.find_nodes(op="output")
    values = [copies[node] for node in end.args[0]]
    made = list(dict.fromkeys(value for value in values if value not in inputs))
    graph.output(tuple(made))
    places = [(-1, inputs[value]) if value in inputs else (made.index(value), -1) for value in values]
    return GraphModule(stage.module, graph), places


@dataclass
class Flying:
    """A micro-batch between a stage's forward and its backward."""

    received: list[Tensor]
    outputs: list[Tensor]


class StageRun:
    """One stage over the micro-batches of a step.

    `wholes` are the parameters, leaves whose gradients add up, and `buffers` what the modules hold.
    """

    def __init__(self, wholes: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.wholes, self.buffers = wholes, buffers
        self.flying = dict[int, Flying]()
        self.later = dict[int, list[Later]]()

    def inputs(self, stage: Stage, leaves: Sequence[Any]) -> list[Any]:
        """What a variant of the stage reads, but for what it receives; `leaves` are those of the batch."""
        known = {"param": self.wholes, "buffer": self.buffers}
        return [
            known[each.kind][each.name] if each.name else leaves[each.place] if each.kind == "batch" else each.value
            for each in stage.inputs
        ]

    def forward(self, part: int, compiled: Compiled, inputs: list[Any], received: list[Tensor]) -> list[Tensor]:
        """Returns the outputs, which the backward of the micro-batch begins with."""
        outputs: list[Tensor] = compiled.call(*inputs, *received)
        if torch.is_grad_enabled():
            self.flying[part] = Flying(received, outputs)
        return outputs

    def backward(self, part: int, compiled: Compiled, begin: Begin, apart: bool) -> list[Tensor | None]:
        """The gradients of what was received, after `begin` has run the backward from the outputs.

        With `apart` those of the weights are left for `weights`; otherwise they have been added up.
        """
        flight = self.flying.pop(part)
        if compiled.halves is not None:
            compiled.halves.apart = apart
        begin(flight.outputs)
        if apart and compiled.halves is not None:
            self.later[part], compiled.halves.later = compiled.halves.later, []
        return [tensor.grad for tensor in flight.received]

    @torch.no_grad()
    def weights(self, part: int, stage: Stage) -> None:
        """Adds up the gradients of the weights for a micro-batch whose backward has run apart."""
        params = [self.wholes[name] for name in stage.names("param")]
        for later in self.later.pop(part):
            for param, grad in zip(params, later(), strict=True):
                if grad is not None and param.requires_grad:
                    # a graph may return one tensor, or views of it, as the gradients of several weights
                    param.grad = grad.detach().clone() if param.grad is None else param.grad.detach().add_(grad)


Begin = Callable[[list[Tensor]], None]
"""Runs a backward from the outputs of a stage."""


def begin_at(loss: Tensor) -> Begin:
    """Runs a backward from the loss that was made of the last stage's outputs."""

    def begin(outputs: list[Tensor]) -> None:
        torch.autograd.backward(loss)

    return begin


def begin_with(gradients: Sequence[Tensor], boundaries: Sequence[Boundary]) -> Begin:
    """Runs a backward from the outputs of a stage that have gradients, which the next stage has sent."""

    def begin(outputs: list[Tensor]) -> None:
        sent = [value for value, boundary in zip(outputs, boundaries, strict=True) if boundary.has_gradient]
        pairs = [(value, grad) for value, grad in zip(sent, gradients, strict=True) if value.requires_grad]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])

    return begin
