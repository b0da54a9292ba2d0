"""Decides how each parameter is stored, and makes every read an unshard and every gradient a reduce_grad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from zerofx.edit import fake_mode, fake_result, like_size, stamp
from zerofx.layout import Layout, ParamLayout, PerRank, chunk_rows
from zerofx.mesh import Axis
from zerofx.ops import REPLICATED
from zerofx.program import Invariant, Level, Program, Tag, output_node, output_tags, outputs, placeholders, tag

zerofx = torch.ops.zerofx


def choose_dim(size: tuple[int, ...], world: int, taken: int | None = None) -> int | None:
    """The dim to cut: the first, unless its padding exceeds an eighth of the parameter and another dim pads less.

    Cutting another dim than the first costs a transposing copy, padding costs memory and bytes on the wire. None where
    no dim but one that is `taken` has two rows, or there is nothing to cut.
    """
    cuttable = [d for d, rows in enumerate(size) if rows > 1 and d != taken]
    if not cuttable or prod(size) == 0:
        return None

    def padding(dim: int) -> float:
        return chunk_rows(size[dim], world) * world / size[dim] - 1

    if cuttable[0] == 0 and padding(0) <= 1 / 8:
        return 0
    return min(cuttable, key=padding)


def choose_layout(
    params: Iterable[ParamLayout],
    world: int,
    stage: int,
    persist_below: int,
    taken: Mapping[str, int | None] | None = None,
) -> Layout:
    """The storage of whole parameters over `world` ranks.

    Stage 0 replicates all; otherwise those of `persist_below` elements or more are cut on one dim, which is none that
    is `taken`: by the parameter's name, the dim that tensor-parallel ranks cut.
    """

    def chosen(param: ParamLayout) -> ParamLayout:
        cut = stage > 0 and prod(param.size) >= persist_below
        return replace(param, dim=choose_dim(param.size, world, (taken or {}).get(param.name)) if cut else None)

    return Layout(tuple(chosen(param) for param in params))


@dataclass(frozen=True)
class ChooseLayout:
    """Inputs tagged `param` (whole) become `shard` or `replica`; those that already are one of these stay."""

    name: ClassVar[str] = "choose-layout"
    level: ClassVar[Level] = Level.LOGICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset()
    ensures: ClassVar[frozenset[Invariant]] = frozenset({Invariant.MARKED})
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    stage: int = 3
    persist_below: int = 10_000

    def __call__(self, program: Program) -> None:
        axis = program.mesh.axis("dp")
        names = {
            t.params[0] for g in program.graphs.values() for n in placeholders(g) if (t := tag(n)) and t.role == "param"
        }
        if not names:
            return
        whole = choose_layout([p for p in program.layout if p.name in names], axis.size, self.stage, self.persist_below)
        chosen = {param.name: param for param in whole}
        program.layout = Layout(tuple(chosen.get(param.name, param) for param in program.layout))
        for graph in program.graphs.values():
            order = {node: place for place, node in enumerate(graph.nodes)}
            for node in placeholders(graph):
                known = tag(node)
                if known is not None and known.role == "param":
                    _mark_reads(node, program.layout[known.params[0]], axis, order)
            _mark_gradients(program, graph, axis)


def marker_args(param: ParamLayout, world: int, group: str) -> tuple[int, int, str]:
    """The last arguments of a parameter's markers: dim, rows, group."""
    if param.dim is None:
        return REPLICATED, 0, group
    return param.dim, PerRank("rows", param.size[param.dim], world), group


def _mark_reads(node: Node, param: ParamLayout, axis: Axis, order: dict[Node, int]) -> None:
    """Reads the parameter before its first use, so that no other is gathered meanwhile."""
    graph = node.graph
    if (local := param.local_size(axis.size, 0)) != param.size:
        with fake_mode(graph):
            node.meta["val"] = like_size(node.meta["val"], local)
    node.meta["zerofx"] = Tag("replica" if param.dim is None else "shard", (param.name,))
    first = min(node.users, key=order.__getitem__, default=output_node(graph))
    with graph.inserting_before(first):
        args = (node, list(param.size), *marker_args(param, axis.size, axis.group))
        read = graph.call_function(zerofx.unshard.default, args)
    stamp(read, "unshard", (param.name,))
    with fake_mode(graph):
        read.meta["val"] = fake_result(read)
    node.replace_all_uses_with(read, delete_user_cb=lambda user: user is not read)


def _mark_gradients(program: Program, graph: Graph, axis: Axis) -> None:
    out, values = output_node(graph), outputs(graph)
    for place, known in enumerate(output_tags(graph)):
        grad = values[place]
        if known is None or known.role != "grad" or grad is None or grad.target is zerofx.reduce_grad.default:
            continue
        param = program.layout[known.params[0]]
        with graph.inserting_after(placeholders(graph)[-1] if grad.op == "placeholder" else grad):
            args = (grad, *marker_args(param, axis.size, axis.group))
            reduced = graph.call_function(zerofx.reduce_grad.default, args)
        stamp(reduced, "reduce_grad", (param.name,))
        with fake_mode(graph):
            reduced.meta["val"] = fake_result(reduced)
        values[place] = reduced
    out.args = (tuple(values),)
