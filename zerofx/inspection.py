"""`zerofx.inspect(model)`: what the passes made of each captured graph, to print, compare, count and draw."""

from __future__ import annotations

import builtins
import difflib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import nn

from zerofx.draw import draw_svg
from zerofx.engine import Engine
from zerofx.manager import Step
from zerofx.planning.report import Plan
from zerofx.reporting.html import write_report
from zerofx.reporting.recorder import rank_record
from zerofx.reporting.recording import RankRecord, model_first, write_rank
from zerofx.textgraph import BYTES, SHARES, Line, ProgramText, read


@dataclass(frozen=True)
class Collective:
    """One collective of a graph. `bytes_sent` is what each rank sends, for a ring: x (N-1)/N."""

    graph: int
    part: str
    name: str
    kind: str
    role: str
    params: tuple[str, ...]
    dtype: str
    group: str
    bytes_sent: int


@dataclass(frozen=True)
class Collectives:
    """All collectives of the captured graphs, and the fewest bytes that the stage's policy allows for them."""

    rows: tuple[Collective, ...]
    bound: int

    @property
    def bytes_sent(self) -> int:
        return sum(row.bytes_sent for row in self.rows)

    def __str__(self) -> str:
        table = Table("graph", "part", "collective", "role", "parameters", "dtype", "group", "bytes sent")
        for row in self.rows:
            params = ", ".join(row.params)
            cells = (str(row.graph), row.part, row.kind, row.role, params, row.dtype, row.group, f"{row.bytes_sent:,}")
            table.add_row(*cells)
        padding = self.bytes_sent - self.bound
        beside = f"padding {padding:,}" if padding >= 0 else f"{-padding:,} below the bound"
        table.caption = f"{self.bytes_sent:,} bytes sent by each rank; bound {self.bound:,}, {beside}"
        console = Console(width=140, record=True, file=io.StringIO())
        console.print(table)
        return console.export_text()


@dataclass(frozen=True)
class Graph:
    """One captured graph and the recorded steps: the program as captured, and after each pass.

    `blocks` are those that share the graph with `per_block=True`: their parameters' names by those in the graph.
    """

    index: int
    kind: str
    steps: tuple[Step, ...]
    blocks: tuple[Mapping[str, str], ...] = ({},)

    @property
    def seconds(self) -> float:
        """Time that passes and checks took; 0 for what came from the compile cache is what it took when compiled."""
        return sum(step.seconds for step in self.steps)

    def step(self, which: int | str) -> Step:
        """A step by its place or by the name of its pass. Raises LookupError for others."""
        names = [step.name for step in self.steps]
        if which in names:
            return self.steps[names.index(which)]
        if isinstance(which, int) and -len(names) <= which < len(names):
            return self.steps[which]
        raise LookupError(
            f"graph {self.index} has no step {which!r}: give one of {', '.join(names)}, or a place from "
            f"{-len(names)} to {len(names) - 1}"
        )


class Inspection:
    """The recorded steps of a compiled model, graph by graph."""

    def __init__(self, graphs: Sequence[Graph], recorded: RankRecord | None = None) -> None:
        self.graphs, self.recorded = tuple(graphs), recorded

    def graph(self, place: int) -> Graph:
        """A graph by its place. Raises LookupError for others."""
        count = len(self.graphs)
        if not isinstance(place, int) or not -count <= place < count:
            raise LookupError(f"there is no graph {place!r}: the model has the graphs 0 to {count - 1}")
        return self.graphs[place]

    def print(self, step: int | str = -1, graph: int = 0) -> None:
        """Prints the program after a step: the last one by default, 0 as captured, or that of the pass of that name."""
        builtins.print(self.graph(graph).step(step).text)

    def diff(self, before: int | str, after: int | str, graph: int = 0) -> str:
        """The unified diff between the programs of two steps."""
        steps = [self.graph(graph).step(which) for which in (before, after)]
        old, new = (step.text.splitlines(keepends=True) for step in steps)
        return "".join(difflib.unified_diff(old, new, steps[0].name, steps[1].name))

    def collectives(self) -> Collectives:
        """Each collective of parameters and gradients with its role, dtype, group and bytes; and the bound of the sum.

        Those of the model's own, such as of sliced layers, are not among them.
        """
        rows: list[Collective] = []
        bound = 0
        for graph in self.graphs:
            program = read(graph.steps[-1].text)
            for names in graph.blocks:
                rows += program_collectives(program, graph.index, names)
            bound += _bound(graph) * len(graph.blocks)
        return Collectives(tuple(rows), bound)

    def draw(self, path: str | Path, step: int | str = -1, graph: int = 0) -> None:
        """Draws the program after a step as an SVG file; needs pydot and graphviz."""
        draw_svg(read(self.graph(graph).step(step).text), Path(path))

    def report(self, path: str | Path, plan: Plan | None = None) -> Path:
        """Writes one HTML file that shows all of it in a browser, without a network; returns its path.

        In a folder that is there the file is called report.html. With a `zerofx.Plan` of the same training, its figures
        stand beside those of the graphs. It shows this rank's programs; `zerofx.compile(..., record="folder")` keeps
        those of all ranks, to be compared.
        """
        return write_report(path, [self._recorded()], plan)

    def record(self, folder: str | Path) -> Path:
        """Writes what `zerofx.compile(..., record=folder)` would have written on this rank; returns the folder."""
        return write_rank(Path(folder), self._recorded())

    def _recorded(self) -> RankRecord:
        if self.recorded is None:
            raise ValueError("this inspection has no record: call zerofx.inspect(model)")
        return self.recorded


def read_inspection(recorded: RankRecord) -> Inspection:
    """What zerofx.inspect(model) would have returned on a rank when it recorded."""
    return Inspection([Graph(each.index, each.kind, each.steps, each.blocks) for each in recorded.graphs], recorded)


def inspect(model: nn.Module) -> Inspection:
    """What the passes made of the model's graphs so far; graphs are captured when the model is first called.

    Raises TypeError for a model that zerofx.compile was not called on, and ValueError for one that has made no graph.
    """
    engine = model.__dict__.get("_zerofx_engine") if isinstance(model, nn.Module) else None
    if not isinstance(engine, Engine):
        raise TypeError("zerofx.inspect needs a model that zerofx.compile was called on")
    if engine.config.backend == "eager":
        raise ValueError(
            "the eager backend makes no graph to inspect: compile with backend='interpreter' or 'inductor'"
        )
    if not engine.captures:
        raise ValueError("nothing has been captured yet: call the model once")
    captures = model_first(capture for capture in engine.captures if capture.steps)
    graphs = [Graph(index, each.kind, tuple(each.steps), each.blocks) for index, each in enumerate(captures)]
    return Inspection(graphs, rank_record(engine, model, captures))


def program_collectives(
    program: ProgramText, graph: int = 0, names: Mapping[str, str] | None = None
) -> list[Collective]:
    """The collectives of a program's parameters and gradients, which `names` calls otherwise."""
    return [
        _collective(graph, part.name, line, program, names or {})
        for part in program.graphs
        for line in part.sent
        if line.role
    ]


def _collective(graph: int, part: str, line: Line, program: ProgramText, names: Mapping[str, str]) -> Collective:
    group = line.args[-1].strip("'")
    world = program.axes[group]
    share = SHARES[line.collective](world)
    sent = sum(int(size * BYTES[line.dtype] * share * (world - 1)) for size in line.numels)
    params = tuple(names.get(param, param) for param in line.params)
    return Collective(graph, part, line.name, line.collective, line.role, params, line.dtype, group, sent)


def _bound(graph: Graph) -> int:
    """The fewest bytes that the stage's policy allows for a graph: each parameter gathered once wherever it is needed
    (forward, backward) and each gradient reduced once; a replicated one is all-reduced, which costs twice.
    """
    steps = {step.name: step for step in graph.steps}
    marked = read(
        next(steps[name] for name in ("cast-gradients", "partition", graph.steps[0].name) if name in steps).text
    )
    world = marked.axes["dp"]
    total = 0
    for part in marked.graphs:
        for role, replicated in (("unshard", 0), ("reduce_grad", 2)):
            found = [line for line in part.lines if line.target == f"zerofx.{role}.default"]
            markers = {line.params[0]: line for line in found if role == "reduce_grad" or line.args[2] != "-1"}
            for name, line in markers.items():
                param = marked.params[name]
                size = prod(param.size) * BYTES[line.dtype]
                total += size * (replicated if param.dim is None else 1) * (world - 1) // world
    return total
