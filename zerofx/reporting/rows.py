"""Cuts the texts of a program's steps into rows, one for each node, and says what the report shows of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from zerofx.manager import Step
from zerofx.origins import Origin, Origins
from zerofx.reporting.lines import Lines
from zerofx.textgraph import BYTES, TENSOR, Line, ParamText, line_of, outputs_of, param_of


@dataclass
class GraphRows:
    """One graph of a step: the rows of its inputs, ops and outputs."""

    name: str
    inputs: list[int] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


@dataclass
class StepRows:
    """One step: all its rows in the order of the text, and its graphs."""

    step: Step
    rows: list[int] = field(default_factory=list)
    graphs: list[GraphRows] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        return sum(len(graph.ops) for graph in self.graphs)


class Rows:
    """The rows of all steps, each once. `lines` holds what a row that is a node says."""

    def __init__(self, steps: Sequence[Step], origins: Origins) -> None:
        self.texts, self.origins = Lines(), origins
        self.lines: dict[int, Line] = {}
        self.found: dict[int, Origin] = {}
        self.params: dict[str, ParamText] = {}
        self.layout: dict[str, ParamText] = {}
        self.axes: dict[str, int] = {}
        self.steps = [self._step(step) for step in steps]

    def _step(self, step: Step) -> StepRows:
        made = StepRows(step)
        for kind, text in statements(step.text):
            number = self.texts.known.setdefault(text, len(self.texts.known))
            made.rows.append(number)
            if kind == "def":
                made.graphs.append(GraphRows(text.removeprefix("def ").rstrip("(")))
            elif kind == "mesh":
                self.axes = {str(k.arg): ast.literal_eval(k.value) for k in _call(text).keywords}
            elif kind == "param":
                if text not in self.layout:
                    self.layout[text] = param_of(_call(text))
                self.params[self.layout[text].name] = self.layout[text]
            elif kind in ("input", "op", "output"):
                graph = made.graphs[-1]
                {"input": graph.inputs, "op": graph.ops, "output": graph.outputs}[kind].append(number)
                if number not in self.lines:
                    self.lines[number] = _line(kind, text)
                    self.found[number] = self._origin(graph, self.lines[number])
        self._place(made)
        return made

    def _origin(self, graph: GraphRows, line: Line) -> Origin:
        known = self.origins.get(graph.name, {}).get(line.name)
        return known or self.origins.get("joint", {}).get(line.name, Origin())

    def _place(self, step: StepRows) -> None:
        """Gives rows without a module that of their parameter, or the one that all they read is in."""
        for graph in step.graphs:
            at: dict[str, str] = {}
            for number in (*graph.inputs, *graph.ops):
                line, origin = self.lines[number], self.found[number]
                module = "" if line.collective and len(line.params) != 1 else _module_of(line, origin)
                if not module and not line.params and line.reads:
                    module = _common([at[name] for name in line.reads if name in at])
                at[line.name] = module
                self.found[number] = origin._replace(module=module)


def statements(text: str) -> Iterator[tuple[str, str]]:
    """The rows of a program's text with their kinds; a graph's inputs and outputs have a row each."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("def "):
            yield from _header(_whole(line, lines, "):"))
        elif line.startswith("    return ["):
            yield from _returned(_whole(line, lines, "]"))
        elif line:
            kind = "op" if line.startswith("    ") and not line.startswith("    return") else line.split("(")[0]
            yield kind, line


def _whole(line: str, lines: Iterator[str], end: str) -> str:
    """A statement that goes on until a line that closes it."""
    found = [line]
    while not found[-1].endswith(end):
        found.append(next(lines))
    return "\n".join(found)


@lru_cache(maxsize=64)
def _header(text: str) -> tuple[tuple[str, str], ...]:
    function = ast.parse(text + " pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    written = [
        f"{arg.arg}: {ast.unparse(arg.annotation)}" if arg.annotation else f"{arg.arg}: untyped"
        for arg in function.args.args
    ]
    return (("def", f"def {function.name}("), *(("input", f"    {each},") for each in written), ("end", "):"))


@lru_cache(maxsize=64)
def _returned(text: str) -> tuple[tuple[str, str], ...]:
    written = [f"        {each}," for each, _ in outputs_of(text.strip())]
    return (("end", "    return ["), *(("output", each) for each in written), ("end", "    ]"))


def _line(kind: str, text: str) -> Line:
    """What the row of a node says."""
    written = text.strip().removesuffix(",")
    return outputs_of(f"return [{written}]")[0][1] if kind == "output" else line_of(written)


def bytes_of(line: Line) -> int | None:
    """What the results take, None where sizes are symbols."""
    total = 0
    for dtype, shape in TENSOR.findall(line.type):
        sizes = [size.strip() for size in shape.replace("()", "").split(",") if size.strip()]
        if not all(size.isdigit() for size in sizes):
            return None
        total += prod(map(int, sizes)) * BYTES.get(dtype, 1)
    return total


def _module_of(line: Line, origin: Origin) -> str:
    """A parameter's own module comes before that of the code which reads it, so that both are found in one place."""
    if len(line.params) == 1 and line.role in ("shard", "replica", "param", "whole", "unshard", "reduce_grad"):
        return line.params[0].rpartition(".")[0]
    return origin.module


def _common(modules: Sequence[str]) -> str:
    """The innermost module that holds all of them."""
    parts = [module.split(".") for module in modules]
    shared: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _call(text: str) -> ast.Call:
    statement = ast.parse(text).body[0]
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return statement.value


def row_told(line: Line, origin: Origin, modules: Mapping[str, int], sources: Mapping[str, int]) -> list[Any]:
    """A node's row as JSON."""
    where = [modules[origin.module], sources[origin.source], int(origin.backward)]
    return [line.name, line.target, line.type, bytes_of(line), line.role, list(line.params), list(line.reads), *where]
