"""Runs tapes on the streams of a machine, and says when each row ends: seconds of a step, exposed time, the bubble."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from zerofx.planning.hardware import DTYPES, Hardware
from zerofx.planning.networks import KINDS, ring_bytes
from zerofx.planning.tape import BYTES, FLOPS, NODES, WAITED, Half, Numbers

BY_NAME = {str(dtype): dtype for dtype in DTYPES.values()}


@dataclass
class Streams:
    """Kernels run one after another, and collectives beside them in the order of issue, behind the kernels before them.

    On a CPU both take the same cores, so that a collective runs as it is issued. `ranks` are those of the data-parallel
    axis, `stride` how far apart they are.
    """

    hardware: Hardware
    ranks: int
    stride: int = 1
    now: float = 0.0
    network: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)

    def run(self, half: Half) -> Numbers:
        """Runs one half; returns the seconds at which each of its nodes has run."""
        ends: list[float] = []
        issued: list[float] = []
        for key, row in zip(half.time.keys, half.time.rows, strict=True):
            if key[0] == "kernel":
                self.kernel(float(row[FLOPS]), float(row[BYTES]), key[2], key[1])
            elif key[0] == "send":
                issued.append(self.send(key[3], key[2], float(row[BYTES])))
            elif issued:
                self.wait(issued[max(0, len(issued) - max(1, round(row[WAITED])))])
            ends += [self.now] * round(row[NODES])
        missing = len(half.memory.rows) - len(ends)
        return np.array(ends[: len(half.memory.rows)] + [self.now] * missing)

    def kernel(self, flops: float, nbytes: float, dtype: str, op: str) -> None:
        self.compute_for(_kernel_seconds(self.hardware, flops, nbytes, dtype, op))

    def compute_for(self, seconds: float) -> None:
        """Runs kernels that take so long."""
        self.now += seconds
        self.compute += seconds

    def send(self, axis: str, kind: str, nbytes: float) -> float:
        """Issues a collective on whole tensors of that many bytes; returns when it ends."""
        if not nbytes or self.ranks == 1:
            return self.now
        kind = next(known for known in KINDS if kind.startswith(known))
        seconds = _send_seconds(self.hardware, kind, nbytes, self.ranks, self.stride)
        self.sent[axis, kind] += round(ring_bytes(kind, nbytes, self.ranks))
        self.collectives[axis, kind] += 1
        self.communication += seconds
        self.network = max(self.network, self.now) + seconds
        if self.hardware.device == "cpu":
            self.wait(self.network)
        return self.network

    def wait(self, end: float) -> None:
        self.exposed += max(0.0, end - self.now)
        self.now = max(self.now, end)


@cache
def _kernel_seconds(hardware: Hardware, flops: float, nbytes: float, dtype: str, op: str) -> float:
    return hardware.kernel_seconds(flops, nbytes, BY_NAME.get(dtype, torch.float32), op)


@cache
def _send_seconds(hardware: Hardware, kind: str, nbytes: float, ranks: int, stride: int) -> float:
    return hardware.collective_seconds(kind, nbytes, ranks, stride)
