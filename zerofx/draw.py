"""Draws a program with graphviz: inputs, collectives by role, and the ops between them."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

from zerofx.textgraph import GraphText, Line, ProgramText

COLOURS = {
    "shard": "#cfe8ff", "replica": "#e3f1ff", "param": "#e3f1ff", "unshard": "#7fb8f0", "reduce_grad": "#f5b27a",
    "tangent": "#f7dcc4", "saved": "#e8e0f5", "grad": "#f5d0b0", "out": "#d5f0d5",
}  # fmt: skip


def draw_svg(program: ProgramText, path: Path) -> None:
    """Writes the SVG. Raises ValueError for another kind of file, and RuntimeError without pydot or graphviz."""
    if path.suffix != ".svg" or path.is_dir():
        raise ValueError(f"a program is drawn as SVG, and {str(path)!r} names no such file: give a name in .svg")
    if shutil.which("dot") is None:
        raise RuntimeError(
            "drawing needs the program `dot`: install graphviz, for example with `apt-get install graphviz`"
        )
    try:
        pydot = importlib.import_module("pydot")
    except ImportError as error:
        raise RuntimeError("drawing needs pydot: pip install 'zerofx[draw]'") from error
    dot = pydot.Dot("program", rankdir="TB", fontname="Helvetica")
    dot.set_node_defaults(shape="box", style="filled", fillcolor="white", fontname="Helvetica", fontsize="10")
    for graph in program.graphs:
        cluster = pydot.Cluster(graph.name, label=graph.name, fontname="Helvetica")
        _fill(cluster, graph, pydot)
        dot.add_subgraph(cluster)
    dot.write_svg(str(path))


def _fill(cluster: Any, graph: GraphText, pydot: Any) -> None:
    known = {line.name for line in (*graph.inputs, *graph.lines)}
    for line in (*graph.inputs, *graph.lines):
        cluster.add_node(
            pydot.Node(_key(graph, line.name), label=_label(line), fillcolor=COLOURS.get(line.role, "white"))
        )
        for source in dict.fromkeys(line.reads):
            if source in known:
                cluster.add_edge(pydot.Edge(_key(graph, source), _key(graph, line.name)))
    for place, line in enumerate(graph.outputs):
        if line.name in known and line.role:
            key = _key(graph, f"output_{place}")
            label = _quoted(f"{line.role} {', '.join(line.params)}")
            cluster.add_node(pydot.Node(key, label=label, shape="ellipse", fillcolor=COLOURS.get(line.role, "white")))
            cluster.add_edge(pydot.Edge(_key(graph, line.name), key))


def _key(graph: GraphText, name: str) -> str:
    return f'"{graph.name}.{name}"'


def _label(line: Line) -> str:
    op = ".".join(line.target.split(".")[:2]) or line.name
    return _quoted("\n".join(filter(None, [op, line.type, " ".join([line.role, *line.params]) if line.role else ""])))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "'").replace("\n", "\\n") + '"'
