"""Issues reductions of gradients that follow one another as one collective, up to a number of bytes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch.fx import Graph, Node

from zerofx.buckets import BYTES, grouped, nbytes
from zerofx.collectives import only_leaves, results
from zerofx.edit import call_before
from zerofx.program import Invariant, Level, Program, Tag, group, source, tag

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
            reductions = [n for n in graph.nodes if n.target in COALESCED and only_leaves(n)]
            for bucket in grouped(reductions, _key, lambda n: nbytes(source(n)), self.bucket_bytes):
                _merge(graph, bucket)


def _key(node: Node) -> tuple[Any, ...]:
    return node.target, node.meta["val"].dtype, group(node)


def _merge(graph: Graph, bucket: list[Node]) -> None:
    last = bucket[-1]
    params = tuple(name for node in bucket for name in cast(Tag, tag(node)).params)
    args = ([source(node) for node in bucket], *last.args[1:])
    whole = call_before(last, COALESCED[last.target], args, Tag("reduce_grad", params))
    for place, reduction in enumerate(bucket):
        part = call_before(last, operator.getitem, (whole, place), cast(Tag, tag(reduction)))
        made = results(reduction)
        reduction.replace_all_uses_with(part)
        if reduction is not last:
            for node in made:
                last.prepend(node)
    for reduction in bucket:
        graph.erase_node(reduction)
