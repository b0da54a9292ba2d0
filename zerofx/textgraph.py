"""Reads the text of a program as plain data, without torch: what the inspector shows may come from another process."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

P2P = {"all_gather_p2p": "all_gather_into_tensor", "reduce_scatter_p2p": "reduce_scatter_tensor"}
TENSOR = re.compile(r"(\w+)\[([^\]]*)\]")
BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "bool": 1}
BYTES |= {"u64": 8, "u32": 4, "u16": 2, "u8": 1, "c128": 16, "c64": 8, "c32": 4}
GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
SHARES: dict[str, Callable[[int], Fraction]] = {
    GATHER: lambda world: Fraction(1, world),
    SCATTER: lambda world: Fraction(1),
    REDUCE: lambda world: Fraction(2, world),
}
"""What each of `world` ranks sends to each other one, as a share of a collective's results."""


def kind_of(target: str) -> str:
    """The kind of collective that an op issues, from its name in a text; empty if it issues none."""
    namespace, _, op = target.removesuffix(".default").partition(".")
    if namespace == "zerofx":
        return P2P.get(op, "")
    return op.removesuffix("_coalesced") if namespace == "c10d" and op != "wait_tensor" else ""


@dataclass(frozen=True)
class Line:
    """One node: its name, written type, tag (role and parameters), target and the names it reads."""

    name: str
    type: str
    role: str
    params: tuple[str, ...]
    target: str
    args: tuple[str, ...]
    reads: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """The dtype of the result, or of the first of several."""
        return str(TENSOR.findall(self.type)[0][0])

    @property
    def collective(self) -> str:
        """The kind of collective that the node issues, alone or for a bucket; empty if it issues none."""
        return kind_of(self.target)

    @property
    def numels(self) -> list[int]:
        """Elements of a result with a fixed shape, or of each of several."""
        shapes = [shape.replace("()", "").split(",") for _, shape in TENSOR.findall(self.type)]
        return [prod(int(size) for size in shape if size.strip()) for shape in shapes]


@dataclass(frozen=True)
class GraphText:
    """One graph of a program: inputs, nodes in order, and outputs."""

    name: str
    inputs: tuple[Line, ...]
    lines: tuple[Line, ...]
    outputs: tuple[Line, ...]

    @property
    def sent(self) -> list[Line]:
        """The collectives, in the order in which they are issued."""
        return [node for node in self.lines if node.collective]


@dataclass(frozen=True)
class ParamText:
    """One line of the layout: a parameter's name, dtype, whole size and the dim it is cut on."""

    name: str
    dtype: str
    size: tuple[int, ...]
    dim: int | None


@dataclass(frozen=True)
class ProgramText:
    """A program as its text says it."""

    axes: dict[str, int]
    params: dict[str, ParamText]
    graphs: tuple[GraphText, ...]

    def graph(self, name: str) -> GraphText | None:
        return next((graph for graph in self.graphs if graph.name == name), None)


def read(text: str) -> ProgramText:
    """Reads what `zerofx.text.show` writes."""
    axes: dict[str, int] = {}
    params: dict[str, ParamText] = {}
    graphs: list[GraphText] = []
    lines = text.splitlines()
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef):
            graphs.append(_graph(statement, lines))
        elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            if ast.unparse(call.func) == "mesh":
                axes = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            elif ast.unparse(call.func) == "param":
                param = param_of(call)
                params[param.name] = param
    return ProgramText(axes, params, tuple(graphs))


def param_of(call: ast.Call) -> ParamText:
    """Reads one line of the layout."""
    name, kind = ast.literal_eval(call.args[0]), call.args[1]
    assert isinstance(kind, ast.Subscript)
    size = ast.literal_eval(kind.slice)
    size = size if isinstance(size, tuple) else (size,)
    dim = next(ast.literal_eval(k.value) for k in call.keywords if k.arg == "dim")
    return ParamText(name, ast.unparse(kind.value), size, dim)


def line_of(text: str) -> Line:
    """Reads one node, or one input, as its line says it."""
    statement = ast.parse(text).body[0]
    assert isinstance(statement, ast.AnnAssign)
    return _line(_cut(statement.target, [text]), statement.annotation, statement.value, [text])


def outputs_of(text: str) -> list[tuple[str, Line]]:
    """Reads the outputs in a return statement, each as it is written and as data."""
    lines = f"def f():\n {text}".splitlines()
    statement = ast.parse("\n".join(lines)).body[0]
    assert isinstance(statement, ast.FunctionDef)
    returned = statement.body[0]
    if not isinstance(returned, ast.Return) or not isinstance(returned.value, ast.List):
        return []
    return [(_cut(element, lines), _line("", element, None, lines)) for element in returned.value.elts]


def _graph(function: ast.FunctionDef, text: Sequence[str]) -> GraphText:
    inputs = tuple(_line(arg.arg, arg.annotation, None, text) for arg in function.args.args)
    lines: list[Line] = []
    outputs: tuple[Line, ...] = ()
    for statement in function.body:
        if isinstance(statement, ast.AnnAssign):
            lines.append(_line(_cut(statement.target, text), statement.annotation, statement.value, text))
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.List):
            outputs = tuple(_line("", element, None, text) for element in statement.value.elts)
    return GraphText(function.name, inputs, tuple(lines), outputs)


def _line(name: str, kind: ast.expr | None, call: ast.expr | None, text: Sequence[str]) -> Line:
    role, params = "", tuple[str, ...]()
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.MatMult):
        known, kind = kind.right, kind.left
        role = _cut(known.func if isinstance(known, ast.Call) else known, text)
        params = tuple(ast.literal_eval(arg) for arg in known.args) if isinstance(known, ast.Call) else ()
    written = _cut(kind, text) if kind is not None else ""
    if not isinstance(call, ast.Call):
        return Line(name or written, written, role, params, "", (), ())
    reads = tuple(n.id for arg in [*call.args, *call.keywords] for n in ast.walk(arg) if isinstance(n, ast.Name))
    args = tuple(_cut(arg, text) for arg in call.args)
    return Line(name, written, role, params, _cut(call.func, text), args, reads)


def _cut(part: ast.expr, text: Sequence[str]) -> str:
    """What is written there: a line of a text is as `ast.unparse` would write it, which takes longer."""
    if part.lineno == part.end_lineno and text[part.lineno - 1].isascii():
        return text[part.lineno - 1][part.col_offset : part.end_col_offset]
    return ast.unparse(part)
