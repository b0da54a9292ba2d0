"""Under autocast the weights of matmuls travel in the narrower dtype, and training keeps its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.distributed.ranks import on_ranks, sharded
from tests.pool import Pool
from tests.training import adamw, difference, full, sgd
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


class Layers(nn.Module):
    """As `Mixed`, and called in whatever autocast the caller wants; the last weight is tied to the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(9, 15), nn.LayerNorm(15), nn.Linear(15, 9, bias=False)
        self.tied = nn.Linear(9, 15)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.first(x) + self.tied(x))))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank))


def one_process(dtype: torch.dtype, reduce_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Eager autocast; each rank's gradients are rounded to `reduce_dtype` before their mean."""
    torch.manual_seed(0)
    model, ranks = Layers(), []
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = model(batch(rank, 0))
        out.float().square().mean().backward()
        ranks.append({name: param.grad.to(reduce_dtype) for name, param in model.named_parameters()})
    return {name: torch.stack([each[name] for each in ranks]).mean(0).float() for name in ranks[0]}


def check_precision(precision: str, reduce_dtype: str | None, stage: int, backend: str, tolerance: float) -> None:
    """Compares the gradients of a step with those of one process, and the dtype in which they are reduced."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    low = torch.bfloat16 if reduce_dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    model = sharded(Layers(), stage=stage, precision=precision, reduce_dtype=reduce_dtype, backend=backend)
    out = model(batch(dist.get_rank(), 0))
    assert out.dtype is dtype and not torch.is_autocast_enabled("cpu")
    out.float().square().mean().backward()
    for name, expected in one_process(dtype, low).items():
        found = full(model.get_parameter(name).grad)
        assert found.dtype is torch.float32
        assert difference(found, expected) < tolerance, name
    reduced = {row.dtype for row in zerofx.inspect(model).collectives().rows if row.role == "reduce_grad"}
    assert reduced == {"bf16" if reduce_dtype == "bf16" else "f32"}


@pytest.mark.parametrize("reduce_dtype", [None, "fp32", "bf16"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_precision_is_an_autocast_around_the_model(precision: str, reduce_dtype: str | None, stage: int) -> None:
    check_precision(precision, reduce_dtype, stage, "interpreter", 2e-2 if reduce_dtype == "bf16" else 1e-5)


@pytest.mark.inductor
@on_ranks(2)
def test_a_precision_on_inductor_is_within_the_rounding_of_bf16() -> None:
    check_precision("bf16", "bf16", 3, "inductor", 2e-2)


@on_ranks(2)
def test_reducing_in_bf16_halves_the_bytes() -> None:
    sent = {}
    for name in ("fp32", "bf16"):
        model = sharded(Layers(), reduce_dtype=name)
        model(batch(0, 0)).square().mean().backward()
        sent[name] = sum(r.bytes_sent for r in zerofx.inspect(model).collectives().rows if r.role == "reduce_grad")
    assert sent["fp32"] == 2 * sent["bf16"] > 0


@on_ranks(2)
def test_fp32_turns_the_callers_autocast_off() -> None:
    model = sharded(Layers(), precision="fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch(0, 0)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")


@on_ranks(2)
def test_a_scaler_skips_a_step_that_overflows_on_one_rank_and_trains_on() -> None:
    torch.manual_seed(0)
    model = sharded(Layers(), precision="fp16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = [param.to_local().clone() for param in model.parameters()]
    for step, factor in enumerate((1e6 if dist.get_rank() == 1 else 1.0, 1.0)):
        optimizer.zero_grad()
        loss = (model(batch(dist.get_rank(), step)).float() * factor).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p.to_local(), s) for p, s in zip(model.parameters(), start, strict=True)]
        assert all(moved) if step else not any(moved)
    assert scaler.get_scale() == 2.0**9
