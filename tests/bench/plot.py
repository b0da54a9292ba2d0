"""The report as a PNG: step time and heap of each contestant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.bench.report import Report, heading, mebibytes

ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}


def draw(settings: dict[str, Any], report: Report, path: Path) -> bool:
    """Draws the contestants that have figures; False where matplotlib is not installed or there is nothing to draw."""
    rows = [row for row in reversed(report.rows) if row.wall and row.cpu]
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not rows:
        return False
    figure = Figure(figsize=(12, 1.5 + 0.35 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    upper, lower = [place + 0.2 for place in places], [place - 0.2 for place in places]

    times.barh(upper, [row.wall.value for row in rows], 0.4, label="wall")
    times.barh(lower, [row.cpu.value for row in rows], 0.4, label="CPU")
    bounds = [(row.floor_and_wire, place) for place, row in enumerate(rows) if row.floor_and_wire is not None]
    if bounds:
        times.plot(*zip(*bounds, strict=True), "k|", markersize=14, label="floor + wire")
    times.axvline(1, color="black", linewidth=0.5)
    times.set(xlabel="step time over the compute floor", yticks=places, yticklabels=[row.contestant for row in rows])
    times.legend(**ABOVE, ncols=3)

    memory.barh(upper, [mebibytes(row.heap_peak) for row in rows], 0.4, label="peak")
    memory.barh(lower, [mebibytes(row.heap_steady) for row in rows], 0.4, label="steady")
    memory.set(xlabel="heap of the larger rank, MiB")
    memory.legend(**ABOVE, ncols=2)

    figure.suptitle(heading(settings))
    figure.savefig(path, dpi=120)
    return True
