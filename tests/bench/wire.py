"""The wire alone: one step's worth of collectives, gloo's own and of point-to-point messages, without any compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.contestants import BUCKET_MB, FLOAT, MIB
from tests.bench.gpt import Size, elements

Collective = Callable[[torch.Tensor, torch.Tensor], None]


def all_gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    dist.all_gather_into_tensor(whole, part)


def reduce_scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(part, whole)


def all_reduce(whole: torch.Tensor, part: torch.Tensor) -> None:
    dist.all_reduce(whole)


def all_gather_p2p(whole: torch.Tensor, part: torch.Tensor) -> None:
    """Every rank sends its part to every other, received in place."""
    rank, rows = dist.get_rank(), whole.view(dist.get_world_size(), -1)
    rows[rank] = part
    exchange(dict.fromkeys(others(), part), {peer: rows[peer] for peer in others()})


def reduce_scatter_p2p(whole: torch.Tensor, part: torch.Tensor) -> None:
    """Every rank sends every other its row, and adds up the rows it receives."""
    rank, rows = dist.get_rank(), whole.view(dist.get_world_size(), -1)
    received = {peer: torch.empty_like(part) for peer in others()}
    exchange({peer: rows[peer] for peer in others()}, received)
    part.copy_(rows[rank])
    for row in received.values():
        part.add_(row)


def others() -> list[int]:
    return [peer for peer in range(dist.get_world_size()) if peer != dist.get_rank()]


def exchange(sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
    messages = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sent.items()]
    messages += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in received.items()]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
GATHER_P2P, SCATTER_P2P = "all-gather of isend/irecv", "reduce-scatter of isend/irecv"
GATHERED = {GATHER, GATHER_P2P}
COLLECTIVES: dict[str, Collective] = {
    GATHER: all_gather,
    SCATTER: reduce_scatter,
    REDUCE: all_reduce,
    GATHER_P2P: all_gather_p2p,
    SCATTER_P2P: reduce_scatter_p2p,
}


def measure(size: Size, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """Wall and CPU seconds of this rank for each collective over all the model's parameters, bucket by bucket.

    Gathers are of parameters in the dtype to compute in, reductions of gradients in fp32.
    """
    ranks = dist.get_world_size()
    bucket = BUCKET_MB * MIB // FLOAT // ranks
    length = -(-elements(size) // ranks)

    def data(kind: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        wholes, parts = (torch.ones(count, dtype=kind) for count in (length * ranks, length))
        return wholes.split(bucket * ranks), parts.split(bucket)

    given = {name: data(dtype if name in GATHERED else torch.float32) for name in COLLECTIVES}
    figures: dict[str, dict[str, list[float]]] = {name: {"wall_seconds": [], "cpu_seconds": []} for name in COLLECTIVES}
    for number in range(1 + steps):  # the first connects
        for name, collective in COLLECTIVES.items():
            dist.barrier()
            cpu_start, start = time.process_time(), time.perf_counter()
            for whole, part in zip(*given[name], strict=True):
                collective(whole, part)
            if number:
                figures[name]["wall_seconds"].append(time.perf_counter() - start)
                figures[name]["cpu_seconds"].append(time.process_time() - cpu_start)
    return figures
