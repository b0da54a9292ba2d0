"""Measures the machine at hand as hardware to plan for: `python -m zerofx tune --out FILE`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from zerofx.cost import Link
from zerofx.planning.hardware import DTYPES, Hardware, text
from zerofx.planning.stored import UPDATE

ROWS, WIDTH = 512, 1024
"""Matrix products are of a matrix of so many rows and columns by one of four times as many columns."""
COPIED = 2**24  # elements of fp32
SMALL, CALLS = 16, 200
SUSTAINED = 0.84
"""The share of what a kernel reaches in a loop of its own that it reaches in training, on CPUs: fitted on six steps of
two models that `tests.bench.foreseen` measured. On GPUs nothing was measured.
"""


def measured(link: Link, name: str = "measured") -> Hardware:
    """What the ranks of the default group reach, all at work at once and with their threads as they are set.

    `link` is what `zerofx.tune.tune` found: seconds and bytes/s of whole buckets, of which a rank sends (N-1)/N in N-1
    steps. Each rate is that of the slowest rank; what a vendor states is not known, so `peak` is what is reached. Every
    rank of the group calls it.
    """
    ranks = dist.get_world_size()
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    rates, attention, convolution = (
        {short: reached(dtype, device) for short, dtype in DTYPES.items() if short in ("fp32", "bf16")}
        for reached in (_products, _attention, _convolution)
    )
    source = torch.ones(COPIED, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _slowest(lambda: target.copy_(source), device)
    small = torch.ones(SMALL, device=device)
    launch = _slowest(lambda: [small.add_(1) for _ in range(CALLS)], device) / CALLS
    way = Link(link.latency / max(1, ranks - 1), link.bandwidth * max(1, ranks - 1) / ranks)
    threads, share = torch.get_num_threads(), SUSTAINED if device.type == "cpu" else 1.0
    return Hardware(
        name=name,
        description=f"{ranks} ranks of {threads} threads on one machine of {os.cpu_count()} cores",
        device=device.type,
        memory_bytes=_memory(device, ranks),
        memory_bandwidth=bandwidth,
        memory_share=share,
        peak=rates,
        achievable=_times(share, rates),
        launch=launch,
        ranks_per_node=ranks,
        collective_latency=0.0,
        intra=way,
        inter=way,
        attention=_times(share, attention),
        convolution=_times(share, convolution),
        update_bandwidth=_update(device),
        origin={"all": "python -m zerofx tune --out FILE, all ranks at once; other nodes as if they were this one"},
    )


def write(hardware: Hardware, path: Path) -> None:
    """Writes what `zerofx.planning.hardware.load` reads; the first rank does, the others wait for nothing."""
    if dist.get_rank() == 0:
        path.write_text(text(hardware))


def _times(share: float, rates: dict[str, float]) -> dict[str, float]:
    return {name: share * rate for name, rate in rates.items()}


def _products(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the three products of a linear layer's forward and backward together."""
    x, grad = (torch.randn(ROWS, width, device=device).to(dtype) for width in (WIDTH, 4 * WIDTH))
    weight = torch.randn(4 * WIDTH, WIDTH, device=device).to(dtype)
    runs = (lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x)
    return 3 * 2 * x.numel() * 4 * WIDTH / sum(_slowest(run, device) for run in runs)


def _attention(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of causal attention, forward and backward, of which only what the mask leaves is counted."""
    q, k, v = (torch.randn(4, 8, ROWS, 64, device=device).to(dtype).requires_grad_() for _ in range(3))
    forward = 4 * q.numel() * ROWS / 2
    return _both_ways(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), 3.5 * forward, device)


def _convolution(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a 3 x 3 convolution, forward and backward."""
    x = torch.randn(16, 64, 28, 28, device=device).to(dtype).requires_grad_()
    weight = torch.randn(64, 64, 3, 3, device=device).to(dtype).requires_grad_()
    forward = 2 * x.numel() * weight.numel() / 64
    return _both_ways(lambda: F.conv2d(x, weight, padding=1), (x, weight), 3 * forward, device)


def _both_ways(
    run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], flops: float, device: torch.device
) -> float:
    grad = torch.ones_like(run())
    return flops / _slowest(lambda: torch.autograd.grad(run(), inputs, grad), device)


def _update(device: torch.device) -> float:
    """Bytes/s of a fused AdamW."""
    param = torch.nn.Parameter(torch.ones(COPIED // 4, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return UPDATE * param.nbytes / _slowest(optimizer.step, device)


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
