"""What one rank of one contestant does: sets it up, trains a few steps, hands in the figures. Started by torchrun."""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench import wire
from tests.bench.contestants import BY_NAME, PRECISIONS, Contestant
from tests.bench.gpt import GPT, SIZES, Size, global_batch
from tests.bench.meter import HeapMeter, reset_resident_peak, resident

WARMUP = 2  # steps that compile, make the optimizer's states and DDP's final buckets
WIRE = "wire"


def train(contestant: Contestant, size: Size, steps: int, ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """The figures of this rank: times and heap for every step, peaks over the steps after the warm-up."""
    rank, heap = dist.get_rank(), HeapMeter()
    mine = slice(None) if contestant.whole_batch else slice(rank * size.micro_batch, (rank + 1) * size.micro_batch)
    before, resident_before = heap.read(), resident()[0]
    start = time.perf_counter()
    torch.manual_seed(0)
    training = contestant.setup(GPT(size), dtype)
    setup_seconds = time.perf_counter() - start
    wall, cpu, losses, steady = list[float](), list[float](), list[float](), list[tuple[int, int]]()
    for number in range(WARMUP + steps):
        ids, targets = (whole[mine] for whole in global_batch(size, number, ranks))
        if number == WARMUP:
            heap.reset_peak()
            exact_resident = reset_resident_peak()
        dist.barrier()
        cpu_start, start = time.process_time(), time.perf_counter()
        loss = training.step(ids, targets)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        now = heap.read()
        steady.append((now.large_live - before.large_live, now.live - before.live))
        losses.append(loss.item())
    after, resident_peak = heap.read(), resident()[1]
    return {
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "losses": losses,
        "setup_seconds": setup_seconds,
        "heap_steady_bytes": statistics.median(large for large, _ in steady[WARMUP:]),
        "heap_peak_bytes": after.large_peak - before.large_live,
        "heap_all_blocks_steady_bytes": statistics.median(whole for _, whole in steady[WARMUP:]),
        "heap_all_blocks_peak_bytes": after.peak - before.live,
        "resident_peak_bytes": resident_peak,
        "resident_before_bytes": resident_before,
        "resident_peak_is_of_timed_steps": exact_resident,
        "bytes_sent": training.bytes_sent() if training.bytes_sent else None,
    }


def hand_in(path: Path, measure: Callable[[], dict[str, Any]]) -> None:
    mine = measure()
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(everyone))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestant", required=True, choices=(WIRE, *BY_NAME))
    parser.add_argument("--size", required=True, choices=SIZES)
    parser.add_argument("--precision", required=True, choices=PRECISIONS)
    parser.add_argument("--steps", type=int, required=True, help="timed steps")
    parser.add_argument("--ranks", type=int, required=True, help="micro-batches of the global batch")
    parser.add_argument("--timeout", type=float, required=True, help="seconds after which the rank shows where it is")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.timeout, exit=True)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))
    size, dtype = SIZES[arguments.size], PRECISIONS[arguments.precision]

    def measure() -> dict[str, Any]:
        if arguments.contestant == WIRE:
            return wire.measure(size, arguments.steps, dtype)
        return train(BY_NAME[arguments.contestant], size, arguments.steps, arguments.ranks, dtype)

    hand_in(arguments.json, measure)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
