"""The error that a check of an invariant raises: what does not hold, at which node, and what would mend it."""

from __future__ import annotations

from typing import NoReturn

from torch.fx import Node

from zerofx.program import Invariant, Program
from zerofx.text import show_graph


class InvariantError(AssertionError):
    """A program does not keep an invariant that a pass promised."""


def fail(program: Program, invariant: Invariant, node: Node, found: str, remedy: str) -> NoReturn:
    name = next(name for name, graph in program.graphs.items() if graph is node.graph)
    lines = show_graph(name, node.graph, program.mesh).splitlines()
    place = next((i for i, line in enumerate(lines) if line.strip().startswith(f"{node.name}:")), 0)
    near = "\n".join(lines[max(place - 5, 0) : place + 5])
    raise InvariantError(
        f"{invariant.name} does not hold ({invariant.value}): {node.name} in {name}: {found}; {remedy}\n{near}"
    )
