"""A forward that writes to a parameter, whose gathered copy would lose it, ends in one sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.distributed.ranks import Net, backward, both, has, message, on_ranks, rows, same, sharded, whole
from zerofx.gathered import LostWriteError

SAID = ("gathered copy of a sharded parameter", "outside of the forward", "zerofx.full_params")
Write = Callable[[Any], Any]


def no_grad(write: Write) -> Write:
    def inside(model: Any) -> None:
        with torch.no_grad():
            write(model)

    return inside


def own_operator(model: Any) -> None:
    weight = model.a.weight
    weight += 1


def data_operator(model: Any) -> None:
    model.a.weight.data += 1


@torch.compiler.disable
def add_outside(weight: torch.Tensor) -> torch.Tensor:
    return weight.add_(1)


WRITES: dict[str, tuple[Write, str]] = {
    "data": (lambda m: m.scalar.data.clamp_(max=4.6), "scalar"),
    "copy": (no_grad(lambda m: m.a.weight.copy_(torch.ones(13, 7))), "a.weight"),
    "detached": (lambda m: m.a.weight.detach().mul_(2), "a.weight"),
    "view": (no_grad(lambda m: m.a.weight.t()[0].zero_()), "a.weight"),
    "out": (lambda m: torch.clamp(m.a.weight.data, max=1, out=m.a.weight.data), "a.weight"),
    "foreach": (no_grad(lambda m: torch._foreach_mul_([torch.ones(2), m.a.bias.detach()], 2.0)), "a.bias"),
    "setitem": (no_grad(lambda m: m.a.weight.__setitem__(0, 1.0)), "a.weight"),
    "operator": (no_grad(own_operator), "a.weight"),
    "data_operator": (data_operator, "a.weight"),
    "init": (lambda m: nn.init.constant_(m.a.weight, 1.0), "a.weight"),
    "inplace": (lambda m: F.relu(m.a.weight.detach(), inplace=True), "a.weight"),
    "inplace_place": (lambda m: F.relu(m.a.weight.detach(), True), "a.weight"),
    "set_data": (lambda m: setattr(m.a.weight, "data", torch.ones(13, 7)), "a.weight"),
    "packet": (lambda m: torch.ops.aten.mul_(m.a.weight.detach(), 2.0), "a.weight"),
    "renorm": (lambda m: F.embedding(torch.tensor([0]), m.a.weight, None, 0.1), "a.weight"),
    "renorm_of_bags": (lambda m: F.embedding_bag(torch.tensor([[0]]), m.a.weight, max_norm=0.1), "a.weight"),
    "outside": (lambda m: add_outside(m.a.weight.detach()), "a.weight"),
}
LEAVING = ("data_operator", "set_data", "outside")
"""Writes at which Dynamo leaves its graph, or a region of activation checkpointing before it has begun with it."""


class Writing(Net):
    def __init__(self, write: Write, checkpointed: bool = False) -> None:
        super().__init__()
        self.write, self.checkpointed = write, checkpointed
        self.scalar = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return super().forward(x) * self.scalar


def is_told(write: Write, name: str, checkpointed: bool = False, **options: Any) -> None:
    torch.compiler.reset()
    model = sharded(Writing(write, checkpointed), **options)
    before = whole(model)
    told = message(lambda: model(rows(0)), LostWriteError)
    has(told, [f"parameter {name!r}", *SAID])
    assert "\n" not in told
    same(whole(model), before)


@on_ranks(2)
def test_writes_in_a_forward_are_refused() -> None:
    for write, name in WRITES.values():
        is_told(write, name)


@on_ranks(2)
def test_writes_in_a_checkpointed_region_are_refused() -> None:
    for kind, (write, name) in WRITES.items():
        if kind not in LEAVING:
            is_told(write, name, checkpointed=True)


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"persist_below": 10_000}])
@on_ranks(2)
def test_writes_are_refused_however_a_parameter_is_stored(options: dict[str, Any]) -> None:
    is_told(*WRITES["data"], **options)
    is_told(*WRITES["copy"], **options)


@on_ranks(1)
def test_writes_are_refused_in_a_group_of_one_rank() -> None:
    is_told(*WRITES["data"])


@on_ranks(2)
def test_writes_are_refused_without_gradients() -> None:
    with torch.no_grad():
        is_told(*WRITES["data"])


@on_ranks(2)
def test_writes_inside_full_params_are_kept() -> None:
    model = sharded(Writing(WRITES["data"][0]))
    with zerofx.full_params(model):
        model(rows(0))
    assert abs(whole(model)["scalar"].item() - 4.6) < 1e-6


class InPlace(Net):
    """Writes to all that is its own to write to: activations, buffers, and copies of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(13)
        self.register_buffer("last", torch.zeros(13, 7))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.last.copy_(self.a.weight).mul_(2)
            self.a.weight.clone().zero_()
            torch.add(self.a.weight, 1, out=torch.empty(13, 7))
        y = self.batch(self.a(x))
        y += self.a.bias
        y[:, 0] = self.b.bias[0]
        F.relu(y, inplace=True)
        return checkpoint(lambda z: self.b(z).add_(self.b.bias).relu_(), y, use_reentrant=False)


@on_ranks(2)
def test_other_writes_are_kept() -> None:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        return model(rows(0)).square().mean()

    model, plain = both(InPlace)
    backward(model, plain, loss, among=[0])
    same(whole(model), plain.state_dict())
    assert len(zerofx.inspect(model).graphs) == 1
