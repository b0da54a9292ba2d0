"""Foresees on a machine when each kernel and collective of a program runs, and where computation waits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch.fx import Node

from zerofx.collectives import WAIT
from zerofx.draw_timeline import draw_timeline
from zerofx.kernels import Kernel, nbytes, owner, steps
from zerofx.naming import WAITING, kind_of, label
from zerofx.planning.hardware import Hardware
from zerofx.planning.networks import ring_bytes
from zerofx.program import Level, Program, group

COMPUTE = "compute"


@dataclass(frozen=True)
class Span:
    """What a stream does from `start` to `end`, in seconds.

    `kind` is `kernel`, `collective` or `wait`; streams are `compute` and the groups of collectives. `nbytes` are those
    that a kernel moves to and from memory, or that a rank sends.
    """

    name: str
    kind: str
    stream: str
    part: str
    start: float
    end: float
    flops: float = 0
    nbytes: float = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, forward and backward, without the optimizer's. Sums are in seconds and FLOP."""

    spans: tuple[Span, ...]

    def _sum(self, kind: str) -> float:
        return sum(span.seconds for span in self.spans if span.kind == kind)

    @property
    def step(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def compute(self) -> float:
        return self._sum("kernel")

    @property
    def communication(self) -> float:
        return self._sum("collective")

    @property
    def exposed(self) -> float:
        """Time in which the compute stream stands still until a collective ends."""
        return self._sum("wait")

    @property
    def exposed_share(self) -> float:
        return self.exposed / self.step if self.step else 0.0

    @property
    def flops(self) -> float:
        return sum(span.flops for span in self.spans)

    def chrome_trace(self) -> str:
        """JSON for https://ui.perfetto.dev or chrome://tracing: one process a step, one thread a stream."""
        streams = list(dict.fromkeys([COMPUTE, *(span.stream for span in self.spans)]))
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": stream}}
            for tid, stream in enumerate(streams)
        ]
        for span in self.spans:
            args = {"part": span.part, "flop": span.flops, "bytes": span.nbytes}
            place = {"ph": "X", "pid": 0, "tid": streams.index(span.stream), "args": args}
            when = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}  # in microseconds
            events.append({"name": span.name, "cat": span.kind, **when, **place})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def draw(self, path: str | Path) -> None:
        """Draws the streams as an SVG file."""
        draw_timeline(self, Path(path))


def timeline(program: Program, machine: Hardware) -> Timeline:
    """One step of a program behind its physical passes: the forward and then the backward, or the inference.

    Streams are those of PyTorch with NCCL: kernels run one after another on one stream, collectives of a group in the
    order of issue on a stream of the group's own. A collective starts when its stream is free and all kernels that were
    issued before it have run, since ProcessGroupNCCL makes its stream wait for the current one; `wait_tensor` holds up
    the kernels behind it. The host issues early enough not to matter, the optimizer is left out, and kernels and
    collectives that run at the same time do not slow each other down; on a CPU collectives take the cores of kernels,
    which wait for each of them.

    Raises ValueError for a program whose parameters are not gathered yet.
    """
    if program.level is not Level.PHYSICAL or any(
        str(node.target).startswith(("zerofx.unshard", "zerofx.reduce_grad."))
        for graph in program.graphs.values()
        for node in graph.nodes
    ):
        raise ValueError("a timeline needs a program behind its physical passes: run them first")
    streams = _Streams(program, machine)
    for part, graph in program.graphs.items():
        for step in steps(graph):
            streams.issue(part, step)
    return Timeline(tuple(streams.spans))


class _Streams:
    """When each stream is free, and when each collective ends."""

    def __init__(self, program: Program, machine: Hardware) -> None:
        self.program, self.machine = program, machine
        self.free = {COMPUTE: 0.0}
        self.ends: dict[Node, float] = {}
        self.spans: list[Span] = []

    def issue(self, part: str, step: Kernel | Node) -> None:
        if isinstance(step, Kernel):
            seconds = self.machine.kernel_seconds(step.flops, step.nbytes, step.dtype, step.op)
            self._run(Span(step.name, "kernel", COMPUTE, part, 0, seconds, step.flops, step.nbytes))
        elif step.target is WAIT:
            self._wait(part, step, owner(cast(Node, step.args[0])))
        else:
            self._send(part, step)

    def _run(self, span: Span, ready: float = 0.0) -> float:
        """Puts a span that begins at 0 behind what its stream does before; returns when it ends."""
        start = max(self.free.get(span.stream, 0.0), ready)
        end = self.free[span.stream] = start + span.end
        self.spans.append(replace(span, start=start, end=end))
        return end

    def _send(self, part: str, node: Node) -> None:
        kind = kind_of(node)
        gathered = [node] if kind.startswith("all_gather") else node.all_input_nodes
        whole = sum(nbytes(each.meta["val"]) for each in gathered)
        axis = self.program.mesh.axis_of_group(group(node))
        seconds = self.machine.collective_seconds(kind, whole, axis.size)
        sent = ring_bytes(kind, whole, axis.size)
        span = Span(label(node, kind), "collective", axis.group, part, 0, seconds, 0, sent)
        self.ends[node] = self._run(span, ready=self.free[COMPUTE])
        if self.machine.device == "cpu":
            self._wait(part, node, node)

    def _wait(self, part: str, node: Node, sent: Node) -> None:
        missing = self.ends.get(sent, 0.0) - self.free[COMPUTE]
        if missing > 0:
            self._run(Span(WAITING + label(node, kind_of(sent)), "wait", COMPUTE, part, 0, missing))
