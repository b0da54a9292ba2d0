"""Refuses a graph that writes to a gathered parameter: the write would be lost with the copy that the graph gathers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofx import _torch
from zerofx.capture import nodes_of
from zerofx.gathered import IN_PLACE_OPERATORS, LostWriteError, lost, renorms

UNSHARDS = {torch.ops.zerofx.unshard.default, torch.ops.zerofx.unshard_apart.default}


def refuse_writes(gm: GraphModule, params: Mapping[int, str]) -> None:
    """Raises LostWriteError for a graph of Dynamo in which an op writes to the result of a `zerofx::unshard`.

    `params` names the parameters by their places among the graph's inputs. A node that may write, and is given a
    gathered parameter or a view of one, is run again on the fake tensors with which Dynamo traced it.
    """
    suspects = [node for node in nodes_of(gm) if may_write(node)]
    if not suspects:
        return
    gathered = _gathered(gm, params)
    for node in suspects:
        if name := _written(node, gathered):
            raise LostWriteError(lost(name))


def lent_outputs(gm: GraphModule, params: Mapping[int, str]) -> dict[int, str]:
    """What a graph that Dynamo breaks off hands gathered to the Python code behind it, in words, by its place."""
    if not _torch.is_broken_off(gm):
        return {}
    gathered = _gathered(gm, params)
    values = gm.graph.output_node().args[0]
    storages = [_torch.storage_id(_value(node)) for node in cast("tuple[Any, ...]", values)]
    return {place: gathered[storage] for place, storage in enumerate(storages) if storage in gathered}


def may_write(node: Node) -> bool:
    """Whether a node of a Dynamo graph looks as if it wrote to one of its arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    # A True among the arguments may be that of `relu(x, True)`.
    if node.kwargs.get("out") is not None or any(value is True for value in (*node.args, node.kwargs.get("inplace"))):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(schema.is_mutable for schema in node.target._schemas.values())
    if renorms(node.target, node.args, node.kwargs):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in WRITERS or (name.endswith("_") and not name.endswith("__"))


WRITERS = {"setitem", "__setitem__", *IN_PLACE_OPERATORS, *(name.strip("_") for name in IN_PLACE_OPERATORS)}


def _gathered(gm: GraphModule, params: Mapping[int, str]) -> dict[int, str]:
    """What is gathered in the graph, in words, by its storage."""
    inputs = gm.graph.find_nodes(op="placeholder")
    names = {id(_value(node)): repr(params[place]) for place, node in enumerate(inputs) if place in params}
    return {
        _torch.storage_id(_value(node)): f"parameter {names.get(id(_value(_stored(node))), '')}".strip()
        for node in nodes_of(gm)
        if node.target in UNSHARDS
    }


def _stored(unshard: Node) -> Node:
    """The input of the graph, a DTensor, that is unsharded."""
    node = unshard
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _written(node: Node, gathered: Mapping[int, str]) -> str | None:
    """What the node writes to of all that is gathered; None also for a node that cannot be run again."""
    given = tree_leaves([_value(each) for each in node.all_input_nodes])
    if not any(_torch.storage_id(value) in gathered for value in given):
        return None
    writes = Writes()
    try:
        args, kwargs = map_arg((node.args, node.kwargs), _alias)
        with _torch.fake_mode_of(given), torch.no_grad(), writes:
            _call(node, args, kwargs)
    except Exception:  # such as a shape that the node itself has changed
        return None
    return next((gathered[storage] for storage in writes.storages if storage in gathered), None)


def _alias(node: Node) -> Any:
    """The node's value in tensors whose shapes and gradients can change without a change of Dynamo's own."""
    return tree_map_only(Tensor, lambda value: value.detach(), _value(node))


def _call(node: Node, args: Any, kwargs: Any) -> None:
    if node.op == "call_method":
        getattr(args[0], cast("str", node.target))(*args[1:], **kwargs)
    else:
        cast("Any", node.target)(*args, **kwargs)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the storages that ops write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _torch.by_name(func, args, kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.storages += map(_torch.storage_id, tree_leaves(given.get(argument.name)))
        return func(*args, **(kwargs or {}))
