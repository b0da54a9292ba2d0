"""Benchmark zerofx beside DDP, FSDP2 and DeepSpeed on CPUs, in one interleaved run.

make bench ARGS="--size small --rounds 2 --steps 4 --only floor,ddp,zerofx-3"
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests.bench import meter, plot, table
from tests.bench.contestants import PRECISIONS, REFERENCE, choose
from tests.bench.gpt import SIZES
from tests.bench.launch import ROOT, Plan, Run, run
from tests.bench.measure import WARMUP, WIRE
from tests.bench.report import report

CACHE = ROOT / ".cache"
WIDTH = 160  # of the table, also where the output is a file


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS, help="what is computed in")
    parser.add_argument("--rounds", type=int, default=2, help="the first compiles, the others find the compile cache")
    parser.add_argument("--steps", type=int, default=4, help=f"timed steps a round, after {WARMUP} that are not")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="contestants, by name or its beginning: floor,ddp,zerofx-3")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a contestant may take in a round")
    parser.add_argument("--out", type=Path, help="folder of the results; default: .cache/bench/SIZE_PRECISION")
    parser.add_argument("--report", action="store_true", help="only show what an earlier run measured")
    arguments = parser.parse_args()
    arguments.out = (arguments.out or CACHE / "bench" / f"{arguments.size}_{arguments.precision}").resolve()
    if min(arguments.rounds, arguments.steps, arguments.ranks) < 1:
        parser.error("--rounds, --steps and --ranks are at least 1")
    try:
        arguments.contestants = [WIRE, *choose(arguments.only)]
    except ValueError as error:
        parser.error(f"--only: {error}")
    return arguments


def save(path: Path, settings: dict[str, Any], runs: list[Run]) -> None:
    told = {
        "settings": settings,
        "report": report(settings, runs).as_json(),
        "runs": [each.as_json() for each in runs],
    }
    path.write_text(json.dumps(told, indent=1))


def load(path: Path) -> tuple[dict[str, Any], list[Run]]:
    told = json.loads(path.read_text())
    return told["settings"], [Run(**each) for each in told["runs"]]


def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Runs all contestants, round by round; what is measured is on disk after each."""
    out: Path = arguments.out
    for old in ("inductor", "logs"):
        shutil.rmtree(out / old, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    shim = meter.build(CACHE)
    plan = Plan(arguments.size, arguments.precision, arguments.steps, arguments.ranks, arguments.timeout, out, shim)
    asked = ("size", "precision", "rounds", "steps", "ranks", "contestants")
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in asked}
    settings |= {"warmup": WARMUP, "torch": torch.__version__, "cpus": os.cpu_count(), "machine": platform.platform()}
    order = [(number, name) for number in range(arguments.rounds) for name in arguments.contestants]
    order = [(number, name) for number, name in order if not number or name != REFERENCE]
    runs: list[Run] = []
    for place, (number, name) in enumerate(order, 1):
        console.print(f"[{place}/{len(order)}] round {number}: {name} ...", markup=False, end=" ")
        runs.append(run(plan, name, number))
        console.print(runs[-1].problem or f"{runs[-1].seconds:.0f} s", markup=False)
        save(out / "results.json", settings, runs)


def main() -> int:
    arguments, console = parse(), Console(highlight=False, width=max(WIDTH, Console().width))
    results = arguments.out / "results.json"
    if not arguments.report:
        measure(arguments, console)
    if not results.exists():
        console.print(f"There is no {results}: run without --report first.", soft_wrap=True)
        return 1
    settings, runs = load(results)
    told = report(settings, runs)
    table.show(settings, told, console)
    image = results.with_name("results.png")
    drawn = plot.draw(settings, told, image)
    console.print(f"Figures: {results}", soft_wrap=True)
    console.print(f"Plot: {image}" if drawn else "No plot: matplotlib is not installed.", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
