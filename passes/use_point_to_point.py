"""Moves what collectives move between pairs of ranks, in a half to a fifth of the time of gloo's collectives."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch.fx import Graph, Node

from zerofx.buckets import BYTES
from zerofx.collectives import P2P, c10d, is_bucket
from zerofx.edit import call_before
from zerofx.program import Invariant, Level, Program, Tag, source, tag

GATHER, SCATTER = P2P
OURS: dict[Any, Any] = {
    c10d.all_gather_into_tensor.default: GATHER,
    c10d.all_gather_into_tensor_coalesced.default: GATHER,
    c10d.reduce_scatter_tensor.default: SCATTER,
    c10d.reduce_scatter_tensor_coalesced.default: SCATTER,
}


@dataclass(frozen=True)
class UsePointToPoint:
    """All-reduces stay what they are. What arrives to be summed waits in a buffer of at most `buffer_bytes`."""

    name: ClassVar[str] = "use-point-to-point"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.GATHERED, Invariant.REDUCED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    buffer_bytes: int = BYTES

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for node in list(graph.nodes):
                if node.target in OURS and (tag(node) or Tag("")).role in ("unshard", "reduce_grad"):
                    _replace(graph, node, self.buffer_bytes)


def _replace(graph: Graph, node: Node, buffer_bytes: int) -> None:
    target, known = OURS[node.target], cast(Tag, tag(node))
    members = node.args[0] if is_bucket(node) else [source(node)]
    options = (buffer_bytes,) if target is SCATTER else ()
    new = call_before(node, target, (members, *options, *node.args[1:]), known)
    node.replace_all_uses_with(new if is_bucket(node) else call_before(node, operator.getitem, (new, 0), known))
    graph.erase_node(node)
