"""What the stages of a pipeline take, as a table."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from zerofx.config import ConfigError
from zerofx.kernels import nbytes
from zerofx.passes.split_stages import nbytes_of, stage_bytes
from zerofx.pipeline import Pipeline
from zerofx.schedule_check import Simulated
from zerofx.stage_line import Line
from zerofx.whole_graph import module_of

BALANCED, WIDTH = 1.05, 140


@dataclass(frozen=True)
class StageCosts:
    """One stage, by the cost model: `seconds` of forward and backward of a micro-batch on the model of a machine,
    `params` and `activations` in bytes, those of one micro-batch, `memory` what a rank holds of the stage, and `sent`
    the bytes that cross to the next stage for each micro-batch.
    """

    first: str
    last: str
    seconds: float
    params: int
    activations: int
    memory: int
    sent: int


@dataclass(frozen=True)
class PipelineReport:
    """Printed, a table. `limit` says which part of the model keeps the stages from balancing, if one does."""

    pipeline: Pipeline
    machine: str
    stages: tuple[StageCosts, ...]
    simulated: Simulated
    limit: str

    @property
    def imbalance(self) -> float:
        """The seconds of the slowest stage over those of stages that all take equally long."""
        seconds = [stage.seconds for stage in self.stages]
        return max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else 1.0

    def gantt(self) -> str:
        """The schedule as a chart in text, for stages that take equally long."""
        return self.simulated.gantt()

    def __str__(self) -> str:
        asked = self.pipeline
        table = Table(
            "stage", "rank", "from", "to", "time us", "parameters", "activations", "memory", "sent", box=SIMPLE
        )
        for place, each in enumerate(self.stages):
            sizes = map(_size, (each.params, each.activations, each.memory, each.sent))
            where = (str(place), str(asked.rank_of(place)), each.first or "-", each.last or "-")
            table.add_row(*map(escape, where), f"{each.seconds * 1e6:.3g}", *sizes)
        console = Console(width=WIDTH, record=True, file=io.StringIO())
        console.print(table)
        lines = [line.rstrip() for line in console.export_text().strip("\n").splitlines()]
        bubble = f"bubble {self.simulated.bubble:.1%}"
        if self.simulated.expected is not None:
            bubble += f" (closed form {self.simulated.expected:.1%})"
        lines.append(
            f"{asked.schedule}, {asked.microbatches} micro-batches over {asked.ranks} ranks: {bubble}; slowest stage "
            f"{self.imbalance:.3f} of an even one, by the cost model of {self.machine}"
        )
        return "\n".join([*lines, *([self.limit] if self.limit else [])])


def pipeline_report(model: nn.Module) -> PipelineReport:
    """How zerofx.compile has cut a model into the stages of its pipeline, the same on every rank.

    Raises ConfigError for a model that runs in no pipeline.
    """
    engine = model.__dict__.get("_zerofx_engine")
    if engine is None or engine.pipelined is None:
        raise ConfigError("zerofx.pipeline_report needs a model that zerofx.compile(model, pipeline=...) was called on")
    found: PipelineReport = engine.pipelined.plan.report
    return found


def report_of(line: Line, cuts: Sequence[int], pipeline: Pipeline, simulated: Simulated) -> PipelineReport:
    """The report on a line that is cut at these places."""
    ranges = list(pairwise([line.first - 1, *cuts, line.last]))
    stages = list[StageCosts]()
    for (start, end), in_flight in zip(ranges, simulated.in_flight, strict=True):
        own = [node for node in line.nodes[start + 1 : end + 1] if line.is_own(node)]
        params = sum(map(nbytes_of(line), line.inputs_of(start, end)))
        activations = line.activations[end + 1] - line.activations[start + 1]
        memory = stage_bytes(line, params, start, end, in_flight)
        sent = sum(nbytes(line.facts[node].value) for node in line.crossing(end)) if end < line.last else 0
        names = [module_of(node) for node in own] or [""]
        stages.append(StageCosts(names[0], names[-1], line.compute(start, end), params, activations, memory, sent))
    made = PipelineReport(pipeline, line.machine.name, tuple(stages), simulated, "")
    if made.imbalance <= BALANCED:
        return made
    return PipelineReport(pipeline, line.machine.name, tuple(stages), simulated, _limit(line, ranges, stages))


def _limit(line: Line, ranges: Sequence[tuple[int, int]], stages: Sequence[StageCosts]) -> str:
    """The part of the slowest stage that takes longest of those that cannot be cut."""
    slowest = max(range(len(stages)), key=lambda place: stages[place].seconds)
    start, end = ranges[slowest]
    places = [start, *(p for p in range(start + 1, end) if p >= line.first and line.legal[p]), end]
    left, right = max(pairwise(places), key=lambda pair: line.compute(*pair))
    node = max(line.nodes[left + 1 : right + 1], key=lambda n: line.facts[n].seconds if line.is_own(n) else -1.0)
    even = sum(stage.seconds for stage in stages) / len(stages)
    if line.compute(left, right) < stages[slowest].seconds - even:
        return f"stage {slowest} is the slowest: where it could be cut, sending would take more time than it saves"
    return (
        f"stage {slowest} is limited by {module_of(node) or 'the model itself'} ({node.name}), which cannot be cut and "
        f"takes {line.compute(left, right) / even:.2f} of an even stage"
    )


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1024  # type: ignore[assignment]
    raise AssertionError
