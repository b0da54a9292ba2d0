"""The README's schedules are DeepSpeed's, here by its formulas, at each step and through torch's scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.unit.test_readme import block

MOST, STEPS, TOTAL = 0.5, 7, 30
Rate = Callable[[int], float]


def recipes() -> dict[str, Any]:
    """What the README's code defines."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    names: dict[str, Any] = {"opt": torch.optim.SGD([parameter], lr=MOST)}
    exec(block("schedules"), names)
    return names


RECIPES = recipes()


def rates(factor: Rate, lr: float = MOST) -> list[float]:
    """The learning rate of each step."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    scheduler, found = LambdaLR(optimizer, factor), []
    for _ in range(TOTAL + 10):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def rise(i: int, log: bool) -> float:
    if i >= STEPS:
        return 1.0
    return math.log(i + 1) / math.log(STEPS) if log else i / STEPS


def deepspeed(rate: Rate, first: float) -> list[float]:
    """DeepSpeed's rate of each step, from that by `last_batch_iteration`, which is -1 in the first step."""
    return [first] + [rate(step - 1) for step in range(1, TOTAL + 10)]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("low", [0.0, 0.1])
def test_warmup(low: float, log: bool) -> None:
    expected = deepspeed(lambda i: low + (MOST - low) * rise(i, log), low)
    assert rates(RECIPES["warmup"](low / MOST, STEPS, log)) == pytest.approx(expected)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("low", [0.0, 0.1])
def test_warmup_decay(low: float, log: bool) -> None:
    def gamma(i: int) -> float:
        return rise(i, log) if i < STEPS else max(0.0, (TOTAL - i) / max(1.0, TOTAL - STEPS))

    expected = deepspeed(lambda i: low + (MOST - low) * gamma(i), low)
    assert rates(RECIPES["warmup_decay"](low / MOST, STEPS, TOTAL, log)) == pytest.approx(expected)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("low", [0.0, 0.2])
def test_warmup_cosine(low: float, log: bool) -> None:
    """With a `warmup_min_ratio` DeepSpeed's first step alone has a rate of zero, the recipe's has that ratio."""

    def ratio(i: int) -> float:
        if i < STEPS:
            return low + (1 - low) * rise(i, log)
        done = min(1.0, (i - STEPS + 1) / max(1, TOTAL - STEPS))
        return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2

    expected = deepspeed(lambda i: MOST * ratio(i), MOST * low)
    assert rates(RECIPES["warmup_cosine"](low, STEPS, TOTAL, 0.01, log)) == pytest.approx(expected)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_one_cycle(decay: float) -> None:
    low, up, down, every = 0.1, 6, 10, 3

    def rate(i: int) -> float:
        if i >= up + down:
            return low / (1 + decay * (i - (up + down) + 1) / every)
        x = (i + 1) / (up + down) - math.floor((i + 1) / (up + down))
        ratio = up / (up + down)
        return low + (MOST - low) * (x / ratio if x <= ratio else (x - 1) / (ratio - 1))

    assert rates(RECIPES["one_cycle"](low / MOST, up, down, decay, every)) == pytest.approx(deepspeed(rate, low))


@pytest.mark.parametrize("stairs", [True, False])
def test_range_test(stairs: bool) -> None:
    every, rate = 4, 0.5

    def expected(i: int) -> float:
        interval = (i + 1) / every
        return 0.01 * (1 + rate * (math.floor(interval) if stairs else interval))

    assert rates(RECIPES["range_test"](every, rate, stairs), 0.01) == pytest.approx(deepspeed(expected, 0.01))


def test_the_example_makes_a_scheduler() -> None:
    assert RECIPES["scheduler"].get_last_lr() == [0.0]
