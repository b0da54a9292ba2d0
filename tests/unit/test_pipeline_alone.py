"""A pipeline on one rank, without a process group: no pipeline is the pipeline with one stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import zerofx
from tests.stage_models import WIDTH, UNet

ROWS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
EXAMPLE: Any = ((ROWS[:2],), {})


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def compiled(*pipeline: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {"pipeline": zerofx.Pipeline(*pipeline), "example_inputs": EXAMPLE} if pipeline else {}
    return zerofx.compile(UNet(), backend="interpreter", **given)


def trained(model: nn.Module, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    step = zerofx.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), **options)
    results = [step(ROWS, -ROWS) for _ in range(2)]
    return model.state_dict(), [value for result in results for value in result]


@pytest.mark.parametrize("pipeline", [(1, "1f1b", 4), (4, "interleaved-1f1b", 4, None, 4), (2, "zbv", 4)])
def test_stages_on_one_rank_train_to_the_bits_of_a_step_without_a_pipeline(pipeline: Any) -> None:
    """But for looped BFS, whose backwards take the micro-batches in another order."""
    state, results = trained(compiled(*pipeline))
    expected, others = trained(compiled(), microbatches=4)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    for a, b in zip(results, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_a_batch_is_evaluated_as_without_a_pipeline() -> None:
    loss = zerofx.eval_step(compiled(2, "looped-bfs", 4), loss_of)(ROWS, -ROWS)
    torch.testing.assert_close(loss, zerofx.eval_step(compiled(), loss_of, microbatches=4)(ROWS, -ROWS))


def decayed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y) + sum(param.square().sum() for param in model.parameters())


def twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y) + loss_of(model, y, x)


def never(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x.clone().requires_grad_(), y)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (decayed, "reads parameters of the model beside its call"),
        (twice, "calls the model more than once"),
        (never, "did not call the model"),
    ],
)
def test_what_a_loss_function_cannot_do_is_refused(loss: Any, told: str) -> None:
    model = compiled(2, "looped-bfs", 4)
    step = zerofx.train_step(model, loss, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match=told):
        step(ROWS, -ROWS)


def test_a_step_of_too_few_micro_batches_is_refused() -> None:
    model = compiled(2, "zbv", 4)
    step = zerofx.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1))
    step(iter([(ROWS[:2], -ROWS[:2])] * 4))
    with pytest.raises(ValueError, match="had 3 micro-batches left, and the step takes 4"):
        step(iter([(ROWS[:2], -ROWS[:2])] * 3))
    with pytest.raises(ValueError, match="no micro-batch left"):
        step(iter([]))


def test_a_pipelined_model_is_not_copied_and_has_a_report() -> None:
    model = compiled(2, "looped-bfs", 4)
    with pytest.raises(TypeError, match="save its state_dict"):
        copy.deepcopy(model)
    assert "looped-bfs, 4 micro-batches over 1 ranks" in str(zerofx.pipeline_report(model))
    with pytest.raises(ValueError, match="was called on"):
        zerofx.pipeline_report(UNet())


def test_a_step_whose_loss_function_raises_updates_nothing_and_the_next_one_trains() -> None:
    model, other = compiled(2, "zbv", 4), compiled(2, "zbv", 4)
    failing = zerofx.train_step(model, twice, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="more than once"):
        failing(ROWS, -ROWS)
    for trains in (model, other):
        zerofx.train_step(trains, loss_of, torch.optim.SGD(trains.parameters(), 0.1))(ROWS, -ROWS)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_short_batch_is_evaluated_in_as_many_micro_batches_as_it_has_rows(rows: int) -> None:
    model = compiled(2, "zbv", 4)
    loss = zerofx.eval_step(model, loss_of)(ROWS[:rows], -ROWS[:rows])
    torch.testing.assert_close(loss, loss_of(compiled(), ROWS[:rows], -ROWS[:rows]).detach())
    step = zerofx.train_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1))
    if rows < 4:
        with pytest.raises(ValueError, match=f"{rows} rows cannot be split into 4 micro-batches"):
            step(ROWS[:rows], -ROWS[:rows])
