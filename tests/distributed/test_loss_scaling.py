"""A step that overflows on one rank changes nothing on any, and the loss scale goes on alike on all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim

import zerofx
from tests.distributed.ranks import Net, both, message, on_ranks, rows, same, sharded, whole
from tests.models import gpt
from tests.pool import Pool
from tests.training import full
from zerofx.scaling import DynamicLossScale, LossScaleError

KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda params: optim.AdamW(params, lr=0.01),
    "SGD momentum": lambda params: optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
    "Adam foreach": lambda params: optim.Adam(params, lr=0.01, foreach=True),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.01),
    "Adadelta": lambda params: optim.Adadelta(params),
}
QUICK = DynamicLossScale(initial=64.0, window=3)


def loss_of(model: nn.Module, x: Tensor, factor: Tensor) -> Tensor:
    return (model(x).float() * factor).square().mean()


def batch(step: int, overflows: bool = False) -> tuple[Tensor, Tensor]:
    return rows(10 * step + dist.get_rank()), torch.tensor(torch.inf if overflows else 1.0)


def snapshot(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    """Copies of this rank's parameters and states."""
    params = list(model.parameters())
    states = [value for param in params for _, value in sorted(optimizer.state.get(param, {}).items())]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in (*params, *states)]
    return [each.detach().clone() for each in local]


def trajectory(kind: str, on_rank: Sequence[Sequence[int]]) -> list[float]:
    """The scale of each step, where each rank overflows in its own ones.

    Skipped steps must change nothing, so that the others train as a model that has not seen those.
    """
    model, other = (both(Net, persist_below=30)[0] for _ in range(2))
    optimizer, unskipped = KINDS[kind](model.parameters()), KINDS[kind](other.parameters())
    step = zerofx.train_step(model, loss_of, optimizer, microbatches=2, clip=1.0, loss_scale=QUICK)
    clean = zerofx.train_step(other, loss_of, unskipped, microbatches=2, clip=1.0)
    found = []
    for place in range(len(on_rank[0])):
        before = snapshot(model, optimizer)
        result = step(*batch(place, bool(on_rank[dist.get_rank()][place])))
        overflow = any(each[place] for each in on_rank)
        assert result.skipped.item() is overflow
        assert result.grad_norm.isfinite().item() is not overflow
        if overflow:
            assert all(torch.equal(a, b) for a, b in zip(snapshot(model, optimizer), before, strict=False))
        else:
            clean(*batch(place))
        same(whole(model), whole(other))
        found.append(result.loss_scale.item())
    steps = [[state["step"] for state in each.state.values() if "step" in state] for each in (optimizer, unskipped)]
    assert steps[0] == steps[1]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Callable[[int], Pool], kind: str) -> None:
    """The first step overflows, hysteresis is used up, two windows pass, and all ranks overflow together."""
    on_rank = [[0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]]
    expected = [64.0, 64.0, 64.0, 32.0, 32.0, 32.0, 64.0, 64.0, 64.0, 128.0, 128.0]
    assert pool(2).run(trajectory, kind, on_rank) == [expected] * 2


def test_an_overflow_on_one_of_three_ranks_is_all_of_theirs(pool: Callable[[int], Pool]) -> None:
    on_rank = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0]]
    assert pool(3).run(trajectory, "AdamW", on_rank) == [[64.0, 64.0, 32.0, 16.0]] * 3


@on_ranks(2)
def test_an_overflow_in_what_one_rank_stores_skips_the_step_on_all() -> None:
    model = sharded(nn.Linear(7, 14))
    optimizer = KINDS["AdamW"](model.parameters())

    def last_row(model: nn.Module, x: Tensor, factor: Tensor) -> Tensor:
        out = model(x)
        return out[:, :7].square().mean() + (out[:, -1] * factor).mean()

    step = zerofx.train_step(model, last_row, optimizer, loss_scale=QUICK)
    before = whole(model)
    step.model.zero_grad = lambda: None
    assert step(*batch(0, overflows=True)).skipped
    finite = [bool(param.grad.to_local().isfinite().all()) for param in model.parameters()]
    assert finite == [dist.get_rank() == 0] * 2
    same(whole(model), before)


@on_ranks(2)
def test_at_its_minimum_the_scale_stops_all_ranks_with_one_error() -> None:
    model = sharded(Net())
    options = DynamicLossScale(initial=2.0, hysteresis=1)
    step = zerofx.train_step(model, loss_of, KINDS["AdamW"](model.parameters()), loss_scale=options)
    assert step(*batch(0, dist.get_rank() == 1)).skipped
    assert "smallest loss scale, 1" in message(lambda: step(*batch(1, dist.get_rank() == 1)), LossScaleError)


@on_ranks(2)
def test_a_step_under_a_constant_scale_is_skipped_too() -> None:
    model = sharded(Net())
    optimizer = KINDS["AdamW"](model.parameters())
    step = zerofx.train_step(model, loss_of, optimizer, loss_scale=128)
    before = whole(model)
    result = step(*batch(0, dist.get_rank() == 1))
    assert result.skipped and result.loss_scale == 128
    same(whole(model), before)


@on_ranks(2)
def test_a_saved_training_goes_on_bit_for_bit() -> None:
    def make() -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(0)
        model = sharded(Net())
        optimizer = KINDS["AdamW"](model.parameters())
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return (
            model,
            optimizer,
            scheduler,
            zerofx.train_step(model, loss_of, optimizer, loss_scale=QUICK, scheduler=scheduler),
        )

    one, two = make(), make()
    overflows = [True, False, False, True, False, False, False, True]
    for place in range(4):
        one[-1](*batch(place, overflows[place]))
    for mine, other in zip(two, one, strict=True):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
    for place in range(4, 8):
        first, second = (each[-1](*batch(place, overflows[place])) for each in (one, two))
        assert first.loss_scale == second.loss_scale and first.skipped == second.skipped
    assert one[-1].state_dict() == two[-1].state_dict() == {"scale": 64.0, "clean": 0, "hysteresis": 1}
    assert all(torch.equal(a, b) for a, b in zip(*(snapshot(*each[:2]) for each in (one, two)), strict=True))


@on_ranks(2)
def test_a_scheduler_waits_for_a_step_that_is_not_skipped() -> None:
    model = sharded(Net())
    optimizer = KINDS["AdamW"](model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = zerofx.train_step(model, loss_of, optimizer, loss_scale="dynamic", scheduler=scheduler)
    rates = []
    for place, overflows in enumerate((True, False, True, False)):
        step(*batch(place, overflows and dist.get_rank() == 0))
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.01, 0.005, 0.005, 0.0025]


def text_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())


def train_text(precision: str) -> tuple[list[float], int, float]:
    """The losses of 40 steps that are not skipped, on four batches; how many were; and the last scale."""
    case = gpt()
    model = sharded(case.model, precision=precision)
    scale = DynamicLossScale(initial=2.0**24, hysteresis=1) if precision == "fp16" else None
    step = zerofx.train_step(model, text_loss, optim.AdamW(model.parameters(), 3e-3), clip=1.0, loss_scale=scale)
    losses, skipped = list[float](), 0
    while len(losses) < 40:
        result = step(case.batch(dist.get_rank(), len(losses) % 4))
        skipped += bool(result.skipped)
        losses += [] if result.skipped else [result.loss.item()]
    return losses, skipped, result.loss_scale.item()


def test_fp16_trains_to_the_loss_of_bf16(pool: Callable[[int], Pool]) -> None:
    (low, none, one), (half, skipped, scale) = (pool(2).run(train_text, each)[0] for each in ("bf16", "fp16"))
    assert (none, one) == (0, 1.0)
    assert skipped >= 1 and scale == 2.0 ** (24 - skipped)
    assert low[-1] < 0.8 * low[0]
    assert abs(half[-1] / low[-1] - 1) < 0.02


@on_ranks(2)
def test_a_model_in_fp16_has_a_dynamic_scale_unless_told() -> None:
    for precision, scale in (("fp16", 65536.0), ("bf16", 1.0), (None, 1.0)):
        model = sharded(Net(), precision=precision)
        result = zerofx.train_step(model, loss_of, KINDS["AdamW"](model.parameters()))(*batch(0))
        assert result.loss_scale == scale and not result.skipped


@on_ranks(2)
def test_a_plain_loop_with_torchs_scaler_is_that_of_one_process() -> None:
    model, plain = both(Net)
    optimizers = [optim.AdamW(each.parameters(), 0.01, eps=1e-3) for each in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in optimizers]
    for place, overflows in enumerate((False, True, False, False, False)):
        mine = dist.get_rank() == 1 and overflows
        factors = [torch.tensor(torch.inf if each == 1 and overflows else 1.0) for each in range(2)]
        losses = [loss_of(plain, rows(10 * place + each), factors[each]) for each in range(2)]
        for trained, optimizer, scaler, loss in zip(
            (model, plain), optimizers, scalers, (loss_of(model, *batch(place, mine)), sum(losses) / 2), strict=True
        ):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert full(norm).isfinite().item() is not overflows
        same(whole(model), whole(plain))
    assert scalers[0].get_scale() == scalers[1].get_scale() == 64.0
