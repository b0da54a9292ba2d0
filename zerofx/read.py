"""Reads the pieces of a program's text that need no graph: names, numbers, dtypes, tags, ops, parameters."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch.fx import Node

import zerofx.ops
import zerofx.transport  # noqa: F401  the text may call the ops of both
from zerofx._torch import OpOverload
from zerofx.layout import ParamLayout, PerRank
from zerofx.mesh import Mesh
from zerofx.program import Tag
from zerofx.show import COLLECTIVES, DTYPES, FUNCTIONS, POLICIES, allowed, higher_order

MAKERS: dict[str, Callable[..., Any]] = {
    "rows": lambda size, parts: PerRank("rows", size, parts),
    "pad": lambda size, parts: PerRank("pad", size, parts),
    "slice": slice,
    "float": float,
    "complex": complex,
    "device": torch.device,
}


class TextError(ValueError):
    """A text is no program: says which line, what was found there, and what was expected."""


class Reader:
    """Reads what needs no graph: names, numbers, types without symbols, parameters."""

    def __init__(self, lines: list[str], mesh: Mesh) -> None:
        self.lines, self.mesh = lines, mesh

    def fail(self, where: ast.AST, what: str, cause: Exception | None = None) -> NoReturn:
        line = getattr(where, "lineno", 1)
        raise TextError(f"line {line}: {what}\n    {self.lines[line - 1].strip()}") from cause

    def keyword(self, keyword: ast.keyword) -> str:
        return keyword.arg or self.fail(keyword.value, "** isn't part of the text form")

    def literal(self, expr: ast.expr, *kinds: type) -> Any:
        try:
            value = ast.literal_eval(expr)
        except (ValueError, TypeError):
            value = expr
        if type(value) in kinds:
            return value
        self.fail(expr, f"expected {' or '.join(kind.__name__ for kind in kinds)}, not {ast.unparse(expr)}")

    def integer(self, expr: ast.expr) -> int:
        return int(self.literal(expr, int))

    def dtype(self, name: str, where: ast.AST) -> torch.dtype:
        dtype = DTYPES.get(name) or getattr(torch, name, None)
        return dtype if isinstance(dtype, torch.dtype) else self.fail(where, f"no dtype {name!r}")

    def param(self, call: ast.Call) -> ParamLayout:
        match call.args:
            case [name, ast.Subscript(ast.Name(dtype), sizes)]:
                size = tuple(self.integer(item) for item in items(sizes))
            case _:
                self.fail(call, "expected param('name', dtype[sizes], dim=...)")
        given = {self.keyword(keyword): keyword.value for keyword in call.keywords}
        if "dim" not in given or given.keys() - {"dim", "frozen", "tied"}:
            self.fail(call, "expected dim=, and only frozen= and tied= besides")
        dim = self.literal(given["dim"], int, type(None))
        if dim is not None and not 0 <= dim < len(size):
            self.fail(call, f"dim={dim} isn't a dim of {len(size)}-dimensional {ast.unparse(call.args[0])}")
        frozen = "frozen" in given and self.literal(given["frozen"], bool)
        tied = self.literal(given["tied"], list) if "tied" in given else []
        return ParamLayout(self.literal(name, str), size, self.dtype(dtype, call), dim, not frozen, tuple(tied))

    def tag(self, expr: ast.expr | None) -> Tag | None:
        match expr:
            case None:
                return None
            case ast.Name(role):
                return Tag(role)
            case ast.Call(ast.Name(role), params, []):
                return Tag(role, tuple(self.literal(param, str) for param in params))
        self.fail(expr, f"expected a tag, as role or role('parameter'), not {ast.unparse(expr)}")

    def stamp(self, node: Node, expr: ast.expr) -> None:
        """Puts the tag of a line on its node; `recompute=True` or `keep=True` in it binds the partition."""
        match expr:
            case ast.Call(role, params, [ast.keyword(str(policy), ast.Constant(True))]) if policy in POLICIES:
                _, mark = POLICIES[policy]
                mark(node)
                expr = ast.copy_location(ast.Call(role, params, []), expr)
        node.meta["zerofx"] = self.tag(expr)

    def target(self, func: ast.expr) -> Callable[..., Any]:
        dotted = ast.unparse(func)
        if dotted.startswith("opaque"):
            self.fail(func, "what is opaque can't be read back")
        match dotted.removeprefix("torch.ops.").split("."):
            case [module, name] if module in FUNCTIONS and allowed(module, name):
                found = getattr(FUNCTIONS[module], name, None)
            case ["higher_order", name]:
                found = higher_order(name)
            case [namespace, name, overload]:
                lowered = namespace == "c10d" and not dotted.startswith("torch.ops.")
                packet = getattr(getattr(torch.ops, COLLECTIVES if lowered else namespace), name, None)
                found = getattr(packet, overload, None)
                found = found if isinstance(found, OpOverload) else None
            case _:
                found = None
        if not callable(found):
            self.fail(func, f"no op {dotted}; an op is namespace.name.overload")
        return cast("Callable[..., Any]", found)

    def made(self, name: str, args: list[Any], where: ast.expr) -> Any:
        if name not in MAKERS:
            self.fail(where, f"{ast.unparse(where)} can't be read back")
        try:
            return MAKERS[name](*args)
        except (TypeError, ValueError, RuntimeError) as error:
            self.fail(where, f"{ast.unparse(where)}: {error}", error)


def split_tag(expr: ast.expr) -> tuple[ast.expr, ast.expr | None]:
    match expr:
        case ast.BinOp(left, ast.MatMult(), right):
            return left, right
    return expr, None


def items(expr: ast.expr) -> list[ast.expr]:
    return expr.elts if isinstance(expr, ast.Tuple) else [expr]
