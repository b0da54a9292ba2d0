"""Checkpoints of models whose ranks hold different layers, or slices of layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.distributed.ranks import has, message, same
from tests.distributed.test_model_parallel import of_dtensors, of_mpu, seeded
from tests.distributed.test_pipelines import Text
from tests.pool import Pool
from tests.stage_models import Tied
from tests.training import State, adamw, full

OPTIONS = {"persist_below": 0, "backend": "interpreter"}


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Whole parameters, and the first moments of AdamW by the names of parameters."""
    named = dict(model.named_parameters(remove_duplicate=False))
    found = {name: full(param) for name, param in named.items()}
    moments = {name: optimizer.state[param]["exp_avg"] for name, param in named.items() if param in optimizer.state}
    return found | {f"exp_avg {name}": full(moment) for name, moment in moments.items()}


def pipelined(seed: int, schedule: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., object]]:
    torch.manual_seed(seed)
    stages = 2 if schedule == "1f1b" else 4
    pipeline = zerofx.Pipeline(stages, schedule, microbatches=4)
    example = Text.batch(1, torch.Generator().manual_seed(0))
    model = zerofx.compile(Tied(), stage=1, pipeline=pipeline, example_inputs=Text.example(*example), **OPTIONS)
    optimizer = adamw(model.parameters())
    return model, optimizer, zerofx.train_step(model, Text.loss, optimizer)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return Text.batch(4, torch.Generator().manual_seed(100 * step + dist.get_rank() % 2))


def check_pipelines(folder: Path) -> None:
    """Two stages with two replicas go on as four stages, and as a plain model."""
    model, optimizer, step = pipelined(0, "1f1b")
    step(*batch(0))
    zerofx.save(folder / "a", model, optimizer, step=1)
    other, other_optimizer, other_step = pipelined(1, "interleaved-1f1b")
    assert zerofx.load(folder / "a", other, other_optimizer).step == 1
    plain = Tied()
    plain_optimizer = adamw(plain.parameters())
    zerofx.load(folder / "a", plain, plain_optimizer)
    whole = values(plain, plain_optimizer)
    for each, own in ((model, optimizer), (other, other_optimizer)):
        found = values(each, own)
        assert found
        same(found, {name: whole[name] for name in found})
    for each in (step, other_step):
        each(*batch(1))
    one, two = values(model, optimizer), values(other, other_optimizer)
    both = one.keys() & two.keys()
    same({name: two[name] for name in both}, {name: one[name] for name in both})


def test_a_pipeline_goes_on_in_other_stages_and_as_a_plain_model(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    pool(4).run(check_pipelines, tmp_path)


def rows(step: int) -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank() // 2))


def check_slices(folder: Path) -> None:
    """DTensors are joined; a plain model takes them all."""
    built, options = of_dtensors()
    model = zerofx.compile(built, stage=3, **options, **OPTIONS)
    optimizer = adamw(model.parameters())
    zerofx.train_step(model, lambda model, x: model(x).square().mean(), optimizer)(rows(0))
    zerofx.save(folder / "a", model, optimizer)
    plain = seeded()
    plain_optimizer = adamw(plain.parameters())
    zerofx.load(folder / "a", plain, plain_optimizer)
    same(values(plain, plain_optimizer), values(model, optimizer))


def test_slices_of_dtensors_are_joined(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    pool(4).run(check_slices, tmp_path)


def check_mpu(folder: Path) -> None:
    built, options = of_mpu()
    model = zerofx.compile(built, stage=3, **options, **OPTIONS)
    refused = message(lambda: zerofx.save(folder / "a", model), zerofx.CheckpointError)
    has(refused, ["ranks along 'tp' have different slices", "one of its own", "coordinates of zerofx.Mesh"])
    place = options["mpu"].get_model_parallel_rank()
    refused = message(lambda: zerofx.save(folder / f"tp{place}", model, keep=1), zerofx.CheckpointError)
    has(refused, ["keep=1 is not possible where each slice", "leave keep out"])
    zerofx.save(folder / f"tp{place}", model)
    before = {name: full(value) for name, value in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    zerofx.load(folder / f"tp{place}", model)
    same({name: full(value) for name, value in model.named_parameters()}, before)
    refused = message(lambda: zerofx.load(folder / f"tp{1 - place}", model), zerofx.CheckpointError)
    has(refused, [f"has the slice of tp {1 - place}, and this rank has the slice of tp {place}"])


def test_each_slice_of_an_mpu_has_a_folder_of_its_own(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    pool(4).run(check_mpu, tmp_path)
