"""Under autocast the weights of matmuls travel in the narrower dtype, and training keeps its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.pool import Pool
from tests.training import adamw, full, sgd
from zerofx.manager import Pass

STEPS = 3


class Mixed(nn.Module):
    """Two matmuls in bf16 around a norm that autocast leaves in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(9, 15), nn.LayerNorm(15), nn.Linear(15, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.norm(torch.relu(self.first(x)))).float().square().mean()


class Run(NamedTuple):
    """Trained parameters by optimizer, and the dtypes in which parameters are gathered and gradients are reduced."""

    trained: dict[str, dict[str, torch.Tensor]]
    gathered: set[tuple[str, str]]
    reduced: set[str]


def without_sinking(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    return tuple(step for step in passes if step.name != "sink-casts")


def train(stage: int, backend: str, sink: bool) -> Run:
    torch.manual_seed(0)
    model = Mixed()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    zerofx.compile(model, stage=stage, persist_below=0, backend=backend, passes=None if sink else without_sinking)
    trained = {}
    for make in (sgd, adamw):
        model.load_state_dict(start)
        optimizer = make(model.parameters())
        for step in range(STEPS):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 9)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained[make.__name__] = {name: full(param) for name, param in model.named_parameters()}
    rows = zerofx.inspect(model).collectives().rows
    gathered = {(name, row.dtype) for row in rows if row.role == "unshard" for name in row.params}
    return Run(trained, gathered, {row.dtype for row in rows if row.role == "reduce_grad"})


@pytest.mark.parametrize(
    ("stage", "backend"),
    [(2, "interpreter"), (3, "interpreter"), pytest.param(3, "inductor", marks=[pytest.mark.inductor])],
)
def test_a_sunk_cast_halves_the_bytes_and_changes_no_bit(pool: Callable[[int], Pool], stage: int, backend: str) -> None:
    low = {f"{layer}.{part}" for layer in ("first", "last") for part in ("weight", "bias")}
    sunk, behind = (pool(2).run(train, stage, backend, sink) for sink in (True, False))
    for ours, theirs in zip(sunk, behind, strict=True):
        assert ours.gathered == {(name, "bf16") for name in low} | {("norm.weight", "f32"), ("norm.bias", "f32")}
        assert {dtype for _, dtype in theirs.gathered} == {"f32"}
        assert ours.reduced == theirs.reduced == {"f32"}
        for optimizer, expected in theirs.trained.items():
            got = ours.trained[optimizer]
            assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
