"""Measures the machine at hand as hardware to plan for: `python -m zerofx tune --out FILE`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zerofx.cost import Link
from zerofx.planning.hardware import DTYPES, Hardware, text

ROWS, WIDTH = 512, 1024
"""Matrix products are of a matrix of so many rows and columns by one of four times as many columns."""
COPIED = 2**24  # elements of fp32
SMALL, CALLS = 16, 200


def measured(link: Link, name: str = "measured") -> Hardware:
    """What the ranks of the default group reach, all at work at once and with their threads as they are set.

    `link` is what `zerofx.tune.tune` found: seconds and bytes/s of whole buckets, of which a rank sends (N-1)/N in N-1
    steps. Each rate is that of the slowest rank; what a vendor states is not known, so `peak` is what is reached. Every
    rank of the group calls it.
    """
    ranks = dist.get_world_size()
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    rates = {short: _flops(dtype, device) for short, dtype in DTYPES.items() if short in ("fp32", "bf16")}
    source = torch.ones(COPIED, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _slowest(lambda: target.copy_(source), device)
    small = torch.ones(SMALL, device=device)
    launch = _slowest(lambda: [small.add_(1) for _ in range(CALLS)], device) / CALLS
    way = Link(link.latency / max(1, ranks - 1), link.bandwidth * max(1, ranks - 1) / ranks)
    threads = torch.get_num_threads()
    return Hardware(
        name=name,
        description=f"{ranks} ranks of {threads} threads on one machine of {os.cpu_count()} cores",
        device=device.type,
        memory_bytes=_memory(device, ranks),
        memory_bandwidth=bandwidth,
        memory_share=1.0,
        peak=rates,
        achievable=rates,
        launch=launch,
        ranks_per_node=ranks,
        collective_latency=0.0,
        intra=way,
        inter=way,
        origin={"all": "python -m zerofx tune --out FILE, all ranks at once; other nodes as if they were this one"},
    )


def write(hardware: Hardware, path: Path) -> None:
    """Writes what `zerofx.planning.hardware.load` reads; the first rank does, the others wait for nothing."""
    if dist.get_rank() == 0:
        path.write_text(text(hardware))


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    left = torch.randn(ROWS, WIDTH, device=device).to(dtype)
    right = torch.randn(WIDTH, 4 * WIDTH, device=device).to(dtype)
    return 2 * left.numel() * right.shape[1] / _slowest(lambda: left @ right, device)


def _slowest(run: Callable[[], object], device: torch.device, repeats: int = 9) -> float:
    """The median seconds of a call on the rank where it is largest."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _memory(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
