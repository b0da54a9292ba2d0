"""Optimizers step on local tensors, with the numbers, states and options that they have on DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

import zerofx
from tests.distributed.ranks import Net, message, on_ranks, rows, same, sharded, whole
from tests.training import full
from zerofx.optimizers import ELEMENTWISE, LOCAL_STEPS

Make = Callable[[Any], optim.Optimizer]
HOW: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}}
KINDS: dict[str, Make] = {
    **{f"{kind.__name__} {how}": lambda params, kind=kind, how=how: kind(params, lr=0.01, **HOW[how])
       for kind in sorted(ELEMENTWISE - {optim.Rprop}, key=lambda kind: kind.__name__) for how in HOW},
    "SGD momentum": lambda params: optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam amsgrad": lambda params: optim.Adam(params, amsgrad=True, weight_decay=0.1),
    "Adam fused": lambda params: optim.Adam(params, fused=True),
    "AdamW fused": lambda params: optim.AdamW(params, fused=True, amsgrad=True),
    "AdamW tensor lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
    "RMSprop centered": lambda params: optim.RMSprop(params, centered=True, momentum=0.5),
}  # fmt: skip
ONLY_LOCAL: dict[str, Make] = {
    "SGD fused": lambda params: optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "Adagrad fused": lambda params: optim.Adagrad(params, fused=True),
    "Rprop": lambda params: optim.Rprop(params),
    "Rprop foreach": lambda params: optim.Rprop(params, foreach=True),
}
"""Optimizers with an op that DTensor does not know."""


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def net(stage: int = 3) -> Any:
    torch.manual_seed(0)
    return sharded(Net(), stage=stage, persist_below=10, backend="eager")


def fill(model: nn.Module, step: int) -> None:
    """Gives each parameter a gradient, but in every third step one has none."""
    torch.manual_seed(step)
    for place, param in enumerate(model.parameters()):
        param.grad = None if step % 3 == place == 1 else torch.randn_like(param)


def on_dtensors() -> Any:
    """While it is entered, steps run as they would without zerofx."""
    return mock.patch.object(LOCAL_STEPS, "meshes", set())


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return (a.placements, a.shape, a.stride()) == (b.placements, b.shape, b.stride()) and torch.equal(
            a.to_local(), b.to_local()
        )
    return type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


def same_optimizers(a: optim.Optimizer, b: optim.Optimizer) -> None:
    one, other = a.state_dict(), b.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, state in one["state"].items():
        assert list(state) == list(other["state"][key])
        different = [name for name, value in state.items() if not same_bits(value, other["state"][key][name])]
        assert not different, (key, different)


class Local:
    """Counts the steps that got a stand-in."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        self.steps += args[0] is not optimizer


def step_both(make: Make, prepare: Callable[[optim.Optimizer], object] = bool, steps: int = 4) -> int:
    """Steps on local tensors and on DTensors, compares the results, and returns how many steps were local."""
    model, other = net(), net()
    optimizer, expected = make(parameters(model)), make(parameters(other))
    prepare(optimizer)
    prepare(expected)
    local = Local()
    optimizer.register_step_post_hook(local)
    for step in range(steps):
        fill(model, step)
        fill(other, step)
        optimizer.step()
        with on_dtensors():
            expected.step()
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        same_optimizers(optimizer, expected)
    return local.steps


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_step_on_local_tensors_equals_one_on_dtensors(kind: str) -> None:
    assert step_both(KINDS[kind]) == 4


@pytest.mark.parametrize("kind", ONLY_LOCAL)
@on_ranks(2)
def test_what_dtensors_cannot_do_equals_one_process(kind: str) -> None:
    model, plain = net(), Net()
    plain.load_state_dict(whole(model))
    optimizer, expected = ONLY_LOCAL[kind](parameters(model)), ONLY_LOCAL[kind](parameters(plain))
    for step in range(4):
        fill(model, step)
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            mine.grad = None if its.grad is None else full(its.grad)
        optimizer.step()
        expected.step()
    same(whole(model), whole(plain))


@on_ranks(2)
def test_states_are_dtensors_placed_as_their_parameters() -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters())
    fill(model, 0)
    optimizer.step()
    for param in model.parameters():
        state = optimizer.state[param]
        assert {type(state[name]) for name in ("exp_avg", "exp_avg_sq")} == {DTensor}
        assert state["exp_avg"].placements == param.placements and not isinstance(state["step"], DTensor)


@on_ranks(2)
def test_a_state_dict_is_taken_over_between_steps() -> None:
    model, other = net(), net()
    one, two = optim.AdamW(model.parameters()), optim.AdamW(other.parameters())
    for step in range(2):
        fill(model, step)
        one.step()
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    other.load_state_dict(model.state_dict())
    for trained, optimizer in ((model, one), (other, two)):
        fill(trained, 2)
        optimizer.step()
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    same_optimizers(one, two)


@on_ranks(2)
def test_groups_and_schedulers_decide_the_learning_rate() -> None:
    def make(params: list[nn.Parameter]) -> optim.Optimizer:
        return optim.SGD([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "momentum": 0.9}], lr=0.1)

    def schedule(optimizer: optim.Optimizer) -> None:
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())

    assert step_both(make, schedule) == 4


@on_ranks(2)
def test_a_scheduler_that_wraps_the_step_sees_it() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fill(model, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@on_ranks(2)
def test_hooks_before_a_step_may_change_gradients() -> None:
    def clip(optimizer: optim.Optimizer, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = None if param.grad is None else param.grad * 0.5

    assert step_both(KINDS["AdamW loop"], lambda optimizer: optimizer.register_step_pre_hook(clip)) == 0


@on_ranks(2)
def test_a_closure_makes_the_gradients() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = [param.to_local().clone() for param in model.parameters()]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows(0)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert optimizer.step(closure=None) is None
    for param, start in zip(model.parameters(), before, strict=True):
        if start.numel():
            assert not torch.equal(param.to_local(), start)


class Doubled(optim.SGD):
    """A class of the user's that steps twice."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


@on_ranks(2)
def test_other_classes_step_on_dtensors() -> None:
    assert step_both(lambda params: Doubled(params, lr=0.1)) == 0


@on_ranks(2)
def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters())
    params = parameters(model)
    fill(model, 0)
    with mock.patch("torch.optim.adam.adam", side_effect=ValueError("no step")):
        assert message(optimizer.step, ValueError) == "no step"
    assert not optimizer.state and optimizer.param_groups[0]["params"] == params
    assert all(param.grad is not None for param in params[1:])
    optimizer.step()
    assert all(optimizer.state[param]["step"] == 1 for param in params if param.grad is not None)


@on_ranks(2)
def test_a_scaler_skips_on_all_ranks_the_step_that_overflows_on_one() -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [param.to_local().clone() for param in model.parameters()]
    for infinite in (True, False):
        fill(model, 2)
        scaler.scale(torch.ones(()))
        if infinite and torch.distributed.get_rank() == 1:
            next(model.parameters()).grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True) if b.numel()]
        assert not any(moved) if infinite else all(moved)
    assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_ignored_parameters_step_along() -> None:
    model = Net()
    zerofx.compile(model, backend="eager", persist_below=0, ignored_params=[model.a.weight])
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = model.a.weight.detach().clone()
    model(rows(0)).sum().backward()
    optimizer.step()
    assert torch.allclose(model.a.weight, before - 0.1 * model.a.weight.grad)
    assert type(optimizer.state[model.a.weight]["momentum_buffer"]) is torch.Tensor
