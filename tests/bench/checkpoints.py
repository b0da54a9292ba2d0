"""Times saving and loading a model of 1 GB over two ranks against torch.save, and what a save in the background costs.

.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.checkpoints [--folder DIR]

Each number is the median of the rounds, in which the ways take turns; ratios of one run compare, seconds do not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.training import full

LAYERS, WIDTH, ROWS = 16, 4096, 64  # 16 weights of 64 MiB: 1 GiB
STEPS = 4


class Times:
    """Seconds by what they were spent on, from and to a moment at which all ranks are together."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, list[float]](list)

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        dist.barrier()
        start = time.perf_counter()
        yield
        dist.barrier()
        self.seconds[what].append(time.perf_counter() - start)

    def median(self, what: str) -> float:
        return statistics.median(self.seconds[what])


def torch_save(model: nn.Module, path: Path) -> None:
    """What people do without a checkpoint in parts: gather all, write on one rank, and wait for the disk."""
    state = {name: full(value) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        with path.open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())


def steps(step: Callable[..., object], x: torch.Tensor) -> None:
    for _ in range(STEPS):
        step(x)


def measure(folder: Path, rounds: int) -> Times:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = zerofx.compile(nn.Sequential(*layers), backend="interpreter")
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    step = zerofx.train_step(model, lambda model, x: model(x).square().mean(), optimizer)
    x = torch.randn(ROWS, WIDTH)
    steps(step, x)
    times = Times()
    for number in range(rounds):
        with times.measure("torch.save"):
            torch_save(model, folder / "whole.pt")
        with times.measure("zerofx.save"):
            zerofx.save(folder / "a", model, overwrite=True)
        with times.measure("torch.load"):
            model.load_state_dict(torch.load(folder / "whole.pt", weights_only=True))
        with times.measure("zerofx.load"):
            zerofx.load(folder / "a", model)
        with times.measure("steps"):
            steps(step, x)
        with times.measure("call of an asynchronous save"):
            saving = zerofx.save(folder / f"b-{number}", model, asynchronous=True)
        with times.measure("steps during an asynchronous save"):
            steps(step, x)
        assert saving is not None
        saving.wait()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f"b-{number}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's folder for temporary files")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    place = [tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(place)
    times = measure(Path(place[0]), arguments.rounds)
    if dist.get_rank() == 0:
        for what in times.seconds:
            print(f"{what:36} {times.median(what):8.2f} s")
        for mine, other in (("zerofx.save", "torch.save"), ("zerofx.load", "torch.load")):
            print(f"{mine} / {other}: {times.median(mine) / times.median(other):.2f}")
        stall = times.median("call of an asynchronous save") / (times.median("steps") / STEPS)
        print(f"an asynchronous save holds training up for {stall:.2f} steps")
    dist.barrier()
    shutil.rmtree(place[0], ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
