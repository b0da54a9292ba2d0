"""Reads a program from its text; `zerofx.text` describes the form."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from zerofx._torch import FakeRun, OpOverload, argument_index
from zerofx.layout import Layout, ParamLayout, PerRank
from zerofx.mesh import Mesh
from zerofx.program import GeneratorOn, HandedThrough, Level, Program
from zerofx.read import Reader, TextError, items, split_tag
from zerofx.show import DTYPES, GROUPED, contiguous_stride, show_type

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": lambda *sizes: _fold(torch.sym_max, sizes),
    "Min": lambda *sizes: _fold(torch.sym_min, sizes),
}


def parse(text: str) -> Program:
    """The program that `show` wrote as `text`; each node gets its `meta["val"]` from running its op on fake tensors.

    The level is physical if there is a `forward`, `backward`, `gather` or `reduce` graph, or an `inference` graph
    without zerofx ops.
    Groups are named as the axes of the mesh. Raises TextError.
    """
    lines = text.splitlines()
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise TextError(f"line {error.lineno}: not Python: {error.msg}") from error
    graphs: dict[str, Graph] = {}
    params: list[ParamLayout] = []
    mesh: Mesh | None = None
    hints: dict[str, int] = {}
    for statement in body:
        reader = Reader(lines, mesh or Mesh(()))
        match statement:
            case ast.Expr(ast.Call(ast.Name("mesh"), [], axes)) if mesh is None:
                mesh = Mesh.of(**{reader.keyword(axis): reader.integer(axis.value) for axis in axes})
            case ast.Expr(ast.Call(ast.Name("param"), _, _) as call):
                params.append(reader.param(call))
            case ast.Expr(ast.Call(ast.Name("symbols"), [], symbols)):
                hints = {reader.keyword(symbol): reader.integer(symbol.value) for symbol in symbols}
            case ast.FunctionDef(name=name) if mesh is not None and name not in graphs:
                graphs[name] = _GraphReader(lines, mesh, hints).graph(statement)
                hints = {}
            case ast.FunctionDef(name=name):
                reader.fail(
                    statement, f"the graph {name!r} is there twice" if mesh else "no mesh(...) before the graph"
                )
            case _:
                reader.fail(statement, "expected mesh(...) once, param(...), symbols(...) or a graph's def")
    if mesh is None:
        raise TextError("line 1: expected mesh(...), with the size of each axis")
    return Program(graphs, mesh, Layout(tuple(params)), _level(graphs))


def _level(graphs: dict[str, Graph]) -> Level:
    if graphs.keys() & {"forward", "backward", "gather", "reduce"}:
        return Level.PHYSICAL
    marked = any(
        isinstance(node.target, OpOverload) and node.target.namespace == "zerofx"
        for graph in graphs.values()
        for node in graph.nodes
    )
    return Level.PHYSICAL if "inference" in graphs and not marked else Level.LOGICAL


class _GraphReader(Reader):
    """Reads one graph, line by line."""

    def __init__(self, lines: list[str], mesh: Mesh, hints: dict[str, int]) -> None:
        super().__init__(lines, mesh)
        self.built, self.env, self.run = Graph(), dict[str, Node](), FakeRun()
        self.symbols: dict[str, Any] = {}
        self.hints = hints
        self.late: list[tuple[Node, ast.expr]] = []

    def graph(self, function: ast.FunctionDef) -> Graph:
        self.read_symbols(function)
        arguments = function.args
        if arguments.posonlyargs or arguments.vararg or arguments.kwonlyargs or arguments.kwarg or arguments.defaults:
            self.fail(function, "the inputs of a graph are `name: type`, without defaults, * or /")
        for arg in arguments.args:
            self.read_input(arg)
        *body, last = function.body
        for line in body:
            self.read_call(line)
        if not isinstance(last, ast.Return) or not isinstance(last.value, ast.List):
            self.fail(last, "expected the graph to end with return [...]")
        pairs = [split_tag(item) for item in last.value.elts]
        output = self.built.output(tuple(self.value(item) for item, _ in pairs))
        output.meta["zerofx"] = tuple(self.tag(written) for _, written in pairs)
        for node, kind in self.late:
            self.check(node, kind)
        return self.built

    def read_symbols(self, function: ast.FunctionDef) -> None:
        """Symbols come first: a tensor may be written before the input that names its size."""
        hints = {name: (value, function) for name, value in self.hints.items()} | _input_hints(function)
        for name, (value, where) in hints.items():
            if not name.startswith("s") or not name[1:].isdecimal():
                self.fail(where, f"a symbol is an s and a number, as s77, not {name!r}")
            self.symbols[name] = self.run.symbol(name, value)

    def read_input(self, arg: ast.arg) -> None:
        if arg.annotation is None:
            self.fail(arg, f"the input {arg.arg!r} has no type")
        kind, written = split_tag(arg.annotation)
        node = self.define(arg, arg.arg, lambda: self.built.placeholder(arg.arg), written)
        node.meta["val"] = self.input_value(arg.arg, kind)
        self.check(node, _input_type(arg.arg, kind))

    def read_call(self, line: ast.stmt) -> None:
        match line:
            case ast.AnnAssign(ast.Name(name), annotation, ast.Call(func, args, keywords)):
                kind, written = split_tag(annotation)
            case _:
                self.fail(line, "expected `name: type = call(...)`")
        target = self.target(func)
        given = tuple(self.value(arg) for arg in args)
        named = {self.keyword(keyword): self.value(keyword.value) for keyword in keywords}
        given, named = self.with_group(func, target, given, named)
        node = self.define(
            line, name, lambda: self.built.create_node("call_function", target, given, named, name), written
        )
        try:
            value = self.run.call(target, _values(node.args), _values(node.kwargs))
        except Exception as error:
            self.fail(line, f"{ast.unparse(func)} can't be run on these arguments: {error}", error)
        if value is None and ast.unparse(kind) == "untyped":
            return
        node.meta["val"] = value
        if self.symbols and _normal(show_type(value)) != ast.unparse(kind):
            self.late.append((node, kind))  # what later lines say of the symbols may still make both the same
            return
        self.check(node, kind)

    def define(self, where: ast.AST, name: str, make: Callable[[], Node], written: ast.expr | None) -> Node:
        if name in self.env:
            self.fail(where, f"{name!r} is defined twice")
        node = make()
        if node.name != name or name in DTYPES:
            self.fail(where, f"a node can't have the name {name!r}")
        if written is not None:
            self.stamp(node, written)
        self.env[name] = node
        return node

    def check(self, node: Node, kind: ast.expr) -> None:
        computed, written = _normal(show_type(node.meta["val"])), ast.unparse(kind)
        if computed == written:
            return
        if (tensor := self.same_memory(node.meta["val"], kind)) is None:
            self.fail(kind, f"{node.name} is written as {written}, but is {computed}")
        node.meta["val"] = tensor

    def same_memory(self, value: Any, kind: ast.expr) -> torch.Tensor | None:
        """The written tensor, if it differs from the value only in strides that lead to no other element."""
        match kind:
            case ast.Call(ast.Subscript() as written, strides, []):
                tensor = self.tensor(written, strides)
            case ast.Subscript():
                tensor = self.tensor(kind, None)
            case _:
                return None
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            return None
        return tensor if value.device == tensor.device and _steps(value) == _steps(tensor) else None

    def with_group(
        self, where: ast.expr, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the axis that the text names replaced by its group.

        A number is torch's name of a group that is no axis of the mesh, such as of ranks that slice layers.
        """
        grouped = isinstance(target, OpOverload) and target.namespace in GROUPED
        found = argument_index(target, "group", "group_name") if grouped else None
        if found is None:
            return args, kwargs
        place, name = found
        axis = args[place] if place < len(args) else kwargs.get(name)
        if str(axis).isdecimal():
            return args, kwargs
        if axis not in [known.name for known in self.mesh.axes]:
            self.fail(where, f"the mesh has the axes {[known.name for known in self.mesh.axes]}, not {axis!r}")
        group = self.mesh.axis(axis).group
        if place < len(args):
            return (*args[:place], group, *args[place + 1 :]), kwargs
        return args, kwargs | {name: group}

    def value(self, expr: ast.expr) -> Any:
        match expr:
            case ast.Constant(value) if value is None or isinstance(value, (str, int, float)):
                return value
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return -number
            case ast.List(items):
                return [self.value(item) for item in items]
            case ast.Name(name):
                return self.env[name] if name in self.env else self.named(name, expr)
            case ast.Attribute(ast.Name("layout" | "memory_format" as kind), name):
                found = getattr(torch, name, None)
                return found if isinstance(found, getattr(torch, kind)) else self.fail(expr, f"no {kind} {name!r}")
            case ast.Attribute():
                return self.target(expr)
            case ast.Call(ast.Name(name), args, []):
                return self.made(name, [self.value(arg) for arg in args], expr)
        self.fail(expr, f"{ast.unparse(expr)} isn't an argument that the text form has")

    def named(self, name: str, where: ast.AST) -> torch.dtype:
        if name in DTYPES or isinstance(getattr(torch, name, None), torch.dtype):
            return self.dtype(name, where)
        self.fail(where, f"{name!r} is neither a node defined above nor a dtype")

    def input_value(self, name: str, kind: ast.expr) -> Any:
        match kind:
            case ast.Call(ast.Name("sym"), [ast.Constant(int())], []):
                return self.symbols[name]
            case ast.Call(ast.Name("sym"), [size, *_], []):
                return self.size(size)
            case ast.Call(ast.Name("int" | "float" | "bool"), [number], []):
                return self.value(number)
            case ast.Name("none"):
                return None
            case ast.Name("object"):
                return HandedThrough()
            case ast.Name("generator"):
                return GeneratorOn(torch.device("cpu"))
            case ast.Attribute(ast.Name(device), "generator"):
                return self.generator(device, kind)
            case ast.Call(ast.Subscript() as tensor, strides, []):
                return self.tensor(tensor, strides)
            case ast.Subscript():
                return self.tensor(kind, None)
        self.fail(kind, f"{ast.unparse(kind)} isn't a type that an input can have")

    def generator(self, device: str, where: ast.expr) -> GeneratorOn:
        try:
            return GeneratorOn(torch.device(device))
        except RuntimeError as error:
            self.fail(where, f"no device {device!r}", error)

    def tensor(self, kind: ast.Subscript, strides: list[ast.expr] | None) -> torch.Tensor:
        match kind.value:
            case ast.Name(name):
                device = "cpu"
            case ast.Attribute(ast.Name(device), name):
                pass
            case _:
                self.fail(kind, f"{ast.unparse(kind)} isn't a type")
        size = tuple(self.size(item) for item in items(kind.slice))
        stride = contiguous_stride(size) if strides is None else tuple(map(self.size, strides))
        try:
            return self.run.empty(size, stride, self.dtype(name, kind), device)
        except (RuntimeError, TypeError) as error:
            self.fail(kind, f"no tensor can be {ast.unparse(kind)}: {error}", error)

    def size(self, expr: ast.expr) -> Any:
        match expr:
            case ast.Constant(int() as value):
                return value
            case ast.Name(name) if name in self.symbols:
                return self.symbols[name]
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                return ARITHMETIC[type(op)](self.size(left), self.size(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -self.size(operand)
            case ast.Call(ast.Name(name), args, []) if name in SIZE_FUNCTIONS:
                return SIZE_FUNCTIONS[name](*map(self.size, args))
            case ast.Name(name):
                self.fail(expr, f"no input and no symbols(...) line gives the value of {name!r}")
        self.fail(expr, f"{ast.unparse(expr)} isn't a size")


def _input_hints(function: ast.FunctionDef) -> dict[str, tuple[int, ast.AST]]:
    found: dict[str, tuple[int, ast.AST]] = {}
    for arg in function.args.args:
        match arg.annotation and split_tag(arg.annotation)[0]:
            case ast.Call(ast.Name("sym"), [ast.Constant(int() as value)], []):
                found[arg.arg] = (value, arg)
            case ast.Call(ast.Name("sym"), [ast.Name(name), ast.Constant(int() as value)], []):
                found[name] = (value, arg)
    return found


def _input_type(name: str, kind: ast.expr) -> ast.expr:
    """The type of an input as its value alone has it: the value of a symbol belongs to the text only."""
    match kind:
        case ast.Call(ast.Name("sym") as sym, [ast.Constant(int())], []):
            return ast.copy_location(ast.Call(sym, [ast.Name(name)], []), kind)
        case ast.Call(ast.Name("sym") as sym, [size, _], []):
            return ast.copy_location(ast.Call(sym, [size], []), kind)
    return kind


def _values(args: Any) -> Any:
    """Arguments for a run on fake tensors; a `PerRank` is rank 0's plain int."""
    return map_aggregate(args, lambda arg: arg.meta["val"] if isinstance(arg, Node) else _plain(arg))


def _plain(arg: Any) -> Any:
    return int(arg) if isinstance(arg, PerRank) else arg


def _fold(function: Callable[[Any, Any], Any], values: tuple[Any, ...]) -> Any:
    first, *rest = values
    for value in rest:
        first = function(first, value)
    return first


@lru_cache(maxsize=4096)
def _normal(text: str) -> str:
    return ast.unparse(ast.parse(text, mode="eval"))


def _steps(tensor: torch.Tensor) -> list[Any]:
    """The strides of the dims along which there is more than one element."""
    if any(size == 0 for size in tensor.shape):
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
