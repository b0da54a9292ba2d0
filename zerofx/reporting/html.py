"""Writes the report: one HTML file with its data, its scripts and the libraries that draw; it needs no network."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerofx.planning.report import Plan
from zerofx.reporting import planned
from zerofx.reporting.build import build
from zerofx.reporting.recording import RankRecord

ASSETS = Path(__file__).parent / "assets"
STYLES = ("vendor/uPlot.min.css", "style.css")
LIBRARIES = ("cytoscape.min.js", "cytoscape-dagre.min.js", "uPlot.iife.min.js", "diff.min.js")
SCRIPTS = ("data.js", "graph.js", "passes.js", "plots.js", "tables.js", "app.js")


def write_report(path: str | Path, ranks: Sequence[RankRecord], plan: Plan | None = None) -> Path:
    """Writes the file, in a folder report.html, and returns its path; a plan's figures stand beside those recorded."""
    target = Path(path)
    if target.is_dir():
        target = target / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    data = build(ranks)
    if plan is not None:
        data["plan"] = planned.told(plan, data)
    target.write_text(page(data), encoding="utf-8")
    return target


def page(data: dict[str, Any]) -> str:
    """The whole file. The data is compressed, which also keeps what it says from being read as HTML."""
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6)
    scripts = [_asset(f"vendor/{name}") for name in LIBRARIES] + [_asset(name) for name in SCRIPTS]
    parts = {
        "title": html.escape(f"zerofx report: {data['model']}"),
        "style": "\n".join(map(_asset, STYLES)),
        "data": base64.b64encode(packed).decode(),
        "licenses": _asset("vendor/LICENSES.txt").replace("--", "- -"),
        "scripts": "\n".join(
            f"<script>\n{script.replace('</script', '<' + chr(92) + '/script')}\n</script>" for script in scripts
        ),
    }
    head, *rest = _asset("page.html").split("{{")
    return head + "".join(parts[each.split("}}")[0]] + each.split("}}", 1)[1] for each in rest)


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
