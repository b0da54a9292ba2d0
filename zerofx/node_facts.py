"""What each node of a forward graph costs and touches, found by running it without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofx import _torch
from zerofx.kernels import ROWS, VIEWS, nbytes, op_flops
from zerofx.planning.hardware import Hardware
from zerofx.whole_graph import WholeGraph

BACKWARD_OF_PRODUCT, BACKWARD_OF_OTHERS = 2.0, 1.5
"""The time of a backward over that of its forward: two matrix products for each, and somewhat more bytes."""


@dataclass
class Facts:
    """One node.

    `seconds` are those of forward and backward by the roofline, `nbytes` what its results take, without views.
    `storages` are those of the value, and `written` those that it writes to.
    """

    value: Any = None
    seconds: float = 0.0
    flops: float = 0.0
    nbytes: int = 0
    storages: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    random: bool = False

    @property
    def crosses(self) -> bool:
        """Whether the value can be sent from one rank to another."""
        return isinstance(self.value, Tensor) and not isinstance(self.value, DTensor)


@dataclass
class _Meter(TorchDispatchMode):
    """Adds up what the ops of one node take."""

    machine: Hardware
    seconds: float = 0.0
    flops: float = 0.0
    nbytes: int = 0
    written: set[int] = field(default_factory=set)
    random: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        args, kwargs, made_of = tree_map_only(DTensor, _torch.local_tensor, (args, kwargs, result))
        given = _torch.by_name(op, args, kwargs or {})
        self.random |= torch.Tag.nondeterministic_seeded in op.tags and given.get("dropout_p", 1.0) != 0.0
        for argument in op._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= {_torch.storage_id(leaf) for leaf in tree_leaves(given.get(argument.name))}
        if _torch.is_view(op) or op in VIEWS:
            return result
        made = sum(map(nbytes, tree_leaves(made_of)))
        read = tree_leaves((args, kwargs or {}))
        moved = 2 * made if op in ROWS else made + sum(map(nbytes, read))
        flops = op_flops(op, args, kwargs or {}, made_of)
        dtype = next((leaf.dtype for leaf in read if isinstance(leaf, Tensor)), torch.float32)
        seconds = self.machine.kernel_seconds(flops, moved, dtype) - self.machine.launch
        self.seconds += seconds * (1 + (BACKWARD_OF_PRODUCT if flops else BACKWARD_OF_OTHERS))
        self.flops += flops
        self.nbytes += made
        return result


def facts_of(whole: WholeGraph, machine: Hardware) -> dict[Node, Facts]:
    """The facts of all nodes but the output. Values are tensors without data, which are kept as long as the facts."""
    found = dict[Node, Facts]()
    values: Any = [node.meta.get("example_value") for node in whole.inputs]
    with _torch.fake_mode_of(values), torch.enable_grad():
        for node in whole.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder":
                value = node.meta["example_value"]
                if isinstance(whole.inputs[node].value, DeviceMesh):
                    value = whole.inputs[node].value  # Dynamo has an object of its own for it
                found[node] = Facts(value, storages=_storages(value))
                continue
            if node.op == "get_attr":
                found[node] = Facts(_attribute(whole.module, str(node.target)))
                continue
            found[node] = _facts_of(node, found, machine)
    return found


def _facts_of(node: Node, found: dict[Node, Facts], machine: Hardware) -> Facts:
    args, kwargs = (cast("Any", map_arg(part, lambda n: found[n].value)) for part in (node.args, node.kwargs))
    meter = _Meter(machine)
    try:
        with meter:
            value = _function(node, args)(*_arguments(node, args), **kwargs)
    except Exception:  # a function of Dynamo's that runs in its tracing only: its results say what it takes at least
        value = node.meta.get("example_value")
        moved = sum(map(nbytes, tree_leaves((args, value))))
        seconds = machine.kernel_seconds(0.0, moved, torch.float32) - machine.launch
        meter = _Meter(machine, seconds * (1 + BACKWARD_OF_OTHERS), nbytes=sum(map(nbytes, tree_leaves(value))))
    own = _storages(value)
    written = frozenset(meter.written & {each for n in node.all_input_nodes for each in found[n].storages})
    return Facts(value, meter.seconds, meter.flops, meter.nbytes, own, written, meter.random)


def _function(node: Node, args: Any) -> Callable[..., Any]:
    """What a node calls: of a region, such as one of activation checkpointing, the graph inside."""
    if node.op == "call_method":
        return cast("Callable[..., Any]", getattr(args[0], str(node.target)))
    if args and isinstance(args[0], GraphModule):
        return args[0].forward
    return cast("Callable[..., Any]", node.target)


def _arguments(node: Node, args: Any) -> tuple[Any, ...]:
    bound = node.op == "call_method" or (args and isinstance(args[0], GraphModule))
    return tuple(args[1:]) if bound else args


def _attribute(module: GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _storages(value: Any) -> frozenset[int]:
    return frozenset(storage for storage in map(_torch.storage_id, tree_leaves(value)) if storage)
