"""Merges repeated reads of one parameter, and the gradients of those reads into one reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from zerofx.edit import fake_mode, fake_result
from zerofx.program import Invariant, Level, Program, source

aten, zerofx = torch.ops.aten, torch.ops.zerofx


@dataclass(frozen=True)
class MergeReads:
    """Tied, reused and checkpointed parameters travel once a graph: one unshard, one reduce_grad of the sum."""

    name: ClassVar[str] = "merge-reads"
    level: ClassVar[Level] = Level.LOGICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MERGED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "changes"  # the mean of a sum is rounded once, the sum of means twice

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            _merge_reads(graph)
            _merge_gradients(graph)


def _merge_reads(graph: Graph) -> None:
    first: dict[Node, Node] = {}
    for node in graph.find_nodes(op="call_function", target=zerofx.unshard.default):
        kept = first.setdefault(node.args[0], node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _merge_gradients(graph: Graph) -> None:
    """`reduce_grad(a) + reduce_grad(b)` is `reduce_grad(a + b)`: in graph order, so sums of many merge to one."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        parts = node.args
        if node.kwargs or not all(_is_own_reduction(part) for part in parts):
            continue
        left, right = parts
        if left.meta["zerofx"] != right.meta["zerofx"] or left.args[1:] != right.args[1:]:
            continue
        with graph.inserting_before(node):
            total = graph.call_function(aten.add.Tensor, (source(left), source(right)))
            total.meta = dict(node.meta)
            with fake_mode(graph):
                total.meta["val"] = fake_result(total)
            merged = graph.call_function(zerofx.reduce_grad.default, (total, *left.args[1:]))
            merged.meta = dict(left.meta)
        node.replace_all_uses_with(merged)
        for dead in (node, *dict.fromkeys(parts)):
            graph.erase_node(dead)


def _is_own_reduction(part: object) -> bool:
    return isinstance(part, Node) and part.target is zerofx.reduce_grad.default and len(part.users) == 1
