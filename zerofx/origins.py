"""Where the nodes of a program come from: the module of the model, and the line of its code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import Node

from zerofx.program import Program

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
PART = re.compile(r"\._modules\['([^']+)'\]|\[['\"]?([^'\"\]]+)['\"]?\]")
BACKWARD = ("is_backward", "must_be_in_backward")
ROOT = re.compile(r"^[LG]\.\w+\.?")  # the variable that holds the model
OWN = str(Path(__file__).parent.resolve())


class Origin(NamedTuple):
    """The module's name in the model, `file:line in function`, and whether the node is part of the backward."""

    module: str = ""
    source: str = ""
    backward: bool = False


Origins = dict[str, dict[str, Origin]]
"""By the name of a graph and that of a node."""


def note_origins(program: Program, known: Origins) -> None:
    """Adds the nodes that are not known yet. Names are not used twice in a graph, so what is known stays right."""
    for name, graph in program.graphs.items():
        found = known.setdefault(name, {})
        for node in graph.nodes:
            if node.name not in found and (origin := origin_of(node)) != Origin():
                found[node.name] = origin


def origins_of(told: Mapping[str, Mapping[str, Any]]) -> Origins:
    """Those that were written as JSON."""
    return {graph: {name: Origin(*origin) for name, origin in nodes.items()} for graph, nodes in told.items()}


def origin_of(node: Node) -> Origin:
    """What torch.compile has noted beside a node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return Origin(
        module_name(stack), source_line(node.meta.get("stack_trace")), node.meta.get("partitioner_tag") in BACKWARD
    )


def module_name(stack: Mapping[str, Any] | None) -> str:
    """The name of the innermost module of a stack, as in `named_modules()` of the model that was called."""
    if not stack:
        return ""
    *_, innermost = stack.values()
    return ROOT.sub("", _path(str(innermost[0] if isinstance(innermost, tuple) else innermost)))


def source_line(trace: str | None) -> str:
    """The innermost line of a stack that is neither torch's nor zerofx's own."""
    for file, line, function in reversed(FRAME.findall(trace or "")):
        if "/torch/" not in file and not file.startswith(OWN):
            return f"{_short(file)}:{line} in {function}"
    return ""


def _path(written: str) -> str:
    """The dotted name in what Dynamo writes, such as `L['self']._modules['h']._modules['0']`."""
    return PART.sub(lambda found: "." + (found[1] or found[2]), written)


def _short(file: str) -> str:
    path = Path(file)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else "/".join(path.parts[-2:])
