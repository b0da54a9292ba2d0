"""Draws a timeline as an SVG file: one row for each stream, what computation waits for in red."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofx.timeline import Span, Timeline

WIDTH, ROW, LEFT, TOP = 1400.0, 40, 90, 30
COLOURS = {"kernel": "#9ecae1", "wait": "#d62728", "all_gather": "#74c476", "reduce_scatter": "#fd8d3c"}
OTHER = "#bcbddc"
SHORTEST = 0.3  # of a point; shorter spans would not be seen


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Writes the SVG; a browser shows the name and time of what the mouse is on."""
    streams = list(dict.fromkeys(["compute", *(span.stream for span in timeline.spans)]))
    height = TOP + ROW * len(streams) + 10
    size = f'width="{LEFT + WIDTH + 10:g}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f'<text x="{LEFT}" y="18">{_title(timeline)}</text>',
        *(f'<text x="4" y="{TOP + ROW * row + 22}">{escape(name)}</text>' for row, name in enumerate(streams)),
        *_boxes(timeline, streams),
        "</svg>",
    ]
    path.write_text("\n".join(lines) + "\n")


def _title(timeline: Timeline) -> str:
    return (
        f"step {timeline.step * 1e3:.1f} ms: computation {timeline.compute * 1e3:.1f} ms, communication "
        f"{timeline.communication * 1e3:.1f} ms, of which exposed {timeline.exposed * 1e3:.1f} ms"
    )


def _boxes(timeline: Timeline, streams: list[str]) -> Iterator[str]:
    scale = WIDTH / timeline.step if timeline.step else 0.0
    for span in timeline.spans:
        x, y = LEFT + span.start * scale, TOP + ROW * streams.index(span.stream)
        told = f"{span.part}: {span.name}, {span.seconds * 1e3:.3f} ms"
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{max(span.seconds * scale, SHORTEST):.2f}" height="{ROW - 8}" '
            f'fill="{_colour(span)}"><title>{escape(told)}</title></rect>'
        )


def _colour(span: Span) -> str:
    kind = span.kind if span.kind != "collective" else next((k for k in COLOURS if span.name.startswith(k)), "")
    return COLOURS.get(kind, OTHER)
