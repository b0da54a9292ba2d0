"""Compares planned with measured step times on this machine's CPUs: three models, both precisions, at every stage.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.foreseen --models gpt mlp images

Rates of kernels and of the process group are measured first, on all ranks at once, as those of the hardware that the
plan is for; `--hardware FILE` takes what `python -m zerofx tune --out FILE` wrote. Ranks run one thread each, so there
should be a core for each of them. A first run compiles; measure with a second one, of a warm cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zerofx
from tests.bench.gpt import GPT, Size
from zerofx.planning.hardware import Hardware, load
from zerofx.planning.measured import measured
from zerofx.tune import tune

STAGES = (0, 1, 2, 3)
WARMUP = 2
SIZE = Size(layers=2, width=512, heads=8, context=256, vocabulary=4096, micro_batch=4)


class Layers(nn.Module):
    """Linear layers with norms and residuals between them."""

    WIDTH, ROWS = 1024, 512

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(self.WIDTH, 2 * self.WIDTH) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(2 * self.WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * self.WIDTH, self.WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for up, norm, down in zip(self.up, self.norm, self.down, strict=True):
            x = x + down(F.silu(norm(up(x))))
        return F.mse_loss(x, y)


class Images(nn.Module):
    """Convolutions and norms over channels, then a linear layer."""

    CHANNELS, SIDE, ROWS = 64, 28, 16

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, self.CHANNELS, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(self.CHANNELS, self.CHANNELS, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(8, self.CHANNELS) for _ in range(3))
        self.head = nn.Linear(self.CHANNELS * self.SIDE * self.SIDE, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return F.cross_entropy(self.head(x.flatten(1)), y)


def tokens() -> tuple[Tensor, ...]:
    ids = torch.randint(SIZE.vocabulary, (SIZE.micro_batch, SIZE.context))
    return ids, ids.roll(-1, 1)


def numbers() -> tuple[Tensor, ...]:
    return torch.randn(Layers.ROWS, Layers.WIDTH), torch.randn(Layers.ROWS, Layers.WIDTH)


def pictures() -> tuple[Tensor, ...]:
    return torch.randn(Images.ROWS, 3, Images.SIDE, Images.SIDE), torch.randint(10, (Images.ROWS,))


class Trained(NamedTuple):
    """A model that returns its loss, and one rank's batch."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


MODELS = {
    "gpt": Trained(lambda: GPT(SIZE), tokens),
    "mlp": Trained(Layers, numbers),
    "images": Trained(Images, pictures),
}


def best(run: Callable[[], object], times: int = 12) -> float:
    """The median seconds of a call, all ranks at work at once, on the slowest of them."""
    found = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(found))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def loss_of(model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def prepared(trained: Trained, stage: int, precision: str, microbatches: int = 1) -> Callable[[], float]:
    """A step that is compiled and has run; it returns the loss."""
    torch.manual_seed(0)
    model = zerofx.compile(trained.model(), stage=stage, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    step = zerofx.train_step(model, loss_of, optimizer, microbatches=microbatches)
    batch = trained.batch()
    for _ in range(WARMUP):
        step(*batch).loss.item()
    return lambda: step(*batch).loss.item()


def planned_seconds(trained: Trained, stage: int, precision: str, machine: Hardware, microbatches: int = 1) -> float:
    found = zerofx.plan(
        trained.model,
        trained.batch(),
        world=dist.get_world_size(),
        stage=stage,
        precision=precision,
        microbatches=microbatches,
        hardware=machine,
    )
    return found.seconds


def begun(hardware: Path | None) -> Hardware:
    """Makes the process group of ranks of one thread each; the machine is that of the file, or else measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return load(hardware) if hardware else measured(tune())


def compared(names: Sequence[str], precisions: Sequence[str], stages: Sequence[int], steps: int, on: Hardware) -> Table:
    """One row for each model, precision and stage. All ranks call it."""
    table = Table("model", "precision", "stage", "planned, ms", "measured, ms", "planned / measured")
    for name in names:
        for precision in precisions:
            for stage in stages:
                torch._dynamo.reset()
                seconds = best(prepared(MODELS[name], stage, precision), steps)
                planned = planned_seconds(MODELS[name], stage, precision, on)
                cells = (f"{planned * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{planned / seconds:.2f}")
                table.add_row(name, precision, str(stage), *cells)
                if dist.get_rank() == 0:
                    print(name, precision, stage, *cells, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.foreseen", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    parser.add_argument("--stages", nargs="+", type=int, default=STAGES, choices=STAGES)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hardware", type=Path)
    given = parser.parse_args()
    machine = begun(given.hardware)
    table = compared(given.models, given.precisions, given.stages, given.steps, machine)
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
