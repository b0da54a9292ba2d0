"""Runs ten ways of training one model on this machine's CPUs, and says how the one compares that the search calls best.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.best_of_ten --model gpt

Stages 0 to 3 with one micro-batch and with four, and stages 2 and 3 with two. The hardware is measured first, as in
`tests.bench.foreseen`. The exit status is 1 if the search's choice takes 5 % longer than the fastest or more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zerofx
from tests.bench.foreseen import MODELS, begun, best, planned_seconds, prepared
from zerofx.planning.hardware import Hardware
from zerofx.planning.search import Found

WAYS = (*((stage, count) for count in (1, 4) for stage in range(4)), (2, 2), (3, 2))
"""Stage, and micro-batches."""
ALLOWED = 1.05


def searched(found: Found, stage: int, count: int) -> float:
    """Seconds of a step that the search foresees."""
    layouts = found.forecast.layouts
    asked = (layouts.stage == stage) & (layouts.microbatches == count)
    asked &= (layouts.pp == 1) & (layouts.tp == 1) & (layouts.recompute == 0)
    return float(found.forecast.step[np.flatnonzero(asked)[0]])


def in_turns(runs: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The least seconds of each over rounds in which all run in turn, so that what disturbs them disturbs all."""
    rows = [[best(run, 1) for run in runs] for _ in range(rounds)]
    return [min(column) for column in zip(*rows, strict=True)]


def compare(name: str, precision: str, steps: int, machine: Hardware) -> float:
    """How long the search's choice takes, over the fastest; rank 0 prints all. All ranks call it."""
    trained, world = MODELS[name], dist.get_world_size()
    found = zerofx.plan(trained.model, trained.batch(), world=world, search=True, precision=precision, hardware=machine)
    told = [searched(found, *way) for way in WAYS]
    planned = [planned_seconds(trained, stage, precision, machine, count) for stage, count in WAYS]
    took = in_turns([prepared(trained, stage, precision, count) for stage, count in WAYS], steps)
    chosen, fastest = int(np.argmin(told)), int(np.argmin(took))
    table = Table("stage", "micro-batches", "search, ms", "plan, ms", "measured, ms", title=f"{name}, {precision}")
    for way, *seconds in sorted(zip(WAYS, told, planned, took, strict=True), key=lambda row: row[-1]):
        marks = "*" if way == WAYS[chosen] else ""
        table.add_row(f"{way[0]}{marks}", str(way[1]), *(f"{each * 1e3:.1f}" for each in seconds))
    if dist.get_rank() == 0:
        Console().print(table, f"* the search's choice takes {took[chosen] / took[fastest]:.3f} of the fastest")
    return took[chosen] / took[fastest]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.best_of_ten", description=__doc__)
    parser.add_argument("--model", default="gpt", choices=MODELS)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hardware", type=Path)
    given = parser.parse_args()
    machine = begun(given.hardware)
    ratio = compare(given.model, given.precision, given.steps, machine)
    dist.destroy_process_group()
    return int(ratio >= ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
