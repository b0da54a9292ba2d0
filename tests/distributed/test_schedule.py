"""Where collectives run beside the computation, they are issued and waited for in the order that the passes chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zerofx
from tests.pool import Pool
from tests.training import full
from zerofx.config import Config
from zerofx.inspection import Inspection
from zerofx.manager import Pass
from zerofx.recipe import recipe

LAYERS, WIDTH = 4, 24
CONFIG = Config(stage=3, persist_below=0, bucket_mb=4 * (WIDTH + 1) * WIDTH / 2**20, prefetch=1)  # a layer is a bucket
KINDS = {"all_gather": "gather", "reduce_scatter": "reduce", "wait_tensor": "wait", "mm": "compute", "addmm": "compute"}


class Run(NamedTuple):
    """What was written and what ran, in order, and the trained parameters."""

    written: list[str]
    ran: list[str]
    params: dict[str, torch.Tensor]


def overlapping(_: tuple[Pass, ...]) -> tuple[Pass, ...]:
    return recipe(CONFIG, "nccl")


def kind(name: str) -> str | None:
    """What an op of a graph or of a profile is to the schedule; a collective of a profile calls others inside."""
    namespace, op, *_ = [*name.replace("::", ".").split("."), ""]
    if namespace not in ("aten", "c10d" if "::" not in name else "_c10d_functional"):
        return None
    return next((value for key, value in KINDS.items() if op == key or op.startswith(f"{key}_")), None)


def written(seen: Inspection) -> list[str]:
    lines = seen.graphs[0].steps[-1].text.splitlines()
    targets = [line.split(" = ")[1].split("(")[0] for line in lines if " = " in line]
    return [found for target in targets if (found := kind(target))]


def train(overlap: bool, backend: str) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    options = {"bucket_mb": CONFIG.bucket_mb, "passes": overlapping if overlap else None}
    zerofx.compile(model, stage=3, persist_below=0, backend=backend, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(torch.randn(5, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    ran = [found for event in events if "::" in event.name and (found := kind(event.name))]
    params = {name: full(param) for name, param in model.named_parameters()}
    return Run(written(zerofx.inspect(model)), ran, params)


@pytest.mark.parametrize("backend", ["interpreter", pytest.param("inductor", marks=[pytest.mark.inductor])])
def test_what_runs_has_the_order_of_the_program(pool: Callable[[int], Pool], backend: str) -> None:
    for run, blocking in zip(pool(2).run(train, True, backend), pool(2).run(train, False, backend), strict=True):
        assert run.ran == run.written
        first = run.written.index("wait")
        assert run.written[:first] == ["gather", "gather"]
        assert run.written.count("gather") == 2 * LAYERS - 1  # the first layer's weight is not read in the backward
        for name, expected in blocking.params.items():
            assert torch.equal(run.params[name], expected)
