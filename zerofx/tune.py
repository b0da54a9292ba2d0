"""`python -m zerofx tune`: measures what a gathered bucket costs on the default process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zerofx.cost import Link
from zerofx.first_group import make_default_group
from zerofx.meet import meet
from zerofx.ops import c10d
from zerofx.transport import all_gather_p2p

SIZES = tuple(2**power for power in range(10, 27, 2))  # bytes of whole buckets


def tune(repeats: int = 20) -> Link:
    """Measures all-gathers of several sizes and fits the alpha-beta model to them; rank 0 prints a table.

    Every rank of the default group calls it; without a group, it makes one from torchrun's environment.
    """
    if not dist.is_initialized():
        make_default_group()
    first, group = dist.get_rank() == 0, dist.group.WORLD
    assert group is not None
    if "gloo" in dist.get_backend():
        meet(group)
    seconds = [_seconds(size, repeats) for size in track(SIZES, "measuring", disable=not first)]
    link = fit(SIZES, seconds)
    if first:
        Console().print(_table(seconds, link))
    return link


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The latency and bandwidth that fit best; least squares of relative errors, so that small sizes count as well."""
    scale = torch.tensor(seconds, dtype=torch.float64)
    rows = torch.stack([1 / scale, torch.tensor(sizes, dtype=torch.float64) / scale], 1)
    latency, per_byte = torch.linalg.lstsq(rows, torch.ones(len(sizes), 1, dtype=torch.float64)).solution.flatten()
    return Link(max(latency.item(), 1e-9), 1 / max(per_byte.item(), 1e-15))


def _seconds(size: int, repeats: int) -> float:
    """The median over repeats of the time that the slowest rank takes."""
    group, device = dist.group.WORLD, torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    assert group is not None
    world = dist.get_world_size()
    chunk = torch.zeros(max(1, size // 4 // world), device=device)
    whole = chunk.new_empty(chunk.numel() * world)
    times = torch.zeros(repeats + 2, device=device)
    for turn in range(len(times)):
        dist.barrier()
        start = time.perf_counter()
        if device.type == "cpu":
            c10d.wait_tensor(all_gather_p2p([chunk], world, group.group_name)[0])
        else:
            dist.all_gather_into_tensor(whole, chunk)
            torch.cuda.synchronize()
        times[turn] = time.perf_counter() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(statistics.median(times[2:].tolist()))


def _table(seconds: Sequence[float], link: Link) -> Table:
    table = Table("bytes of a bucket", "measured, ms", "latency + bytes / bandwidth, ms")
    for size, measured in zip(SIZES, seconds, strict=True):
        table.add_row(f"{size:,}", f"{measured * 1e3:.3f}", f"{link.seconds(size) * 1e3:.3f}")
    table.caption = (
        f"latency {link.latency * 1e6:.0f} us, bandwidth {link.bandwidth / 1e9:.2f} GB/s: "
        f"zerofx.compile(bucket_mb={link.bucket_bytes() / 2**20:g})"
    )
    return table
