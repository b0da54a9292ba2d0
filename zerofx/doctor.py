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

import torch
import torch.distributed as dist

from zerofx.groups import TORCHRUN

PACKAGES = ("torch", "numpy", "networkx", "sympy", "safetensors", "transformers")
LIMIT = timedelta(seconds=60)
ELEMENTS = 2**20
ROUNDS = 20


def doctor() -> int:
    """Prints what it finds, and returns 0 where all is well. Under torchrun it tries the group, else two ranks here."""
    if all(name in os.environ for name in TORCHRUN):
        return try_group()
    for line in facts():
        print(line)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*command, "-m", "zerofx", "doctor"], capture_output=True, text=True)
    shown = ended.stdout.strip() if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1:]
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


def try_group() -> int:
    """All-reduces on every rank: the first one prints what came out, and how long it took."""
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    seconds, right = list[float](), True
    for _ in range(ROUNDS):
        values = torch.full((ELEMENTS,), float(rank + 1), device=device)
        start = time.perf_counter()
        dist.all_reduce(values)
        right = right and bool((values == world * (world + 1) / 2).all())  # which waits for the device
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        size, took = ELEMENTS * 4 / 2**20, 1e3 * statistics.median(seconds)
        came = "are right" if right else "ARE WRONG"
        print(f"all-reduce over {world} rank(s) on {dist.get_backend()}: sums {came}, {size:.0f} MiB in {took:.1f} ms")
    dist.destroy_process_group()
    return 0 if right else 1
