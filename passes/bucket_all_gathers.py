"""Issues all-gathers that follow one another as one collective, up to a number of bytes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch.fx import Graph, Node

from zerofx.buckets import BYTES, grouped, nbytes
from zerofx.collectives import chunk_steps
from zerofx.edit import call_before
from zerofx.program import Invariant, Level, Program, Tag, group, source, tag

c10d = torch.ops._c10d_functional
GATHER = c10d.all_gather_into_tensor.default


@dataclass(frozen=True)
class BucketAllGathers:
    """A bucket's collective stands where its first parameter is read; each parameter is waited for where it is read.

    The results are buffers of their own, so each is released after its own last use.
    """

    name: ClassVar[str] = "bucket-all-gathers"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.GATHERED, Invariant.WAITED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    bucket_bytes: int = BYTES

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            gathers = [n for n in graph.find_nodes(op="call_function", target=GATHER) if _is_unshard(n)]
            for bucket in grouped(gathers, _key, nbytes, self.bucket_bytes):
                _merge(graph, bucket)


def _is_unshard(node: Node) -> bool:
    known = tag(node)
    return known is not None and known.role == "unshard"


def _key(node: Node) -> tuple[Any, ...]:
    return node.meta["val"].dtype, group(node)


def _merge(graph: Graph, bucket: list[Node]) -> None:
    first = bucket[0]
    for gather in bucket[1:]:
        for step in chunk_steps(gather):
            first.prepend(step)
    params = tuple(name for gather in bucket for name in cast(Tag, tag(gather)).params)
    args = ([source(gather) for gather in bucket], *first.args[1:])
    whole = call_before(first, c10d.all_gather_into_tensor_coalesced.default, args, Tag("unshard", params))
    for place, gather in enumerate(bucket):
        part = call_before(first, operator.getitem, (whole, place), cast(Tag, tag(gather)))
        gather.replace_all_uses_with(part)
    for gather in bucket:
        graph.erase_node(gather)
