"""Replaces each reduce_grad by a reduce-scatter of the padded gradient, or an all-reduce for a replicated parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx.edit import Replacement
from zerofx.layout import ParamLayout, PerRank, chunk_rows
from zerofx.program import Invariant, Level, Program, group, marked_param, source

aten, c10d, zerofx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zerofx


@dataclass(frozen=True)
class InsertReduceScatter:
    """Gradients are averaged over the axis; on one rank they are passed on as they are."""

    name: ClassVar[str] = "insert-reduce-scatter"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MERGED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.REDUCED, Invariant.WAITED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED})
    numerics: ClassVar[str] = "same"

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for marker in graph.find_nodes(op="call_function", target=zerofx.reduce_grad.default):
                param = program.layout[marked_param(marker)]
                world = program.mesh.axis_of_group(group(marker)).size
                if world == 1:
                    Replacement(marker).finish(source(marker))
                elif param.dim is None:
                    _all_reduce(marker)
                else:
                    _reduce_scatter(marker, param, world)


def _all_reduce(marker: Node) -> None:
    new = Replacement(marker)
    mean = new.call(c10d.all_reduce.default, _contiguous(new, source(marker)), "avg", group(marker))
    new.finish(new.call(c10d.wait_tensor.default, mean))


def _reduce_scatter(marker: Node, param: ParamLayout, world: int) -> None:
    grad, dim = source(marker), param.dim
    assert dim is not None
    new, rank, rows = Replacement(marker), len(param.size), param.size[dim]
    order = [dim, *(d for d in range(rank) if d != dim)]
    uneven = rows % world != 0
    if uneven:
        padding = [0, 0] * (rank - 1 - dim) + [0, chunk_rows(rows, world) * world - rows]
        grad = new.call(aten.constant_pad_nd.default, grad, padding)
    if dim:
        grad = new.call(aten.permute.default, grad, order)
    mean = new.call(c10d.reduce_scatter_tensor.default, _contiguous(new, grad), "avg", world, group(marker))
    mean = new.call(c10d.wait_tensor.default, mean)
    if uneven:
        mean = new.call(aten.slice.Tensor, mean, 0, 0, PerRank("rows", rows, world))
    if dim:
        mean = new.call(aten.permute.default, mean, [order.index(d) for d in range(rank)])
    new.finish(_contiguous(new, mean) if uneven or dim else mean)


def _contiguous(new: Replacement, node: Node) -> Node:
    if node.meta["val"].is_contiguous():
        return node
    return new.call(aten.clone.default, node, memory_format=torch.contiguous_format)
