"""`python -m zerofx inspect`: a recorded run as tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from zerofx.inspection import Inspection, read_inspection
from zerofx.reporting.compare import differences, named
from zerofx.reporting.console import console_for
from zerofx.reporting.recording import GraphRecord, RankRecord, RecordError, read_ranks
from zerofx.reporting.words import size

MOST = 20
"""Tensors that are listed at the peak."""


def show_run(folder: Path, rank: int, graph: int, wanted: dict[str, Any], console: Console | None = None) -> None:
    """Prints what is wanted of one rank's record: by default its graphs and their passes. Raises RecordError."""
    console = console or console_for(sys.stdout)
    ranks = read_ranks(folder)
    record = next((each for each in ranks if each.head.rank == rank), None)
    if record is None:
        known = named([each.head.rank for each in ranks])
        raise RecordError(f"{folder} has no record of rank {rank}, but of {known}: give one of these as --rank")
    if not record.graphs:
        console.print(f"rank {rank} has captured no graph")
    _print_differences(ranks, console)
    if not record.graphs:
        return
    inspection = read_inspection(record)
    if not 0 <= graph < len(record.graphs):
        raise RecordError(f"rank {rank} has the graphs 0 to {len(record.graphs) - 1}, not {graph}: give one as --graph")
    if wanted["step"] is not None:
        text = inspection.graphs[graph].step(_step(record.graphs[graph], wanted["step"])).text
        _print_code(text, "python", console)
    if wanted["diff"] is not None:
        before, after = (_step(record.graphs[graph], each) for each in wanted["diff"])
        _print_diff(inspection, before, after, graph, console)
    if wanted["collectives"]:
        _print_collectives(inspection, console)
    if wanted["memory"]:
        _print_memory(record.graphs[graph], console)
    if not any(wanted.values()):
        _print_steps(record, console)


def _step(graph: GraphRecord, written: str) -> int | str:
    """A step by its name, or by its number, which may be negative."""
    names = [step.name for step in graph.steps]
    if written in names:
        return written
    if written.lstrip("-").isdigit() and -len(names) <= int(written) < len(names):
        return int(written)
    raise RecordError(f"graph {graph.index} has no step {written!r}: give one of {', '.join(names)}, or its number")


def _print_differences(ranks: Sequence[RankRecord], console: Console) -> None:
    for found in differences(ranks):
        table = Table("ranks", "what they have", title=f"Ranks differ: {found.what}", title_style="bold red")
        for members, value in found.groups:
            table.add_row(named(members), Text(value))
        console.print(table)


def _print_steps(record: RankRecord, console: Console) -> None:
    for graph in record.graphs:
        table = Table("", "step", title=f"graph {graph.index} {graph.name}: {graph.kind}", title_justify="left")
        for head in ("nodes", "new lines", "gone lines", "seconds"):
            table.add_column(head, justify="right")
        before: list[str] = []
        for place, step in enumerate(graph.steps):
            lines = step.text.splitlines()
            new, gone = set(lines) - set(before), set(before) - set(lines)
            nodes = sum(line.startswith("    ") and " = " in line for line in lines)
            counts = (str(len(new)), str(len(gone))) if place else ("", "")
            table.add_row(str(place), step.name, f"{nodes:,}", *counts, f"{step.seconds:.2f}")
            before = lines
        console.print(table)


def _print_diff(inspection: Inspection, before: int | str, after: int | str, graph: int, console: Console) -> None:
    text = inspection.diff(before, after, graph)
    if text:
        _print_code(text, "diff", console)
    else:
        console.print("nothing has changed")


def _print_code(text: str, language: str, console: Console) -> None:
    """Whole lines, which a terminal wraps by itself."""
    shown = Syntax("", language, background_color="default").highlight(text)
    shown.rstrip()
    console.print(shown, soft_wrap=True)


def _print_collectives(inspection: Inspection, console: Console) -> None:
    found = inspection.collectives()
    table = Table("graph", "part", "collective", "role", "parameters", "dtype", "group")
    table.add_column("bytes sent", justify="right")
    for row in found.rows:
        params = ", ".join(row.params[:3]) + (f" and {len(row.params) - 3} more" if len(row.params) > 3 else "")
        cells = (str(row.graph), row.part, row.kind, row.role, params, row.dtype, row.group, f"{row.bytes_sent:,}")
        table.add_row(*cells)
    padding = found.bytes_sent - found.bound
    table.caption = f"{found.bytes_sent:,} bytes sent by each rank; bound {found.bound:,}, padding {padding:,}"
    console.print(table)


def _print_memory(graph: GraphRecord, console: Console) -> None:
    if not graph.measures.memory:
        console.print(Text(graph.measures.missing or "there are no numbers for this graph"))
        return
    for memory in graph.measures.memory:
        curve = memory.curve()
        peak = max(curve)
        at = curve.index(peak)
        title = f"{memory.graph}: at most {size(peak)}, at node {at} of {memory.length}"
        table = Table(title=title, title_justify="left")
        table.add_column("bytes", justify="right")
        for head in ("made by", "from node", "to node"):
            table.add_column(head)
        alive = [each for each in memory.storages if each[3] <= at <= each[4]]
        for name, _, count, first, last in sorted(alive, key=lambda each: -each[2])[:MOST]:
            table.add_row(size(count), name, str(first), str(last))
        others = f", and {len(alive) - MOST} smaller tensors" if len(alive) > MOST else ""
        table.caption = f"and {size(memory.held)} that the caller holds{others}"
        console.print(table)
