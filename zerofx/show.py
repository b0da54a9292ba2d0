"""Writes a program as text; `zerofx.text` describes the form."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, repeat
from types import ModuleType
from typing import Any

import torch
from torch.fx import Graph, Node

from zerofx._torch import HigherOrderOperator, OpOverload, argument_index, expression, is_handed_object, symbol_hints
from zerofx.layout import Layout, ParamLayout, PerRank
from zerofx.mesh import Mesh
from zerofx.program import (
    GeneratorOn,
    HandedThrough,
    Program,
    Tag,
    is_recomputed,
    is_saved,
    mark_recomputed,
    mark_saved,
    output_node,
    placeholders,
    tag,
)

WIDTH = 120
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e4m3fnuz": torch.float8_e4m3fnuz,
    "f8e5m2": torch.float8_e5m2,
    "f8e5m2fnuz": torch.float8_e5m2fnuz,
    "f8e8m0fnu": torch.float8_e8m0fnu,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c128": torch.complex128,
    "c64": torch.complex64,
    "c32": torch.complex32,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FUNCTIONS: dict[str, ModuleType] = {"operator": operator, "math": math, "torch": torch, "builtins": builtins}
BUILTINS = frozenset({"abs", "bool", "float", "int", "max", "min", "pow", "round"})
COLLECTIVES = "_c10d_functional"
GROUPED = frozenset({"zerofx", COLLECTIVES})
# The words in a marker's tag that bind the partition: what tells that one applies, and what makes it apply.
MARKERS = ("zerofx.unshard.default", "zerofx.reduce_grad.default")
POLICIES = {"recompute": (is_recomputed, mark_recomputed), "keep": (is_saved, mark_saved)}


def show(program: Program) -> str:
    """The whole program; every graph that AOTAutograd makes can be shown."""
    sizes = ", ".join(f"{axis.name}={axis.size}" for axis in program.mesh.axes)
    graphs = [show_graph(name, graph, program.mesh) for name, graph in program.graphs.items()]
    return "\n".join([f"mesh({sizes})\n" + _show_layout(program.layout), *graphs])


def show_graph(name: str, graph: Graph, mesh: Mesh) -> str:
    """One graph as a function definition."""
    inputs = placeholders(graph)
    free = _symbols_without_input(inputs)
    lines = [f"symbols({', '.join(f'{symbol}={value}' for symbol, value in free.items())})"] if free else []
    lines.append(_wrap(f"def {name}(", [f"{n.name}: {_show_input(n)}{_show_tag(tag(n))}" for n in inputs], "):", ""))
    lines += [f"    {show_node(n, mesh)}" for n in graph.nodes if n.op not in ("placeholder", "output")]
    lines.append(_show_outputs(output_node(graph)))
    return "\n".join(lines) + "\n"


def show_node(node: Node, mesh: Mesh) -> str:
    """One line of a graph, without its indentation."""
    if node.op == "placeholder":
        return f"{node.name}: {_show_input(node)}{_show_tag(tag(node))}"
    if node.op == "output":
        return _show_outputs(node).strip()
    return f"{node.name}: {_show_meta(node)}{_show_tag(tag(node), node)} = {_show_call(node, mesh)}"


def show_type(value: Any) -> str:
    """The type of a node's `meta["val"]`: dtype and shape of a tensor, and what sets it apart from the usual."""
    if isinstance(value, torch.Tensor):
        return _show_tensor(value)
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return _tuple(show_type(item) for item in value)
    if isinstance(value, SYMBOLIC):
        return f"sym({_show_symbolic(value)})"
    if isinstance(value, (bool, int, float)):
        return f"{type(value).__name__}({_show_value(value)})"
    if isinstance(value, (torch.Generator, GeneratorOn)):
        return _on_device(value.device.type, "generator")
    if isinstance(value, HandedThrough) or is_handed_object(value):
        return "object"
    return _opaque(value)


def _show_layout(layout: Layout) -> str:
    return "".join(f"{_show_param(param)}\n" for param in layout)


def _show_param(param: ParamLayout) -> str:
    whole = f"{_show_dtype(param.dtype)}[{_items(param.size)}]"
    frozen = "" if param.requires_grad else ", frozen=True"
    tied = f", tied={list(param.tied)!r}" if param.tied else ""
    return f"param({param.name!r}, {whole}, dim={param.dim}{frozen}{tied})"


def _show_outputs(node: Node) -> str:
    flat = node.args[0]
    if not isinstance(flat, (list, tuple)):
        return f"    return {_show_value(flat)}"
    tags = chain(node.meta.get("zerofx") or (), repeat(None))  # a broken program has too few, and is shown whole
    return _wrap("    return [", [_show_value(x) + _show_tag(t) for x, t in zip(flat, tags, strict=False)], "]", "    ")


def _show_input(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt):
        return _show_meta(node)
    written = _show_symbolic(value)
    known = symbol_hints(value)
    if written not in known:
        return f"sym({written})"
    return f"sym({known[written]})" if written == node.name else f"sym({written}, {known[written]})"


def _show_meta(node: Node) -> str:
    return show_type(node.meta["val"]) if "val" in node.meta else "untyped"


def _symbols_without_input(inputs: list[Node]) -> dict[str, int]:
    values = [node.meta.get("val") for node in inputs]
    bare = {_show_symbolic(value) for value in values if isinstance(value, torch.SymInt)}
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided]
    sizes = [value for value in values if isinstance(value, torch.SymInt)]
    sizes += [size for tensor in tensors for size in (*tensor.shape, *tensor.stride()) if type(size) is not int]
    hints = {name: hint for size in sizes for name, hint in symbol_hints(size).items()}
    return {name: hint for name, hint in sorted(hints.items()) if name not in bare}


def _show_tag(known: Tag | None, node: Node | None = None) -> str:
    if known is None:
        return ""
    given = [*map(repr, known.params), *(_policy(node) if node else [])]
    return f" @ {known.role}({', '.join(given)})" if given else f" @ {known.role}"


def _policy(node: Node) -> list[str]:
    """What the partition must do with a marker; what takes a marker's place comes after the partition."""
    if str(node.target) not in MARKERS:
        return []
    return [f"{name}=True" for name, (holds, _) in POLICIES.items() if holds(node)]


def _show_call(node: Node, mesh: Mesh) -> str:
    if node.op != "call_function":
        return f"opaque({f'{node.op} {node.target}'!r})"
    args, kwargs = list(node.args), dict(node.kwargs)
    place = _group_argument(node.target)
    if place and len(args) > place[0]:
        args[place[0]] = _axis_name(args[place[0]], mesh)
    elif place and place[1] in kwargs:
        kwargs[place[1]] = _axis_name(kwargs[place[1]], mesh)
    given = [*map(_show_value, args), *(f"{name}={_show_value(value)}" for name, value in kwargs.items())]
    return f"{_show_target(node.target)}({', '.join(given)})"


@lru_cache(maxsize=4096)
def _show_target(target: Any) -> str:
    if isinstance(target, OpOverload):
        namespace, rest = str(target).split(".", 1)
        return f"{ {COLLECTIVES: 'c10d', 'c10d': 'torch.ops.c10d'}.get(namespace, namespace) }.{rest}"
    name = getattr(target, "__name__", "")
    if isinstance(target, HigherOrderOperator) and higher_order(name) is target:
        return f"higher_order.{name}"
    for label, module in FUNCTIONS.items():
        if allowed(label, name) and getattr(module, name, None) is target:
            return f"{label}.{name}"
    return _opaque(target)


def higher_order(name: str) -> HigherOrderOperator | None:
    """The higher-order operator of that name in torch, which is called with an op and the op's arguments."""
    found = getattr(torch.ops.higher_order, name, None)
    return found if isinstance(found, HigherOrderOperator) else None


def allowed(module: str, name: str) -> bool:
    """Whether the text may call the function `name` of `operator`, `math`, `torch` or `builtins`."""
    if module == "torch":
        return name.lstrip("_").startswith("sym_")
    return bool(name) and not name.startswith("_") and (module != "builtins" or name in BUILTINS)


@lru_cache(maxsize=4096)
def _group_argument(target: Any) -> tuple[int, str] | None:
    if isinstance(target, OpOverload) and target.namespace in GROUPED:
        return argument_index(target, "group", "group_name")
    return None


def _axis_name(group: Any, mesh: Mesh) -> Any:
    return next((axis.name for axis in mesh.axes if axis.group == group), group)


def _show_value(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if value is None or isinstance(value, (str, bool, PerRank)):
        return repr(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f"float({str(float(value))!r})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show_value, value))}]"
    return _show_constant(value)


def _show_constant(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return _show_dtype(value)
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    if isinstance(value, (torch.layout, torch.memory_format)):
        return f"{type(value).__name__}.{str(value).removeprefix('torch.')}"
    if isinstance(value, slice):
        return f"slice({', '.join(map(_show_value, (value.start, value.stop, value.step)))})"
    if isinstance(value, complex):
        return f"complex({_show_value(value.real)}, {_show_value(value.imag)})"
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return _show_target(value)
    return _opaque(value)


def _show_dtype(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _opaque(value: Any) -> str:
    """What is known of a value without an address in it, so that equal programs have equal texts."""
    if isinstance(value, SYMBOLIC):
        return f"opaque({_show_symbolic(value)!r})"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"opaque({f'{named.__module__}.{named.__qualname__}'!r})"


def _show_tensor(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"opaque({f'{tensor.layout} tensor'!r})"
    shape, stride = tuple(map(_expression, tensor.shape)), tuple(map(_expression, tensor.stride()))
    return _on_device(tensor.device.type, _show_strided(tensor.dtype, shape, stride))


def _on_device(device: str, written: str) -> str:
    return written if device == "cpu" else f"{device}.{written}"


@lru_cache(maxsize=65536)
def _show_strided(dtype: torch.dtype, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> str:
    strides = "" if stride == contiguous_stride(shape) else f"({_items(stride)})"
    return f"{_show_dtype(dtype)}[{_items(shape)}]{strides}"


def contiguous_stride(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Strides of a contiguous tensor of that shape, whose sizes are numbers or expressions."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(reversed(strides))


def _expression(size: Any) -> Any:
    """What prints and compares without a guard: an int as it is, a SymInt as its expression."""
    return size if type(size) is int else expression(size)


def _show_symbolic(value: Any) -> str:
    return str(_expression(value))


def _items(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values)) or "()"


def _tuple(texts: Iterable[str]) -> str:
    items = list(texts)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _wrap(start: str, items: list[str], end: str, indent: str) -> str:
    """One line, or one item a line where that is too wide."""
    line = start + ", ".join(items) + end
    if len(line) <= WIDTH:
        return line
    return "\n".join([start, *(f"{indent}    {item}," for item in items), indent + end])
