"""Issues reductions of gradients that follow one another as one collective, up to a number of bytes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch.fx import Graph, Node

from zerofx.buckets import BYTES, grouped, nbytes
from zerofx.edit import call_before
from zerofx.program import Invariant, Level, Program, Tag, group, output_node, source, tag

c10d = torch.ops._c10d_functional
COALESCED: dict[Any, Any] = {
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
}


@dataclass(frozen=True)
class BucketReductions:
    """A bucket's collective stands where its last gradient is ready."""

    name: ClassVar[str] = "bucket-reductions"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.REDUCED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    bucket_bytes: int = BYTES

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            reductions = [n for n in graph.nodes if n.target in COALESCED and _only_leaves(n)]
            for bucket in grouped(reductions, _key, lambda n: nbytes(source(n)), self.bucket_bytes):
                _merge(graph, bucket)


def _key(node: Node) -> tuple[Any, ...]:
    return node.target, node.meta["val"].dtype, group(node)


def _results(reduction: Node) -> list[Node]:
    """All that is made of the reduced gradient inside its own replacement, in order."""
    known, found = tag(reduction), [reduction]
    for node in found:
        found += [user for user in node.users if user.op == "call_function" and tag(user) == known]
    return found[1:]


def _only_leaves(reduction: Node) -> bool:
    """Whether the reduced gradient is only returned, so that it may come later."""
    known = tag(reduction)
    if known is None or known.role != "reduce_grad":
        return False
    inside = _results(reduction)
    end = output_node(reduction.graph)
    return all(user in inside or user is end for node in (reduction, *inside) for user in node.users)


def _merge(graph: Graph, bucket: list[Node]) -> None:
    last = bucket[-1]
    params = tuple(name for node in bucket for name in cast(Tag, tag(node)).params)
    args = ([source(node) for node in bucket], *last.args[1:])
    whole = call_before(last, COALESCED[last.target], args, Tag("reduce_grad", params))
    for place, reduction in enumerate(bucket):
        part = call_before(last, operator.getitem, (whole, place), cast(Tag, tag(reduction)))
        results = _results(reduction)
        reduction.replace_all_uses_with(part)
        if reduction is not last:
            for node in results:
                last.prepend(node)
    for reduction in bucket:
        graph.erase_node(reduction)
