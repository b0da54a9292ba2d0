"""A plan as tables, and its memory over time as a PNG file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zerofx.planning.report import CATEGORIES, Plan, StagePlan, size
from zerofx.planning.search import Found

SHOWN = 8
"""Stages of a pipeline that a table has: the first and the last ones, and the one that holds most."""


def tables(plan: Plan) -> RenderableType:
    """What a plan says, for a terminal."""
    good = Text(plan.verdict, style="green" if plan.fits else "red")
    return Group(_summary(plan), _memory(plan), _traffic(plan), good)


def front(found: Found) -> RenderableType:
    """The layouts that no other beats in memory and time, fastest first."""
    rows = found.rows()
    if not rows:
        try:
            return Text(str(found.best))
        except ValueError as error:
            return Text(str(error), style="red")
    table = Table(title=f"{len(found.forecast.layouts):,} layouts: those that no other beats in memory and time")
    for head in rows[0]:
        table.add_column(head.replace("_", " "), justify="right")
    for row in rows:
        told = row | {"seconds": _seconds(row["seconds"]), "peak_bytes": size(row["peak_bytes"])}
        told |= {"mfu": f"{row['mfu']:.1%}", "tokens_per_second": f"{row['tokens_per_second']:,.0f}"}
        table.add_row(*map(str, told.values()))
    return table


def _summary(plan: Plan) -> Table:
    ranks = " x ".join(f"{count} {axis}" for axis, count in plan.ranks)
    table = Table(title=f"{plan.elements / 1e9:.2f}e9 parameters on {ranks} ranks, {plan.hardware}")
    for head in ("step", "kernels", "communication", "exposed", "bubble", "tokens/s", "MFU", "FLOP/s a rank"):
        table.add_column(head, justify="right")
    slowest = max(plan.stages, key=lambda stage: stage.compute + stage.exposed)
    world = 1
    for _, count in plan.ranks:
        world *= count
    table.add_row(
        _seconds(plan.seconds),
        _seconds(slowest.compute),
        _seconds(slowest.communication),
        f"{_seconds(slowest.exposed)} ({slowest.exposed / plan.seconds:.1%})",
        f"{plan.bubble:.1%}",
        f"{plan.tokens_per_second:,.0f}",
        f"{plan.mfu:.1%}",
        f"{plan.flops / plan.seconds / world / 1e12:.1f}e12",
    )
    return table


def _memory(plan: Plan) -> Table:
    table = Table(title="memory of a rank at its peak", caption=f"{size(plan.memory_bytes)} a rank")
    for head in ("stage", "blocks", *CATEGORIES, "total"):
        table.add_column(head, justify="right")
    for stage in _shown(plan):
        peak = asdict(stage.peak)
        sizes = (size(peak[name]) for name in CATEGORIES)
        table.add_row(str(stage.stage), str(stage.blocks), *sizes, size(stage.peak.total))
    return table


def _shown(plan: Plan) -> Iterator[StagePlan]:
    ends = SHOWN // 2
    for place, stage in enumerate(plan.stages):
        if place < ends or place >= len(plan.stages) - ends or stage is plan.fullest:
            yield stage


def _traffic(plan: Plan) -> Table:
    table = Table(title=f"sent by a rank of stage {plan.fullest.stage} in a step")
    for head in ("axis", "collective", "count", "bytes"):
        table.add_column(head, justify="left" if head in ("axis", "collective") else "right")
    for each in plan.fullest.traffic:
        table.add_row(each.axis, each.kind, f"{each.count:,}", size(each.nbytes))
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def matplotlib() -> Any:
    """Raises RuntimeError where it is missing."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        raise RuntimeError("drawing a plan needs matplotlib: pip install 'zerofx[bench]'") from None


def draw(plan: Plan, path: str | Path) -> None:
    """Writes the memory over time of the ranks that hold most as a PNG file; needs matplotlib."""
    matplotlib().use("Agg")
    from matplotlib import pyplot

    curve = plan.fullest.curve
    seconds = [moment.seconds for moment in curve]
    rows = [[getattr(moment.memory, name) / 2**30 for moment in curve] for name in CATEGORIES]
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    axes.stackplot(seconds, rows, labels=CATEGORIES, step="post")
    axes.axhline(plan.memory_bytes / 2**30, color="black", linestyle="--", linewidth=1, label="a rank's memory")
    axes.set(xlabel="seconds of a step", ylabel="GiB of a rank", title=plan.verdict)
    axes.title.set_fontsize(8)
    axes.legend(loc="upper left", fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
