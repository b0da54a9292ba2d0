"""What collectives cost by the alpha-beta model, over rings and trees of nodes. Numbers may be numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from zerofx.planning.hardware import Hardware

TREE = 0.92
"""The share of a ring's bandwidth that NCCL's trees reach (its tuning model)."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
"""What collectives' names begin with."""


def ring_bytes(kind: str, nbytes: Any, ranks: Any) -> Any:
    """Bytes that each of N ranks sends for a collective on whole tensors of `nbytes` bytes.

    (N-1)/N of them in an all-gather or a reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; the "bus bandwidth" of nccl-tests).
    """
    sent = nbytes * (ranks - 1) / ranks
    return 2 * sent if kind == "all_reduce" else sent


def members(hardware: Hardware, ranks: Any, stride: Any = 1) -> tuple[Any, Any]:
    """How many of a group's ranks are in one node, and over how many nodes the group goes.

    `stride` is how far apart the group's ranks are: 1 for tensor parallelism, its size for data parallelism, and both
    multiplied for pipelines, as Megatron numbers ranks.
    """
    inside = np.clip(hardware.ranks_per_node // stride, 1, ranks)
    return inside, np.ceil(ranks / inside)


def bandwidth(hardware: Hardware, ranks: Any, stride: Any = 1) -> Any:
    """Bytes/s that each rank sends in a ring, all groups of the same kind at work at once.

    A ring that enters a node once may use the network cards of all its ranks there; groups share a node's cards, so
    each has those of its own ranks.
    """
    inside, nodes = members(hardware, ranks, stride)
    between = np.minimum(hardware.inter.bandwidth * inside, min(hardware.ring_bandwidth, hardware.intra.bandwidth))
    return np.where(nodes > 1, np.where(inside > 1, between, hardware.inter.bandwidth), hardware.intra.bandwidth)


def collective_seconds(hardware: Hardware, kind: str, nbytes: Any, ranks: Any, stride: Any = 1) -> Any:
    """Seconds of one collective on whole tensors of `nbytes` bytes, by the faster algorithm.

    A ring takes n-1 steps, of which k-1 cross nodes, and twice that for an all-reduce. A tree takes 2 log2 k steps
    between nodes and 2 (n/k - 1) inside them, at a lower bandwidth; it is there for all-reduces only.

    Source: NCCL's tuning model, github.com/NVIDIA/nccl src/graph/tuning.cc, in its "simple" protocol; Patarasuk and
    Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. An all-to-all sends what an
    all-gather sends of 1/n as many bytes, in n-1 messages; a broadcast goes through a pipelined ring.
    """
    if not kind.startswith(KINDS):
        raise ValueError(f"the name of a collective begins with {', '.join(KINDS)}, not {kind!r}")
    inside, nodes = members(hardware, ranks, stride)
    intra, inter, start = hardware.intra.latency, hardware.inter.latency, hardware.collective_latency
    rounds = 2 if kind == "all_reduce" else 1
    steps = rounds * ((ranks - nodes) * intra + (nodes - 1) * inter)
    rate = bandwidth(hardware, ranks, stride)
    sent = nbytes * 1.0 if kind == "broadcast" else ring_bytes(kind, nbytes, ranks)
    seconds = start + steps + sent / rate
    if kind == "all_reduce":
        tree = start + 2 * ((inside - 1) * intra + np.ceil(np.log2(np.maximum(nodes, 1))) * inter)
        seconds = np.where(nodes > 1, np.minimum(seconds, tree + sent / (rate * TREE)), seconds)
    return np.where(np.asarray(ranks) > 1, seconds, 0.0)


def send_seconds(hardware: Hardware, nbytes: Any, stride: Any) -> Any:
    """Seconds of one message to the rank `stride` further on, every rank of the node sending at once."""
    far = np.asarray(stride) >= hardware.ranks_per_node
    latency = np.where(far, hardware.inter.latency, hardware.intra.latency)
    return latency + nbytes / np.where(far, hardware.inter.bandwidth, hardware.intra.bandwidth)
