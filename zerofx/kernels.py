"""Groups the ops of a graph into the kernels that a compiler makes of them, and counts their FLOP and bytes."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from zerofx._torch import OpOverload, by_name, is_view, local_tensor
from zerofx.collectives import WAIT, is_bucket
from zerofx.layout import PerRank
from zerofx.planning.rates import ATTENTION, CONVOLUTION, PRODUCT

aten = torch.ops.aten
VIEWS = {aten._unsafe_view.default}
"""Ops whose result is their input's data, though their schema does not say so."""
ROWS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
"""Ops that read of their first input as much as they write."""
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""Programs are traced on the CPU; what stands there for a GPU's op has its formula."""
ATTENTIONS = {op for op in flop_registry if "scaled_dot_product" in str(op)} | set(CPU_ATTENTION)
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_backward}


@dataclass
class Kernel:
    """Ops that run as one: a matrix product, attention or convolution alone, or a chain of all else.

    `nbytes` is what goes to and from memory: a chain's inputs and outputs, but not what is between its ops.
    """

    nodes: list[Node] = field(default_factory=list)
    flops: float = 0
    nbytes: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return "+".join(str(node.target).removeprefix("aten.").split(".")[0] for node in self.nodes)

    @property
    def op(self) -> str:
        """Which of `zerofx.planning.rates`' kinds of ops it is."""
        packets = {getattr(node.target, "overloadpacket", node.target) for node in self.nodes}
        if packets & CONVOLUTIONS:
            return CONVOLUTION
        return ATTENTION if packets & ATTENTIONS else PRODUCT


Step = Kernel | Node
"""What is issued: a kernel, a collective or a wait."""


def steps(graph: Graph) -> list[Step]:
    """The kernels, collectives and waits of a graph, in the order in which they are issued.

    A chain is what is limited by memory and connected, as far as no more matrix products, collectives and waits are
    behind one of its ops than behind another, on the longest way: what is between two ops of a chain is in it. That is
    all that may be fused, and more than some compilers do. As in Inductor, a kernel has the place of its first op, and
    what it reads comes before it.
    """
    order = [node for node in graph.nodes if node.op == "call_function" and not is_free(node)]
    made = _chains(order)
    for kernel in {id(step): step for step in made.values() if isinstance(step, Kernel)}.values():
        _count(kernel)
    return list(_sorted(order, made))


def is_collective(node: Node) -> bool:
    """Whether the node issues a collective; a bucket is one."""
    namespace = str(node.target).split(".")[0]
    return is_bucket(node) or (namespace == "_c10d_functional" and node.target is not WAIT)


def is_free(node: Node) -> bool:
    """Whether the node moves no data: it only names a part of what another one made."""
    if node.target is operator.getitem or node.target in VIEWS:
        return True
    return node.target is not WAIT and isinstance(node.target, OpOverload) and is_view(node.target)


def owner(node: Node) -> Node:
    """The node whose kernel makes the data that a node stands for; an input is its own."""
    while node.op == "call_function" and is_free(node):
        node = cast(Node, node.args[0])
    return node


def nbytes(value: Any) -> int:
    """Bytes of a fake value: all tensors in it, and of DTensors this rank's part."""
    if isinstance(value, DTensor):
        return nbytes(local_tensor(value))
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.itemsize
    return sum(map(nbytes, value)) if isinstance(value, (tuple, list)) else 0


def flops(node: Node) -> float:
    """FLOP of a matrix product, convolution or attention; 0 for all else, whose limit is memory.

    The formulas are those of torch.utils.flop_counter: 2 for each multiplication and addition. Causal attention has
    half of them, since kernels leave out the blocks that the mask covers.
    """
    if _formula(node.target) is None:
        return 0
    args, kwargs = (map_aggregate(part, _value) for part in (node.args, node.kwargs))
    return op_flops(node.target, cast("Any", args), cast("Any", kwargs), node.meta["val"])


def op_flops(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """FLOP of one call of an op, as in `flops`; of tensors only shapes are read."""
    formula = _formula(op)
    if formula is None:
        return 0
    counted = float(formula(*args, **kwargs, out_val=result))
    causal = isinstance(op, OpOverload) and by_name(op, args, kwargs).get("is_causal") is True
    return counted / 2 if causal else counted


def _formula(target: Any) -> Callable[..., Any] | None:
    packet: Any = getattr(target, "overloadpacket", target)
    return cast("Callable[..., Any] | None", flop_registry.get(CPU_ATTENTION.get(packet, packet)))


def _value(arg: Any) -> Any:
    if isinstance(arg, Node):
        return arg.meta.get("val")
    return int(arg) if isinstance(arg, PerRank) else arg


def _is_alone(node: Node) -> bool:
    return node.target is WAIT or is_collective(node) or _formula(node.target) is not None


def _chains(order: list[Node]) -> dict[Node, Step]:
    """What each op is issued as."""
    behind: dict[Node, int] = {}
    made: dict[Node, Step] = {}
    for node in order:
        read = [source for source in map(owner, node.all_input_nodes) if source in made]
        behind[node] = max((behind[source] + _is_alone(source) for source in read), default=0)
        if node.target is WAIT or is_collective(node):
            made[node] = node
            continue
        made[node] = kernel = Kernel([node], flops(node), dtype=_dtype(node))
        if _is_alone(node):
            continue
        for source in read:
            joined = made[source]
            if isinstance(joined, Node) or joined is kernel or _is_alone(source) or behind[source] < behind[node]:
                continue
            kernel.nodes[:0] = joined.nodes
            made.update(dict.fromkeys(joined.nodes, kernel))
    return made


def _dtype(node: Node) -> torch.dtype:
    """The dtype in which a node computes: that of the first tensor that it reads."""
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return next((value.dtype for value in values if isinstance(value, torch.Tensor)), torch.float32)


def _count(kernel: Kernel) -> None:
    """Adds up what a kernel reads from outside, no tensor more than once, and what it writes for outside."""
    inside = set(kernel.nodes)
    read: dict[Node, int] = defaultdict(int)
    whole: dict[Node, int] = {}
    for node in kernel.nodes:
        for place, source in enumerate(node.all_input_nodes):
            data = owner(source)
            if data in inside:
                continue
            rows = place == 0 and node.target in ROWS
            read[data] += nbytes((node if rows else source).meta.get("val"))
            whole[data] = nbytes(data.meta.get("val"))
    written = sum(_written(node, inside) for node in kernel.nodes)
    kernel.nbytes = sum(min(size, whole[data]) for data, size in read.items()) + written


def _written(node: Node, inside: set[Node]) -> int:
    """Bytes of a node's results that are read outside of its kernel."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return sum(nbytes(part.meta.get("val")) for part in node.users if _leaves(part, inside))
    return nbytes(value) if _leaves(node, inside) else 0


def _leaves(node: Node, inside: set[Node]) -> bool:
    return any(
        _leaves(user, inside) if user.op == "call_function" and is_free(user) else user not in inside
        for user in node.users
    )


def _sorted(order: list[Node], made: dict[Node, Step]) -> Iterator[Step]:
    """In the order of the first op, and after all that is read."""
    done = set[int]()
    for first in order:
        todo = [made[first]]
        while todo:
            step = todo[-1]
            if id(step) in done:
                todo.pop()
                continue
            nodes = step.nodes if isinstance(step, Kernel) else [step]
            sources = [made[s] for n in nodes for s in map(owner, n.all_input_nodes) if s in made]
            missing = [source for source in sources if source is not step and id(source) not in done]
            if missing:
                todo += reversed(missing)
                continue
            done.add(id(step))
            todo.pop()
            yield step
