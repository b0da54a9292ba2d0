"""Pipelines whose layers are sliced over tensor-parallel ranks train as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zerofx
from examples.megatron_mpu import sliced
from tests.distributed.ranks import has, message, on_ranks
from tests.distributed.test_model_parallel import LENGTH, WIDTH, ColumnOnly, OfSequence, loss_fn
from tests.pool import Pool
from tests.training import adamw, full, sgd
from zerofx.pipeline import SINGLE, PipelineError

STEPS, HIDDEN = 3, 8
SLICED = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split, self.norm = nn.Identity(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.split(x)))))


def seeded() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer(), Layer(), nn.Linear(WIDTH, 3))


class Mpu:
    """Megatron's newer functions; ranks that slice layers are neighbours, and stages are furthest apart."""

    def __init__(self, replicas: int) -> None:
        grid = torch.arange(4 * replicas).reshape(2, replicas, 2)
        rows = {"tensor_model": grid.reshape(-1, 2), "data": grid.transpose(1, 2).reshape(-1, replicas)}
        rows["pipeline_model"] = grid.permute(1, 2, 0).reshape(-1, 2)
        for kind, members in rows.items():
            for ranks in members.tolist():
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    setattr(self, f"get_{kind}_parallel_group", lambda group=group: group)
                    setattr(self, f"get_{kind}_parallel_rank", group.rank)
                    setattr(self, f"get_{kind}_parallel_world_size", group.size)


def of_mpu(replicas: int) -> tuple[Any, dict[str, Any]]:
    """One of the layers begins with a sequence-parallel norm."""
    mpu, model = Mpu(replicas), seeded()
    mpu.get_model_parallel_group = mpu.get_tensor_model_parallel_group
    mpu.get_model_parallel_rank = mpu.get_tensor_model_parallel_rank
    mpu.get_model_parallel_world_size = mpu.get_tensor_model_parallel_world_size
    for layer in model[:4]:
        sliced(layer, mpu)
    model[2].norm = OfSequence(model[2].norm, mpu.get_tensor_model_parallel_group())
    model[2].up = ColumnOnly(model[2].up)
    del mpu.get_model_parallel_group, mpu.get_model_parallel_rank, mpu.get_model_parallel_world_size
    return model, {"mpu": mpu}


def of_dtensors(replicas: int) -> tuple[Any, dict[str, Any]]:
    mesh, model = zerofx.Mesh(pp=2, dp=replicas, tp=2), seeded()
    for place, layer in enumerate(model[:4]):
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if place == 2:
            layouts = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
            plan |= {"split": PrepareModuleInput(**layouts), "norm": SequenceParallel()}
            plan |= {"up": ColwiseParallel(input_layouts=Shard(1))}
        parallelize_module(layer, mesh.device_mesh["tp"], plan)
    return model, {} if replicas > 1 else {"mesh": mesh}


Build = Callable[[int], tuple[Any, dict[str, Any]]]


def compiled(build: Build, replicas: int = 1, schedule: str = "1f1b", **options: Any) -> Any:
    model, how = build(replicas)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank() // 2)  # ranks that hold the same slices begin with different values
    pipeline = zerofx.Pipeline(2 if schedule in SINGLE else 4, schedule, 4)
    given = {"backend": "interpreter", "persist_below": 0, "example_inputs": ((torch.zeros(1, LENGTH, WIDTH),), {})}
    return zerofx.compile(model, pipeline=pipeline, **given | how | options)


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    """The last micro-batches have a row less than the first."""
    numbers = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(6, LENGTH, WIDTH, generator=numbers), torch.randn(6, LENGTH, 3, generator=numbers)


def near(values: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Compares whole tensors, or of an mpu's slices this rank's own."""
    for name, value in values.items():
        mine, want = full(value), expected[name]
        if mine.shape != want.shape:
            want = want.chunk(2, SLICED[name.partition(".")[2]])[dist.get_rank() % 2]
        torch.testing.assert_close(mine, want, rtol=tolerance, atol=tolerance, msg=lambda told, n=name: f"{n}: {told}")


def check(build: Build, replicas: int, schedule: str, stage: int) -> None:
    model, plain = compiled(build, replicas, schedule, stage=stage), seeded()
    near(model.state_dict(), plain.state_dict(), 0.0)
    start, whole = {n: v.clone() for n, v in model.state_dict().items()}, copy.deepcopy(plain.state_dict())
    evaluate, replica = zerofx.eval_step(model, loss_fn), dist.get_rank() // 2 % replicas
    for make, clip in ((sgd, None), (adamw, 0.1)):
        model.load_state_dict(start)
        plain.load_state_dict(whole)
        optimizer, other = make(model.parameters()), make(plain.parameters())
        step = zerofx.train_step(model, loss_fn, optimizer, clip=clip)
        for count in range(STEPS):
            other.zero_grad()
            parts = zip(*(batch(each, count) for each in range(replicas)), strict=True)
            x, y = (torch.cat(part) for part in parts)
            evaluated = evaluate(*batch(replica, count))
            loss = loss_fn(plain, x, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or torch.inf)
            other.step()
            result = step(*batch(replica, count))
            for mine, want in ((result.loss, loss), (result.grad_norm, norm), (evaluated, loss)):
                torch.testing.assert_close(mine, want.detach(), rtol=1e-5, atol=0)
            near(model.state_dict(), plain.state_dict(), 1e-5)


@pytest.mark.parametrize(
    ("build", "schedule", "stage"),
    [
        pytest.param(of_mpu, "1f1b", 1, marks=pytest.mark.full),
        (of_mpu, "zbv", 3),
        (of_dtensors, "zbv", 2),
        pytest.param(of_dtensors, "1f1b", 3, marks=pytest.mark.full),
    ],
)
def test_stages_of_sliced_layers_train_as_one_process_does(
    pool: Callable[[int], Pool], build: Build, schedule: str, stage: int
) -> None:
    pool(4).run(check, build, 1, schedule, stage, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "dualpipev"])
@pytest.mark.parametrize("build", [of_mpu, of_dtensors])
def test_replicas_of_stages_of_sliced_layers_train_as_one_process_does(
    pool: Callable[[int], Pool], build: Build, schedule: str, stage: int
) -> None:
    pool(8).run(check, build, 2, schedule, stage, timeout=600)


@pytest.mark.parametrize("build", [of_mpu, of_dtensors])
@on_ranks(4)
def test_an_overflow_on_one_of_the_ranks_skips_the_step_on_all(build: Build) -> None:
    model = compiled(build)

    def overflow(param: nn.Parameter) -> None:
        param.grad.to_local()[:1] = torch.inf

    step = zerofx.train_step(model, loss_fn, adamw(model.parameters()), loss_scale="dynamic", clip=1.0)
    handles = [p.register_post_accumulate_grad_hook(overflow) for p in model.parameters() if dist.get_rank() == 3]
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    result = step(*batch(0, 0))
    assert result.skipped and not result.grad_norm.isfinite()
    assert all(torch.equal(full(value), before[name]) for name, value in model.state_dict().items())
    for handle in handles:
        handle.remove()
    result = step(*batch(0, 0))
    assert not result.skipped and result.grad_norm.isfinite()


def save_and_load(build: Build, folder: Path) -> None:
    """Slices of an mpu each have a folder of their own, and DTensors are whole in one."""
    model, place = compiled(build), f"tp{dist.get_rank() % 2}" if build is of_mpu else "all"
    optimizer = adamw(model.parameters())
    zerofx.train_step(model, loss_fn, optimizer)(*batch(0, 0))
    if build is of_mpu:
        has(message(lambda: zerofx.save(folder / "all", model, optimizer)), ("different slices", "the same folder"))
    zerofx.save(folder / place, model, optimizer, step=1)
    other = compiled(build, schedule="interleaved-1f1b")
    assert zerofx.load(folder / place, other, adamw(other.parameters())).step == 1
    plain = seeded()
    if build is of_dtensors:
        zerofx.load(folder / place, plain)
    mine, theirs = model.state_dict(), other.state_dict()
    for name in sorted(mine.keys() & theirs.keys()):
        torch.testing.assert_close(full(mine[name]), full(theirs[name]), rtol=0, atol=0)
    if build is of_dtensors:
        near(mine, plain.state_dict(), 0.0)


@pytest.mark.parametrize("build", [pytest.param(of_mpu, marks=pytest.mark.full), of_dtensors])
def test_checkpoints_of_stages_of_slices(pool: Callable[[int], Pool], build: Build, tmp_path: Path) -> None:
    pool(4).run(save_and_load, build, tmp_path)


class SixFunctions:
    """Two replicas of two slices, and no stages."""

    def __init__(self) -> None:
        grid = torch.arange(4).reshape(2, 2)
        for kind, members in (("model", grid), ("data", grid.t())):
            for ranks in members.tolist():
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    setattr(self, f"get_{kind}_parallel_group", lambda group=group: group)
                    setattr(self, f"get_{kind}_parallel_rank", group.rank)
                    setattr(self, f"get_{kind}_parallel_world_size", group.size)


@on_ranks(4)
def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    told = message(lambda: compiled(lambda _: (seeded(), {"mesh": zerofx.Mesh(dp=2, tp=2)})), PipelineError)
    has(told, ("'pp', of size 2", "'tp' where layers are sliced"))
    mpu = {"mpu": SixFunctions()}
    has(message(lambda: compiled(lambda _: (seeded(), mpu)), PipelineError), ("get_pipeline_model_parallel_group",))
