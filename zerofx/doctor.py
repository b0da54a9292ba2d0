"""`python -m zerofx doctor`: versions, devices and backends, and whether ranks reach each other."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerofx.first_group import make_default_group
from zerofx.parallel import TORCHRUN

PACKAGES = ("torch", "numpy", "networkx", "sympy", "safetensors", "transformers")
LIMIT = timedelta(seconds=60)
SECONDS = 10.0
ELEMENTS = (2**10, 2**20, 2**24)


def doctor(seconds: float = SECONDS) -> int:
    """Prints what it finds, and returns 0 where all is well. Under torchrun it tries the group, else two ranks here."""
    if all(name in os.environ for name in TORCHRUN):
        return try_group(seconds)
    for line in facts():
        print(line)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, "-m", "zerofx", "doctor", "--seconds", str(seconds)], capture_output=True, text=True
    )
    errors = [line for line in ended.stderr.splitlines() if "Error" in line]
    shown = ended.stdout.strip() or "\n".join(errors[:1])
    print(shown or "the all-reduce of two local ranks failed without a word")
    return ended.returncode


def facts() -> list[str]:
    """Versions and what this machine has, a line for each."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    lines.append(f"C++ compiler for Inductor: {found[0] if found else 'none, use backend=interpreter'}")
    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    lines.append(f"backends: {', '.join(backends) or 'none'}")
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [*lines, f"GPUs: {', '.join(cards) or 'none'}; {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"]


def try_group(seconds: float) -> int:
    """All-reduces on every rank for a while: the first one prints what came out, and how long each size took."""
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    make_default_group("nccl" if cuda else "gloo", timeout=LIMIT)
    taken, right = all_reduces(seconds, device)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, platform.node())
    if dist.get_rank() == 0:
        for host in dict.fromkeys(hosts):
            print(f"ranks on {host}: {', '.join(str(rank) for rank, each in enumerate(hosts) if each == host)}")
        came = "are right" if right else "ARE WRONG"
        count = sum(map(len, taken.values()))
        print(f"all-reduce over {len(hosts)} rank(s) on {dist.get_backend()}: {count} sums in {seconds:g} s {came}")
        for elements, times in taken.items():
            middle, worst = (1e3 * found for found in (statistics.median(times), max(times)))
            print(f"  {4 * elements / 2**20:g} MiB in {middle:.2f} ms, at most {worst:.2f} ms")
    dist.destroy_process_group()
    return 0 if right else 1


def all_reduces(seconds: float, device: torch.device) -> tuple[dict[int, list[float]], bool]:
    """The seconds that each all-reduce took, by its elements, and whether all sums are right on all ranks."""
    rank, world, start = dist.get_rank(), dist.get_world_size(), time.perf_counter()
    taken: dict[int, list[float]] = {elements: [] for elements in ELEMENTS}
    right, going = True, torch.ones(2, device=device)
    while going[0] > 0:
        for elements, times in taken.items():
            values = torch.full((elements,), float(rank + 1), device=device)
            began = time.perf_counter()
            dist.all_reduce(values)
            right = right and bool((values == world * (world + 1) / 2).all())  # which waits for the device
            times.append(time.perf_counter() - began)
        on = float(time.perf_counter() - start < seconds)
        going = torch.tensor([on, float(right)], device=device)
        dist.all_reduce(going, dist.ReduceOp.MIN)
    return taken, bool(going[1] > 0)
