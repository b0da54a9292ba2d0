"""Makes a graph of each stage of a whole forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node

from zerofx.pipeline import PipelineError
from zerofx.stage_line import Line
from zerofx.tensor_parallel import Sliced, as_read, sliced_as
from zerofx.whole_graph import Input


class Boundary(NamedTuple):
    """A tensor that one stage hands to the next, and whether its gradient comes back."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


@dataclass(frozen=True)
class Stage:
    """One stage: a function of its `inputs` and then of what it `receives`, which returns what it `sends`.

    The last one sends nothing: it returns the outputs of the model.
    """

    module: GraphModule
    inputs: tuple[Input, ...]
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]

    def names(self, kind: str) -> list[str]:
        """The names of its parameters, or of its buffers."""
        return [each.name for each in self.inputs if each.kind == kind]


def stages_of(line: Line, cuts: Sequence[int]) -> list[Stage]:
    """The stages between the cuts, which run one after another as the whole graph does."""
    return [_stage(line, start, end) for start, end in pairwise([line.first - 1, *cuts, line.last])]


def refuse_spread_buffers(stages: Sequence[Stage], owned: Sequence[frozenset[str]]) -> None:
    """Raises PipelineError for a stage that reads what its rank does not have."""
    for place, (stage, names) in enumerate(zip(stages, owned, strict=True)):
        missing = [name for kind in ("param", "buffer") for name in stage.names(kind) if name not in names]
        if missing:
            raise PipelineError(
                f"stage {place} reads {missing[0]!r} in this mode, which it did not where the model was cut into "
                "stages: compile it in the mode that reads most, or take split_at that keeps what reads it together"
            )


def _stage(line: Line, start: int, end: int) -> Stage:
    graph, copies = Graph(), dict[Node, Node]()
    inputs = line.inputs_of(start, end)
    received = line.crossing(start) if start >= line.first else []
    for node in (*inputs, *received):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node, each in [(node, line.whole.inputs[node]) for node in inputs]:
        if each.kind == "param" and isinstance(value := line.facts[node].value, DTensor):
            name = f"read_{node.name}"
            line.whole.module.add_submodule(name, _Read(sliced_as(value)))
            copies[node] = graph.call_module(name, (copies[node],))
    for node in line.needed(start, end):
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    sent = line.crossing(end) if end < line.last else line.whole.outputs
    graph.output(tuple(copies[node] for node in sent))
    graph.lint()
    module = GraphModule(line.whole.module, graph)
    kinds = tuple(line.whole.inputs[node] for node in inputs)
    return Stage(module, kinds, _boundaries(line, received), _boundaries(line, sent) if end < line.last else ())


class _Read(nn.Module):
    """Reads a parameter, of which a rank has the whole slice, as the DTensor that it is in the model."""

    def __init__(self, sliced: Sliced) -> None:
        super().__init__()
        self.sliced = sliced

    def forward(self, own: Tensor) -> DTensor:
        return as_read(own, self.sliced)


def _boundaries(line: Line, nodes: Sequence[Node]) -> tuple[Boundary, ...]:
    made = list[Boundary]()
    for node in nodes:
        value = line.facts[node].value
        has_gradient = bool(value.requires_grad) and value.is_floating_point()
        made.append(Boundary(node.name, tuple(map(int, value.shape)), value.dtype, has_gradient))
    return tuple(made)
