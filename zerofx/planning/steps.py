"""One step of a rank without a pipeline: its micro-batches, reductions beside them and the update, on a machine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from zerofx.planning import rates
from zerofx.planning.hardware import Hardware
from zerofx.planning.replay import Streams
from zerofx.planning.report import Memory, Moment, StagePlan, Traffic
from zerofx.planning.stored import UPDATE, Stored
from zerofx.planning.tape import ACTIVATIONS, BUCKETS, GRADIENTS, WORKSPACE, Half, Tape

POINTS = 400
"""The most moments that are kept of one half's memory; that of its peak is among them."""
ADDED = 3
"""Passes over gradients that are added to those that wait: two reads and a write."""
SIMULATED = 3
"""Micro-batches that are run on the streams; the time of more is that of the last one."""


@dataclass
class Step:
    """Runs the parts of a step in order, and keeps what a rank holds when.

    `gradients` are the bytes of those that wait, `kept` of parameters that stay gathered, and `waiting` of the other
    micro-batches.
    """

    hardware: Hardware
    streams: Streams
    stored: Stored
    buffers: int
    bucket: int
    curve: list[Moment] = field(default_factory=list)
    gradients: int = 0
    kept: int = 0
    waiting: int = 0

    def gather(self) -> None:
        """Gathers all parameters, to be kept for the step."""
        self._move("all_gather", self.stored.gathered)
        self.kept = self.stored.gathered
        self._note("gather", self._memory())

    def micro_batches(self, tape: Tape, count: int, grown: int) -> None:
        """Runs micro-batches; each of them leaves gradients of `grown` bytes, which are added to those that wait."""
        for place in range(min(count, SIMULATED)):
            start = self.streams.now, self.streams.compute, self.streams.communication, self.streams.exposed
            before = self.streams.sent.copy(), self.streams.collectives.copy()
            self._half(tape.forward, f"forward {place}")
            self._half(tape.backward, f"backward {place}")
            if place:
                self.streams.compute_for(float(rates.memory_seconds(self.hardware, ADDED * grown)))
            self.gradients = grown
        left = count - SIMULATED
        if left > 0:
            streams = self.streams
            for name, then in zip(("now", "compute", "communication", "exposed"), start, strict=True):
                setattr(streams, name, getattr(streams, name) + left * (getattr(streams, name) - then))
            for counter, counted in zip((streams.sent, streams.collectives), before, strict=True):
                for key in counter:
                    counter[key] += left * (counter[key] - counted[key])
        self.streams.wait(self.streams.network)

    def reduce(self, sharded: bool) -> None:
        """Reduces the gradients that have waited, whole ones into parts if `sharded`."""
        self._note("reduce", self._memory(buckets=min(self.bucket, self.gradients)))
        self._move("reduce_scatter" if sharded else "all_reduce", self.gradients)
        self.gradients = self.stored.trained

    def update(self) -> None:
        """AdamW's fused kernels, which read parameters, gradients and moments once; and the norm of the gradients."""
        self._note("update", self._memory())
        nbytes = (UPDATE + 1) * self.stored.trained
        self.streams.compute_for(float(rates.update_seconds(self.hardware, nbytes)))
        self._note("update", self._memory())
        self.gradients = 0
        self._note("end", self._memory())

    @property
    def peak(self) -> Memory:
        return max((moment.memory for moment in self.curve), key=lambda memory: memory.total)

    def hold(self, part: str, gradients: int, activations: int) -> None:
        """Notes that a part which has run held that much at most."""
        self._note(part, self._memory(gradients, activations))

    def _move(self, kind: str, nbytes: int) -> None:
        """Collectives of a bucket each, one after another."""
        while nbytes > 0:
            self.streams.send("dp", kind, float(min(nbytes, self.bucket)))
            nbytes -= self.bucket
        self.streams.wait(self.streams.network)

    def _half(self, half: Half, part: str) -> None:
        ends = self.streams.run(half)
        curve = half.curve()
        totals = curve.sum(axis=1)
        step = max(1, len(totals) // POINTS)
        for place in sorted({int(totals.argmax()), *range(0, len(totals), step), len(totals) - 1}):
            row = np.rint(curve[place]).astype(int)
            memory = self._memory(int(row[GRADIENTS]), int(row[ACTIVATIONS]), int(row[BUCKETS]), int(row[WORKSPACE]))
            self.curve.append(Moment(float(ends[place]), part, memory))

    def _note(self, part: str, memory: Memory) -> None:
        self.curve.append(Moment(self.streams.now, part, memory))

    def _memory(self, gradients: int = 0, activations: int = 0, buckets: int = 0, workspace: int = 0) -> Memory:
        return Memory(
            parameters=self.stored.params + self.buffers,
            gradients=self.gradients + gradients,
            states=self.stored.states,
            activations=self.waiting + activations,
            buckets=self.kept + buckets,
            workspace=workspace,
        )


def stage_plan(stage: int, blocks: int, step: Step, idle: float = 0.0) -> StagePlan:
    """What the ranks of a stage take."""
    streams = step.streams
    traffic = tuple(
        Traffic(axis, kind, streams.collectives[axis, kind], nbytes)
        for (axis, kind), nbytes in sorted(streams.sent.items())
    )
    times = (streams.compute, streams.communication, streams.exposed, idle)
    return StagePlan(stage, blocks, step.peak, tuple(step.curve), traffic, *times)
