"""What a pass edits: the graphs of one compiled region, and the facts that hold about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zerofx.layout import Layout
from zerofx.mesh import Mesh


class Level(Enum):
    """Where a program is on its way: before or after it is cut into forward and backward."""

    LOGICAL = "logical"
    PHYSICAL = "physical"


class Invariant(Enum):
    """What a pass may rely on; each is checked after every pass while it holds (`zerofx.verify`)."""

    MARKED = "parameters are read only by zerofx::unshard and their gradients leave only through zerofx::reduce_grad"
    MERGED = "each parameter is unsharded at most once a graph and its gradient reduced at most once"
    RELEASED = "no gathered parameter is saved for the backward, but for those chosen to be kept, gathered once"
    KEPT = "no parameter is gathered again in the backward"
    GATHERED = "no zerofx::unshard is left, and each shard is read only by its own all-gather"
    REDUCED = "no zerofx::reduce_grad is left, and each gradient passes exactly one reduction"
    WAITED = "the result of a collective is read only by wait_tensor"
    UPDATED = "each gradient that is handed over is its parameter's only one, and no part of that is read behind it"
    BOUNDED = "no more all-gathers and reductions are under way at a time than the schedule allows"


@dataclass(frozen=True)
class Tag:
    """What zerofx knows of one node; the only thing it puts in `node.meta`.

    Roles of inputs: `shard`, `replica` (a parameter as this rank stores it), `param` (a whole one), `whole` (what
    stands beside one: the parameter gathered by an earlier graph, or a gradient of this rank alone), `tangent`.
    Roles of outputs: `out` (seen by the user), `saved` (kept for the backward), `grad`, `partial` (a gradient of this
    rank alone, which is reduced later).
    Roles of other nodes: `unshard` and `reduce_grad`, for the marker and all that replaces it; `update` for what takes
    gradients in the backward.
    """

    role: str
    params: tuple[str, ...] = ()


class HandedThrough:
    """The value of an input that a graph only hands through, such as a DTensor's mesh."""


@dataclass(frozen=True)
class GeneratorOn:
    """The value of an input that is the state of a generator of random numbers, of a device that need not be there."""

    device: torch.device


def tag(node: Node) -> Tag | None:
    """The tag of a node, or None. Output nodes have `output_tags` instead."""
    return None if node.op == "output" else cast("Tag | None", node.meta.get("zerofx"))


def output_node(graph: Graph) -> Node:
    (node,) = graph.find_nodes(op="output")
    return cast(Node, node)


def outputs(graph: Graph) -> list[Node | None]:
    """The flat outputs of a graph."""
    return list(cast("tuple[Node | None, ...]", output_node(graph).args[0]))


def output_tags(graph: Graph) -> tuple[Tag | None, ...]:
    """One tag for each flat output, in order."""
    return cast("tuple[Tag | None, ...]", output_node(graph).meta["zerofx"])


def source(node: Node) -> Node:
    """The node that a marker or collective reads: its first argument."""
    return cast(Node, node.args[0])


CASTS = {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def cast_to(node: Node) -> torch.dtype | None:
    """The dtype to which a node casts a tensor, if it does nothing else."""
    if node.target is torch.ops.aten._to_copy.default and node.kwargs.keys() == {"dtype"}:
        return cast("torch.dtype", node.kwargs["dtype"])
    return cast("torch.dtype", node.args[1]) if node.target is torch.ops.prims.convert_element_type.default else None


def stored_part(marker: Node) -> Node:
    """The stored part that an unshard reads, cast or not."""
    node = source(marker)
    return source(node) if node.target in CASTS else node


def marked_param(node: Node) -> str:
    """The name of the parameter that a marker belongs to."""
    (name,) = cast(Tag, tag(node)).params
    return name


def is_kept(node: Node) -> bool:
    """Whether an unshard reads a parameter that was gathered in an earlier graph."""
    known = tag(stored_part(node))
    return known is not None and known.role == "whole"


def group(node: Node) -> str:
    """The group of a marker or collective: its last argument."""
    return cast(str, node.args[-1])


# Larger than the number of any activation-checkpoint region, so that no region's boundary makes a gather a saved value.
REGION = 1_000_000_000


def mark_recomputed(node: Node) -> None:
    """Tells the partition not to save the node's value for the backward, but to compute it again there."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = REGION


def mark_saved(node: Node) -> None:
    """Tells the partition to save the node's value if the backward needs it, and never to compute it again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = REGION


def is_saved(node: Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def is_recomputed(node: Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def is_view(node: Node) -> bool:
    """Whether the node's result may share its input's storage."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def placeholders(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="placeholder"))


def pair_saved(saved: Sequence[str], inputs: Sequence[Node]) -> dict[Node, int]:
    """Which saved value, by its place, each input of the backward is: the one of its name, or else the next of those
    that a pass has put a node of another name in the place of.
    """
    named = {node: saved.index(node.name) for node in inputs if node.name in saved}
    renamed = iter([place for place in range(len(saved)) if place not in named.values()])
    others = (node for node in inputs if node not in named and (tag(node) or Tag("")).role != "tangent")
    return named | dict(zip(others, renamed, strict=False))


@dataclass
class Program:
    """The graphs under their names: `joint` at the logical level, `forward` and `backward` at the physical one,
    `inference` alone at both for a region that has no backward, and `gather` or `reduce` alone, at the physical one,
    for what is moved beside a model's graphs.

    `under_way` holds how many collectives of a role the schedule allows to be issued and not waited for, and `kept` the
    parameters that stay gathered for the backward where others are released.

    Graphs are those of rank 0 with `PerRank` ints where ranks differ, so that all ranks share one program.
    """

    graphs: dict[str, Graph]
    mesh: Mesh
    layout: Layout
    level: Level = Level.LOGICAL
    holds: set[Invariant] = field(default_factory=set)
    under_way: dict[str, int] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()


def stored_parameters(program: Program) -> Iterator[tuple[Graph, Node, Tag]]:
    """The inputs that are parameters, each with its graph and tag."""
    for graph in program.graphs.values():
        for node in placeholders(graph):
            known = tag(node)
            if known is not None and known.role in ("shard", "replica", "param"):
                yield graph, node, known


def gradients(program: Program, role: str = "grad") -> Iterator[tuple[Node, Tag]]:
    """The outputs that are gradients of parameters, each with its tag; with the role `partial`, those of one rank."""
    for graph in program.graphs.values():
        for value, known in zip(outputs(graph), output_tags(graph), strict=True):
            if value is not None and known is not None and known.role == role:
                yield value, known


def handed_over(program: Program) -> Iterator[tuple[Node, Tag]]:
    """The gradients that a backward hands over to update parameters, each with the tag that its output would have."""
    for graph in program.graphs.values():
        for node in graph.find_nodes(op="call_function", target=torch.ops.zerofx.update.default):
            for value, name in zip(cast("list[Node]", node.args[0]), cast("list[str]", node.args[2]), strict=False):
                yield value, Tag("grad", (name,))


def is_saved_only(graph: Graph, node: Node) -> bool:
    """Whether the graph returns the node for its backward and for nothing else, if at all."""
    pairs = zip(outputs(graph), output_tags(graph), strict=True)
    return all(known is not None and known.role == "saved" for value, known in pairs if value is node)
