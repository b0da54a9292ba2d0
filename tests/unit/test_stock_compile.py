"""Where torch.compile itself differs from eager code, as docs/ says, and what zerofx makes of it on one rank.

Stock torch.compile runs with the backend that only traces, so a difference is one of tracing and not of kernels.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import zerofx
from tests.situations.calls import TwoHeads
from tests.situations.forwards import Pinned


def eager(model: nn.Module) -> nn.Module:
    return model


def stock(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def ours(model: nn.Module) -> nn.Module:
    return zerofx.compile(model, backend="interpreter")


Compile = Callable[[nn.Module], Any]


@pytest.fixture(autouse=True)
def without_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    torch.compiler.reset()
    torch.manual_seed(0)


def made(via: Compile, model: nn.Module) -> tuple[nn.Module, Any]:
    """The model, and what is called in its place."""
    return model, via(model)


@pytest.mark.parametrize(("via", "zero"), [(eager, False), (stock, True), (ours, True)])
def test_a_parameter_of_an_ignored_output_has_a_zero_gradient(via: Compile, zero: bool) -> None:
    model, call = made(via, TwoHeads())
    call(torch.randn(3, 4))["main"].square().mean().backward()
    before, grad = model.aux.weight.detach().clone(), model.aux.weight.grad
    assert (grad is not None) == zero and (grad is None or not grad.any())
    torch.optim.AdamW(model.parameters(), weight_decay=0.1).step()
    assert torch.equal(model.aux.weight, before) != zero


@pytest.mark.parametrize(("via", "runs"), [(eager, 1), (stock, 0), (ours, 1)])
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward"])
def test_a_module_hook_put_on_after_the_first_call_runs(via: Compile, runs: int, kind: str) -> None:
    model, call = made(via, nn.Sequential(nn.Linear(4, 6), nn.Tanh()))
    x = torch.randn(3, 4, requires_grad=True)
    call(x)
    seen: list[str] = []
    getattr(model[0], f"register_{kind}_hook")(lambda *_: seen.append(kind))
    call(x).sum().backward()
    assert len(seen) == runs


@pytest.mark.parametrize(("via", "equal"), [(stock, False), (ours, True)])
def test_a_region_without_autocast_has_the_backward_of_eager_code(via: Compile, equal: bool) -> None:
    plain = Pinned()
    model, call = made(via, copy.deepcopy(plain))
    x = torch.randn(4, 32)
    for each in (plain, call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = each(x)
        out.square().mean().backward()
    assert torch.equal(model.b.weight.grad, plain.b.weight.grad) == equal
    assert torch.equal(model.a.weight.grad, plain.a.weight.grad) == equal


@pytest.mark.parametrize("via", [stock, ours])
def test_double_backward_is_refused(via: Compile) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    out = via(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        slope.norm().backward()


@pytest.mark.parametrize("via", [stock, ours])
@pytest.mark.parametrize("always", [True, False])
def test_a_graph_can_be_retained_in_all_backwards_or_in_none(via: Compile, always: bool) -> None:
    model = via(TwoHeads())
    model(torch.randn(3, 4))["main"].sum().backward(retain_graph=always)
    out = model(torch.randn(3, 4))
    with contextlib.nullcontext() if always else pytest.raises(RuntimeError, match="donated_buffer=False"):
        out["main"].sum().backward(retain_graph=True)
        out["aux"].sum().backward()


class UnusedNumbers(nn.Module):
    """Draws random numbers twice, and uses the second ones only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return x + torch.rand(3) * self.scale


@pytest.mark.parametrize(("via", "equal"), [(stock, False), (ours, False)])
def test_random_numbers_that_nothing_uses_are_not_drawn(via: Compile, equal: bool) -> None:
    results = []
    for each in (UnusedNumbers(), via(UnusedNumbers())):
        torch.manual_seed(1)
        results.append(each(torch.zeros(3)))
    assert torch.equal(*results) == equal


class Keeping(nn.Module):
    """Keeps an intermediate result as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.linear(x)
        return torch.tanh(self.seen)


@pytest.mark.parametrize(("via", "there"), [(eager, True), (stock, False), (ours, False)])
def test_the_gradient_of_an_intermediate_result_that_a_module_keeps(via: Compile, there: bool) -> None:
    model, call = made(via, Keeping())
    out = call(torch.randn(3, 4))
    model.seen.retain_grad()
    out.sum().backward()
    assert (model.seen.grad is not None) == there
