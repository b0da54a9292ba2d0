"""Keeps the backward from computing again what would not come out the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from zerofx import _torch
from zerofx.edit import fake_mode, fake_result, like_size
from zerofx.program import mark_saved, output_node, placeholders

aten, higher_order = torch.ops.aten, torch.ops.higher_order


def save_unrepeatable(graph: Graph) -> None:
    """Marks in a joint graph what the partition may save but not compute again.

    These are random numbers, but in regions of activation checkpointing, which keep the generator's state; inputs that
    the forward overwrites, such as buffers: what reads one in the backward has to find what the forward found; and
    collectives of the model's own, in which all ranks would have to decide alike.
    """
    for node in graph.nodes:
        if node.op == "call_function" and (_is_random(node) or _is_collective(node)) and "recompute" not in node.meta:
            mark_saved(node)
    for node in _overwritten(graph):
        _read_copy(graph, node)


def describe_states(graph: Graph) -> None:
    """Describes what the partition puts around random numbers in checkpointed regions, to draw the same ones again.

    It leaves these ops without a value, and calls the fixed size of a generator's state a symbol.
    """
    with fake_mode(graph):
        for node in graph.find_nodes(op="call_function", target=higher_order.run_with_rng_state):
            state = node.args[0]
            state.meta["val"] = like_size(state.meta["val"], (_torch.hint(state.meta["val"].shape[0]),))
            node.meta["val"] = fake_result(node)
        for node in graph.find_nodes(op="call_function", target=higher_order.graphsafe_run_with_rng_state):
            node.meta["val"] = fake_result(node)
        for node in graph.find_nodes(op="call_function", target=higher_order.run_and_save_rng_state):
            state, drawn = fake_result(node)
            node.meta["val"] = (like_size(state, tuple(state.shape)), drawn)
            for part in node.users:
                part.meta["val"] = node.meta["val"][part.args[1]]


def _is_random(node: Node) -> bool:
    """Whether it may draw random numbers, as attention does with dropout."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_collective(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"


def _overwritten(graph: Graph) -> list[Node]:
    """Inputs that the forward writes to, in the graph or, as an output says, after it."""
    inputs = placeholders(graph)
    written = {node.args[0] for node in graph.find_nodes(op="call_function", target=aten.copy_.default)}
    after: list[Any] = [_torch.overwritten(desc) for desc in output_node(graph).meta.get("desc", ())]
    return [node for node in inputs if node in written or node.meta.get("desc", node) in after]


def _read_copy(graph: Graph, node: Node) -> None:
    """Lets all readers of an input read a copy of it, which the backward can read as well."""
    readers = [user for user in node.users if user.op == "call_function" and not _writes(user, node)]
    if not readers or not isinstance(node.meta.get("val"), torch.Tensor):
        return
    with graph.inserting_after(placeholders(graph)[-1]):
        read = graph.call_function(aten.clone.default, (node,))
    with fake_mode(graph):
        read.meta["val"] = node.meta["val"].clone()
    mark_saved(read)
    for user in readers:
        user.replace_input_with(node, read)


def _writes(user: Node, node: Node) -> bool:
    return user.target is aten.copy_.default and user.args[0] is node and node not in user.args[1:]
