"""Updates parameters in the backward: hands each gradient over behind its reduction, and returns none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from zerofx.aliases import UPDATE, last_reads, stored_values
from zerofx.collectives import reduction_of
from zerofx.edit import call_after
from zerofx.program import Invariant, Level, Program, Tag, output_node, output_tags, outputs, placeholders


@dataclass(frozen=True)
class FuseOptimizer:
    """The gradients of `params` that one collective reduces are handed over together, as soon as all are there and no
    part of their parameters is read any more; nothing holds them behind that.
    """

    name: ClassVar[str] = "fuse-optimizer"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.REDUCED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.UPDATED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    params: tuple[str, ...] = ()

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values() if self.params else ():
            grads = _take(graph, frozenset(self.params))
            values = stored_values(program, graph)
            reads = last_reads(graph, values)
            together: dict[Node, dict[str, Node]] = {}
            for name, grad in grads.items():
                together.setdefault(reduction_of(grad) or grad, {})[name] = grad
            for members in together.values():
                stored = [node for node, name in values.items() if node.op == "placeholder" and name in members]
                _hand_over(graph, members, stored, [reads[name] for name in members if name in reads])


def _take(graph: Graph, params: frozenset[str]) -> dict[str, Node]:
    """Takes the gradients of these parameters out of the graph's outputs."""
    taken: dict[str, Node] = {}
    values, tags = outputs(graph), list(output_tags(graph))
    for place, (value, known) in enumerate(zip(values, tags, strict=True)):
        if value is not None and known is not None and known.role == "grad" and known.params[0] in params:
            taken[known.params[0]] = value
            values[place] = tags[place] = None
    end = output_node(graph)
    end.args, end.meta["zerofx"] = (tuple(values),), tuple(tags)
    return taken


def _hand_over(graph: Graph, grads: dict[str, Node], stored: list[Node], reads: list[Node]) -> None:
    behind = {placeholders(graph)[-1], *grads.values(), *reads}
    last = next(node for node in reversed(graph.nodes) if node in behind)
    args = (list(grads.values()), stored, list(grads))
    call_after(last, UPDATE, args, Tag("update", tuple(grads)))
