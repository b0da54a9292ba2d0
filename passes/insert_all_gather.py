"""Replaces each unshard by an all-gather of the parameter's padded chunks."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from zerofx.edit import Replacement
from zerofx.layout import ParamLayout, PerRank
from zerofx.program import (
    Invariant,
    Level,
    Program,
    group,
    is_kept,
    is_view,
    marked_param,
    output_tags,
    outputs,
    source,
)

aten, c10d, zerofx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zerofx


@dataclass(frozen=True)
class InsertAllGather:
    """Of a replicated parameter, and on one rank, the stored tensor itself is read; and what is kept, where it is."""

    name: ClassVar[str] = "insert-all-gather"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED, Invariant.MERGED})
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.GATHERED, Invariant.WAITED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED})
    numerics: ClassVar[str] = "same"

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            seen = {v for v, t in zip(outputs(graph), output_tags(graph), strict=True) if t and t.role == "out"}
            for marker in graph.find_nodes(op="call_function", target=zerofx.unshard.default):
                param = program.layout[marked_param(marker)]
                world = program.mesh.axis_of_group(group(marker)).size
                if param.dim is not None and world > 1 and not is_kept(marker):
                    _gather(marker, param, world)
                else:
                    _read(marker, may_alias=not _reaches(marker, seen))


def _gather(marker: Node, param: ParamLayout, world: int) -> None:
    chunk, dim = source(marker), param.dim
    assert dim is not None
    new, rank = Replacement(marker), len(param.size)
    order = [dim, *(d for d in range(rank) if d != dim)]
    uneven = param.size[dim] % world != 0
    if uneven:
        padding = [0, 0] * (rank - 1 - dim) + [0, PerRank("pad", param.size[dim], world)]
        chunk = new.call(aten.constant_pad_nd.default, chunk, padding)
    if dim:
        chunk = new.call(aten.permute.default, chunk, order)
        chunk = new.call(aten.clone.default, chunk, memory_format=torch.contiguous_format)
    whole = new.call(c10d.all_gather_into_tensor.default, chunk, world, group(marker))
    whole = new.call(c10d.wait_tensor.default, whole)
    if uneven:
        whole = new.call(aten.slice.Tensor, whole, 0, 0, param.size[dim])
    if dim:
        whole = new.call(aten.permute.default, whole, [order.index(d) for d in range(rank)])
        whole = new.call(aten.clone.default, whole, memory_format=torch.contiguous_format)
    new.finish(whole)


def _read(marker: Node, may_alias: bool) -> None:
    new, stored = Replacement(marker), source(marker)
    new.finish(stored if may_alias else new.call(aten.clone.default, stored))


def _reaches(node: Node, ends: set[Node | None]) -> bool:
    """Whether a user's output may be a view of the node."""
    if node in ends:
        return True
    return any(_reaches(user, ends) for user in node.users if is_view(user) or user.target is operator.getitem)
