"""Compares planned with measured step times on this machine's CPUs, at every stage, in one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.foreseen --size small

Rates of kernels and of the process group are measured first, on all ranks at once, as those of the hardware that the
plan is for. Ranks run one thread each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zerofx
from tests.bench.gpt import GPT, SIZES, Size, global_batch
from zerofx.planning.measured import measured
from zerofx.tune import tune

STAGES = (0, 1, 2, 3)
WARMUP = 2


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


def step_seconds(size: Size, stage: int, precision: str, steps: int) -> float:
    """The median seconds of a step on the slowest rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = zerofx.compile(GPT(size), stage=stage, precision=precision)
    step = zerofx.train_step(model, loss_of, torch.optim.AdamW(model.parameters(), 3e-4))
    mine = slice(rank * size.micro_batch, (rank + 1) * size.micro_batch)
    batch = [whole[mine] for whole in global_batch(size, 0, ranks)]
    for _ in range(WARMUP):
        step(*batch)
    return best(lambda: step(*batch).loss.item(), steps)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.foreseen", description=__doc__)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, world = SIZES[given.size], dist.get_world_size()
    machine = measured(tune())
    table = Table("stage", "planned, ms", "measured, ms", "planned / measured")
    ids = torch.zeros(size.micro_batch, size.context, dtype=torch.long, device="meta")
    for stage in STAGES:
        planned = zerofx.plan(
            lambda: GPT(size), (ids, ids), world=world, stage=stage, precision=given.precision, hardware=machine
        ).seconds
        seconds = step_seconds(size, stage, given.precision, given.steps)
        table.add_row(str(stage), f"{planned * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{planned / seconds:.2f}")
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
