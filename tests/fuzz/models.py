"""Random models: what hypothesis draws, as a description that prints as a program, and the module made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IDS = 5
"""Embeddings are read at ids below this, or below their number of rows."""


@dataclass(frozen=True)
class Param:
    """One parameter; `dtype` is a name of torch's."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    frozen: bool = False


@dataclass(frozen=True)
class Op:
    """One node of the model: its kind, the values and the parameters that it reads, by number, and ops inside it."""

    kind: str
    reads: tuple[int, ...] = ()
    params: tuple[int, ...] = ()
    inside: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A model on `rows` rows of `width` numbers. Value 0 is the input, value n the result of op n - 1.

    The loss is a mean over the values of `loss`; what no op reads of `params` is a parameter that nothing reads.
    """

    width: int
    rows: int
    params: tuple[Param, ...]
    ops: tuple[Op, ...]
    loss: tuple[int, ...]


Forward = Callable[..., Tensor]


def _cast(x: Tensor, param: Tensor) -> Tensor:
    return x.to(param.dtype)


def _layer_norm(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(_cast(x, weight), weight.shape, weight, _cast(bias, weight))


def _conv(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(_cast(x, weight)[:, None], weight, padding="same").flatten(1)


def _in_place(x: Tensor, ids: Tensor, param: Tensor) -> Tensor:
    y = x * 1.0
    y[:, :1] += param.sum()
    y.mul_(0.5)
    return y.tanh_()


def _no_grad(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        shift = F.linear(_cast(x, weight), weight).mean()
    return x + shift


def _cat_empty(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x, F.linear(_cast(x, weight), weight).to(x.dtype)], 1)


def _pinned(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(_cast(x, weight), weight)


FORWARDS: dict[str, Forward] = {
    "linear": lambda x, ids, weight: F.linear(_cast(x, weight), weight),
    "linear_bias": lambda x, ids, weight, bias: F.linear(_cast(x, weight), weight, _cast(bias, weight)),
    "matmul": lambda x, ids, weight: _cast(x, weight) @ weight,
    "twice": lambda x, ids, weight: F.linear(F.linear(_cast(x, weight), weight), weight.t()),
    "product": lambda x, ids, one, two: F.linear(_cast(x, one), one * two.sigmoid().to(one.dtype)),
    "slice": lambda x, ids, weight: F.linear(_cast(x, weight), weight[1:]),
    "scale": lambda x, ids, param: x * param,
    "shift": lambda x, ids, param: x + param,
    "total": lambda x, ids, param: x + param.float().mean(),
    "embed": lambda x, ids, weight: F.embedding(ids % weight.shape[0], weight),
    "layer_norm": _layer_norm,
    "conv": _conv,
    "in_place": _in_place,
    "no_grad": _no_grad,
    "cat_empty": _cat_empty,
    "pinned": _pinned,
    "tanh": lambda x, ids: x.tanh(),
    "gelu": lambda x, ids: F.gelu(x),
    "softmax": lambda x, ids: x.softmax(1),
    "detach": lambda x, ids: x.detach() * 2,
    "round_trip": lambda x, ids: x.double().tanh().to(torch.bfloat16).float(),
    "dropout": lambda x, ids: F.dropout(x, 0.5),
}


class Node(nn.Module):
    """An op with its parameters as its own."""

    def __init__(self, op: Op, params: list[nn.Parameter], width: int) -> None:
        super().__init__()
        self.kind, self.count = op.kind, len(op.params)
        for place, number in enumerate(op.params):
            self.register_parameter(f"p{place}", params[number])
        self.inside = nn.ModuleList(Node(each, params, width) for each in op.inside)
        if op.kind in ("running", "stale"):
            self.register_buffer("mean", torch.zeros(width))

    def forward(self, *values: Tensor, ids: Tensor) -> Tensor:
        x = values[0]
        if self.kind == "checkpoint":
            return checkpoint(self.chain, x, ids, use_reentrant=False)
        if self.kind == "add":
            return x + values[1]
        if self.kind == "cat":
            return torch.cat(values, 1)
        if self.kind == "running":
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
            return x + self.mean
        if self.kind == "stale":
            before = self.mean.clone()
            self.mean.copy_(x.detach().float().mean(0))
            return x * (1 + before)
        return FORWARDS[self.kind](x, ids, *(getattr(self, f"p{place}") for place in range(self.count)))

    def chain(self, x: Tensor, ids: Tensor) -> Tensor:
        for node in self.inside:
            x = node(x, ids=ids)
        return x


class Model(nn.Module):
    """The module of a description."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        params = [made(param) for param in spec.params]
        widths = [spec.width]
        nodes = list[Node]()
        for op in spec.ops:
            nodes.append(Node(op, params, widths[op.reads[0]]))
            widths.append(width_of(op, widths, spec.params))
        self.nodes = nn.ModuleList(nodes)
        self.reads, self.sinks = [op.reads for op in spec.ops], spec.loss
        used = {number for op in spec.ops for number in used_by(op)}
        self.rest = nn.ParameterList(param for number, param in enumerate(params) if number not in used)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        values = [x]
        for node, reads in zip(self.nodes, self.reads, strict=True):
            values.append(node(*[values[number] for number in reads], ids=ids))
        terms = [values[number].float().square().mean(1) for number in self.sinks]
        return sum(terms[1:], terms[0])


def used_by(op: Op) -> Iterable[int]:
    yield from op.params
    for each in op.inside:
        yield from used_by(each)


def made(param: Param) -> nn.Parameter:
    dtype: torch.dtype = getattr(torch, param.dtype)
    values = torch.randn(param.shape) / max(1, param.shape[-1] if param.shape else 1) ** 0.5
    return nn.Parameter(values.to(dtype), requires_grad=not param.frozen)


def width_of(op: Op, widths: list[int], params: tuple[Param, ...] | list[Param]) -> int:
    """How wide the op's result is."""
    width = widths[op.reads[0]]
    shapes = [params[number].shape for number in op.params]
    match op.kind:
        case "linear" | "linear_bias" | "product" | "pinned":
            return shapes[0][0]
        case "slice":
            return max(0, shapes[0][0] - 1)
        case "matmul" | "embed":
            return shapes[0][1]
        case "cat":
            return sum(widths[number] for number in op.reads)
        case "cat_empty":
            return width + shapes[0][0]
        case "checkpoint":
            inside = [width]
            for each in op.inside:
                inside = [width_of(each, inside, params)]
            return inside[0]
    return width


def built(spec: Spec) -> Model:
    """The model with the start values that all its runs share."""
    torch.manual_seed(0)
    return Model(spec)


def batch(spec: Spec, rank: int, number: int = 0, rows: int | None = None) -> dict[str, Any]:
    """The inputs of one rank's micro-batch."""
    numbers = torch.Generator().manual_seed(1000 * number + rank)
    rows = spec.rows if rows is None else rows
    return {
        "x": torch.randn(rows, spec.width, generator=numbers),
        "ids": torch.randint(0, IDS, (rows,), generator=numbers),
    }
