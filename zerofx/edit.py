"""Small edits on FX graphs that keep fake values, tags and source notes in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from zerofx.layout import PerRank
from zerofx.program import Tag, placeholders, tag

INHERITED = (
    "nn_module_stack",
    "stack_trace",
    "source_fn_stack",
    "partitioner_tag",
    "seq_nr",
    "recompute",
    "ac_graph_id",
)


def fake_mode(graph: Graph) -> Any:
    """The fake mode of a graph's inputs."""
    return next(v.fake_mode for n in graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode"))


def fake_result(node: Node) -> Any:
    """What the node gives for the fake values of its inputs, with every `PerRank` int at rank 0."""

    def value(arg: Any) -> Any:
        if isinstance(arg, Node):
            return arg.meta["val"]
        return int(arg) if isinstance(arg, PerRank) else arg

    target = cast("Callable[..., Any]", node.target)
    return target(*map_aggregate(node.args, value), **map_aggregate(node.kwargs, value))


def map_per_rank(graph: Graph, change: Callable[[PerRank], int]) -> set[Node]:
    """Replaces every `PerRank` argument in the graph and returns the nodes that had one."""
    ragged = {node for node in graph.nodes if any_arg(node.args, PerRank)}
    for node in ragged:
        node.args = map_aggregate(node.args, lambda a: change(a) if isinstance(a, PerRank) else a)
    return ragged


def any_arg(args: Any, kind: type) -> bool:
    if isinstance(args, (tuple, list)):
        return any(any_arg(arg, kind) for arg in args)
    return isinstance(args, kind)


def call_before(place: Node, target: Any, args: tuple[Any, ...], known: Tag) -> Node:
    """A new tagged call before `place`, with the fake value that it gives and the source notes of `place`."""
    with place.graph.inserting_before(place):
        return _call(place, target, args, known)


def call_after(place: Node, target: Any, args: tuple[Any, ...], known: Tag) -> Node:
    """As `call_before`, behind `place`."""
    with place.graph.inserting_after(place):
        return _call(place, target, args, known)


def _call(place: Node, target: Any, args: tuple[Any, ...], known: Tag) -> Node:
    node = place.graph.call_function(target, args)
    node.meta = {key: place.meta[key] for key in INHERITED if key in place.meta} | {"zerofx": known}
    with fake_mode(place.graph):
        node.meta["val"] = fake_result(node)
    return node


class Replacement:
    """Builds the nodes that take a marker's place: before it, with its tag and its source."""

    def __init__(self, marker: Node) -> None:
        self.marker = marker
        self.graph = marker.graph
        self.fake = fake_mode(self.graph)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.marker):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: self.marker.meta[key] for key in INHERITED if key in self.marker.meta}
        if known := tag(self.marker):
            node.meta["zerofx"] = known
        with self.fake:
            node.meta["val"] = fake_result(node)
        return node

    def finish(self, result: Node) -> None:
        self.marker.replace_all_uses_with(result)
        self.graph.erase_node(self.marker)


def stamp(node: Node, role: str, params: Iterable[str]) -> None:
    node.meta["zerofx"] = Tag(role, tuple(params))


def set_local_rows(graph: Graph, sizes: dict[str, tuple[int, ...]], ragged: set[Node]) -> None:
    """Gives each stored parameter its size in `sizes`, and brings the fake values that follow up to date.

    `ragged` are nodes whose arguments have changed beside.
    """
    stale = set(ragged)
    for node in placeholders(graph):
        known = tag(node)
        if known is not None and known.role == "shard" and tuple(node.meta["val"].shape) != sizes[known.params[0]]:
            with fake_mode(graph):
                _update(node, like_size(node.meta["val"], sizes[known.params[0]]))
            stale.update(node.users)
    stale.update(graph.find_nodes(op="call_function", target=torch.ops.zerofx.reduce_grad.default))
    if not stale:
        return
    with fake_mode(graph):
        for node in graph.nodes:
            if node in stale and node.op == "call_function":
                value = fake_result(node)
                if shapes(value) != shapes(node.meta["val"]):
                    _update(node, value)
                    stale.update(node.users)


def _update(node: Node, value: Any) -> None:
    node.meta["val"] = value
    node.meta.pop("tensor_meta", None)


def like_size(value: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """An empty contiguous tensor of that size, like `value` otherwise."""
    return torch.empty(size, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)


def shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [shapes(v) for v in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
