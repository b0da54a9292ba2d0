"""Models that are hard to cut into stages, and what cuts and joins them without ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.models import GPT
from zerofx.planning.hardware import H100
from zerofx.stage_graphs import Stage
from zerofx.stage_line import Line
from zerofx.whole_graph import WholeGraph, WithoutData

WIDTH = 12


class UNet(nn.Module):
    """Layers down and up again; each way up adds what the layer opposite made, the outermost across all stages."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            seen.append(x)
        for layer in self.up:
            x = torch.tanh(layer(x + seen.pop()))
        return x


class Tied(GPT):
    """A GPT whose head is the embedding of its tokens."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.head.weight = self.tokens.weight


class InPlace(nn.Module):
    """Writes to results in place, has a mask and positions that depend on nothing, counts in a buffer, and computes a
    scale without gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a bias before the norm would be rounding alone
        self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(WIDTH)
        mask[::2] = 1.0
        weight = (self.table * 2).cos()
        x = self.norm(self.a(x))
        x += 1.0
        x = F.relu(x, inplace=True) * mask
        y = self.b(x) * weight
        with torch.no_grad():
            scale = y.abs().mean() + 1.0
        left, right = self.c(y / scale).chunk(2, dim=-1)
        return left * mask[: WIDTH // 2] + right * weight[WIDTH // 2 :]


def whole_of(model: nn.Module, *args: Any, **kwargs: Any) -> WholeGraph:
    return WithoutData(model, torch.device("cpu")).capture(args, kwargs, nullcontext)


def line_of(model: nn.Module, *args: Any, **kwargs: Any) -> Line:
    return Line(whole_of(model, *args, **kwargs), H100)


def run_stages(model: nn.Module, whole: WholeGraph, stages: list[Stage], *args: Any, **kwargs: Any) -> Any:
    """What the model returns, computed stage by stage; what crosses a cut is passed on with its gradient."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = tree_leaves((args, kwargs))
    values: Any = ()
    for stage in stages:
        own = [tensors[i.name] if i.name else leaves[i.place] if i.kind == "batch" else i.value for i in stage.inputs]
        values = stage.module(*own, *values)
    return whole.result(values)


def simulated(model: nn.Module, whole: WholeGraph, stages: list[Stage] | None, parts: list[Any]) -> list[Tensor]:
    """The results of micro-batches, and the gradients that they add up to, of the whole graph or of its stages in turn.

    Stages hand on what has no history, and get its gradients back, as over ranks: first all forwards, then all
    backwards.
    """
    model.zero_grad()
    tensors, results, backwards = dict(model.named_parameters()) | dict(model.named_buffers()), list[Tensor](), []
    for args, kwargs in parts:
        leaves, received, passed = tree_leaves((args, kwargs)), list[Tensor](), []
        cuts = stages or [Stage(whole.module, tuple(whole.inputs.values()), (), ())]
        for stage in cuts:
            known = [tensors.get(i.name, i.value) if i.kind != "batch" else leaves[i.place] for i in stage.inputs]
            received = [
                v.detach().requires_grad_(b.has_gradient) for v, b in zip(received, stage.receives, strict=True)
            ]
            sent = stage.module(*known, *received)
            passed.append((received, sent))
            received = list(sent)
        results += received
        backwards.append(passed)
    for passed in backwards:
        gradients: list[Any] = [torch.ones_like(value) for value in passed[-1][1]]
        for received, sent in reversed(passed):
            pairs = [(v, g) for v, g in zip(sent, gradients, strict=True) if v.requires_grad and g is not None]
            torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
            gradients = [value.grad for value in received]
    return [*results, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def text_of(stages: list[Stage]) -> str:
    """What each stage reads, receives, computes and sends."""
    lines = list[str]()
    for place, stage in enumerate(stages):
        reads = ", ".join(each.name or f"{each.kind} {each.place}" for each in stage.inputs)
        lines += [f"stage {place}", f"    reads {reads}"]
        lines += [f"    receives {_boundary(each)}" for each in stage.receives]
        known = dict(zip(stage.module.graph.find_nodes(op="placeholder"), stage.inputs, strict=False))
        for node in stage.module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                name = node.target if isinstance(node.target, str) else node.target.__name__
                read = [known[source].name if source in known else source.name for source in node.all_input_nodes]
                lines.append(f"    {node.name} = {name}({', '.join(read)})")
        lines += [f"    sends {_boundary(each)}" for each in stage.sends]
    return "\n".join(lines) + "\n"


def _boundary(each: Any) -> str:
    gradient = "" if each.has_gradient else ", without a gradient"
    return f"{each.name}: {str(each.dtype).removeprefix('torch.')}{list(each.size)}{gradient}"
