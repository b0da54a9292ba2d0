"""The report as a table of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from tests.bench.contestants import FLOOR
from tests.bench.report import Ratio, Report, Row, heading, mebibytes


def cell(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def show_ratio(ratio: Ratio) -> str:
    if ratio.least == ratio.most:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.least:.2f}-{ratio.most:.2f})"


def show_bytes(count: float) -> str:
    size = mebibytes(count)
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "contestant": lambda row: row.contestant,
    "wall x": lambda row: cell(row.wall, show_ratio),
    "CPU x": lambda row: cell(row.cpu, show_ratio),
    "floor+wire x": lambda row: cell(row.floor_and_wire, "{:.2f}".format),
    "steady MiB": lambda row: cell(row.heap_steady, show_bytes),
    "peak MiB": lambda row: cell(row.heap_peak, show_bytes),
    "RSS MiB": lambda row: cell(row.resident_peak, show_bytes),
    "sent MiB": lambda row: cell(row.bytes_sent, show_bytes) + "*" * row.bytes_sent_are_the_policy,
    "cold s": lambda row: cell(row.compile_cold_seconds, "{:.1f}".format),
    "warm s": lambda row: cell(row.compile_warm_seconds, "{:.1f}".format),
    "loss diff": lambda row: cell(row.loss_difference, "{:.1e}".format),
}


def contestants_table(settings: dict[str, Any], report: Report) -> Table:
    table = Table(title=heading(settings))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "contestant" else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*(show(row) for show in COLUMNS.values()))
    floor = f"x: over {FLOOR}, which did not run"
    if report.floor_seconds:
        floor = "x: over {}, whose step took {:.3g} s, {:.3g} s of CPU".format(FLOOR, *report.floor_seconds)
    table.caption = f"{floor}. *: the policy's closed form, not counted."
    return table


def wire_table(report: Report) -> Table:
    table = Table("wire alone", title="Collectives over all parameters, without compute, in floors")
    table.add_column("wall x", justify="right")
    table.add_column("CPU x", justify="right")
    for row in report.wire:
        table.add_row(row.what, f"{row.wall:.3f}", f"{row.cpu:.3f}")
    return table


def show(settings: dict[str, Any], report: Report, console: Console) -> None:
    parts: list[Any] = [contestants_table(settings, report)]
    parts += [wire_table(report)] if report.wire else []
    parts += [f"{row.contestant}: {row.problem}" for row in report.rows if row.problem]
    console.print(Group(*parts), soft_wrap=True)
