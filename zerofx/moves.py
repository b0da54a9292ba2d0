"""The programs beside a model's graphs: one gathers parameters to be kept, one reduces gradients that have waited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph

from zerofx._torch import fake_tensors
from zerofx.backends import run_alone
from zerofx.capture import Capture
from zerofx.edit import fake_result, stamp
from zerofx.layout import Layout
from zerofx.mesh import Mesh
from zerofx.notes import halves_of, noted
from zerofx.passes.choose_layout import marker_args
from zerofx.program import Invariant, Level, Program, Tag

Kind = Literal["gather", "reduce"]
Move = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def move_program(kind: Kind, params: Layout, mesh: Mesh) -> Program:
    """An unshard of each parameter's part, or a reduce_grad of each parameter's whole gradient, before the passes."""
    axis, graph = mesh.axis("dp"), Graph()
    program = Program({kind: graph}, mesh, params, Level.PHYSICAL, {Invariant.MARKED, Invariant.MERGED})
    op: Any = torch.ops.zerofx.unshard.default if kind == "gather" else torch.ops.zerofx.reduce_grad.default
    made, inputs = list[Any](), [graph.placeholder(f"{kind}_{place}") for place in range(len(params.params))]
    with fake_tensors():
        for param, given in zip(params, inputs, strict=True):
            stored = "replica" if param.dim is None else "shard"
            stamp(given, stored if kind == "gather" else "whole", (param.name,))
            size = param.local_size(axis.size, 0) if kind == "gather" else param.size
            given.meta["val"] = torch.empty(size, dtype=param.dtype)
            own = (list(param.size),) if kind == "gather" else ()
            made.append(graph.call_function(op, (given, *own, *marker_args(param, axis.size, axis.group))))
            stamp(made[-1], "unshard" if kind == "gather" else "reduce_grad", (param.name,))
            made[-1].meta["val"] = fake_result(made[-1])
    end = graph.output(tuple(made))
    end.meta["zerofx"] = tuple(Tag("out") if kind == "gather" else Tag("grad", (param.name,)) for param in params)
    return program


def move(kind: Kind, capture: Capture) -> Move:
    """Runs the program of all of the capture's parameters, in their order, behind its physical passes.

    Takes what is moved as one list, which is emptied on the way.
    """
    program = move_program(kind, capture.layout, capture.mesh)
    capture.run_alone(program)
    halves = halves_of(capture.steps[-1].text, f"the step, beside the model's graphs, to {kind}")
    return noted(run_alone(program.graphs[kind]), lambda _: halves, capture.mesh.axis("dp").group)
