"""How a collective is read in a graph: alone, or as one member of a bucket."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

import zerofx.transport  # noqa: F401  registers the ops
from zerofx.program import output_node, source, tag

c10d, zerofx_ops = torch.ops._c10d_functional, torch.ops.zerofx
WAIT = c10d.wait_tensor.default
GATHERS = {c10d.all_gather_into_tensor.default}
REDUCTIONS = {c10d.reduce_scatter_tensor.default, c10d.all_reduce.default}
P2P = zerofx_ops.all_gather_p2p.default, zerofx_ops.reduce_scatter_p2p.default
SINGLE = {
    P2P[0]: c10d.all_gather_into_tensor.default,
    P2P[1]: c10d.reduce_scatter_tensor.default,
    c10d.all_gather_into_tensor_coalesced.default: c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default: c10d.reduce_scatter_tensor.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce.default,
}


class Collective(NamedTuple):
    """What one tensor goes through: the op as if it were alone, the tensor, and the op's other arguments."""

    target: Any
    source: Node
    args: tuple[Any, ...]


def collective(node: Node) -> Collective | None:
    """The collective whose result the node is, or None. Of a bucket, the results are its getitem nodes."""
    if node.target in GATHERS or node.target in REDUCTIONS:
        return Collective(node.target, cast(Node, node.args[0]), node.args[1:])
    if node.target is not operator.getitem:
        return None
    bucket, place = cast("tuple[Node, int]", node.args)
    if bucket.target not in SINGLE:
        return None
    members = cast("list[Node]", bucket.args[0])
    own = 2 if bucket.target is P2P[1] else 1  # behind the tensors comes the size of a buffer
    return Collective(SINGLE[bucket.target], members[place], bucket.args[own:])


def is_gather(node: Node) -> bool:
    sent = collective(node)
    return sent is not None and sent.target in GATHERS


def is_reduction(node: Node) -> bool:
    sent = collective(node)
    return sent is not None and sent.target in REDUCTIONS


def issued(graph: Graph, role: str) -> list[Node]:
    """The nodes that issue collectives of that role, in order; a bucket is one."""
    return [
        node
        for node in graph.nodes
        if (known := tag(node)) is not None
        and known.role == role
        and (is_bucket(node) or (collective(node) is not None and node.target is not operator.getitem))
    ]


def chunk_steps(gather: Node) -> list[Node]:
    """What makes the chunks that a gather or a bucket of gathers sends, in order: it reads nothing but stored parts."""
    todo, found = list(gather.all_input_nodes), set[Node]()
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return sorted(found)


def first_wait(node: Node) -> Node:
    """The first node that waits for a collective, or for a member of a bucket."""
    members = list(node.users) if is_bucket(node) else [node]
    waits = {user for member in members for user in member.users if user.target is WAIT}
    return next(later for later in _after(node) if later in waits)


def _after(node: Node) -> Iterator[Node]:
    while node.op != "output":
        node = node.next
        yield node


def results(reduction: Node) -> list[Node]:
    """All that is made of reduced gradients inside their own replacement, in order."""
    tags = {tag(user) for user in reduction.users} | {tag(reduction)} if is_bucket(reduction) else {tag(reduction)}
    found = [reduction]
    for node in found:
        found += [user for user in node.users if user.op == "call_function" and tag(user) in tags]
    return found[1:]


def reduction_of(grad: Node) -> Node | None:
    """The node that issues the reduction of a gradient, from what was made of the result; a bucket is one."""
    node = grad
    while tag(node) == tag(grad) and node.op == "call_function":
        if is_reduction(node):
            return source(node) if node.target is operator.getitem else node
        node = node.all_input_nodes[0]
    return None


def only_leaves(reduction: Node) -> bool:
    """Whether what was reduced is only returned, so that it may come later."""
    known = tag(reduction)
    if known is None or known.role != "reduce_grad":
        return False
    inside = results(reduction)
    end = output_node(reduction.graph)
    return all(user in inside or user is end for node in (reduction, *inside) for user in node.users)


def is_bucket(node: Node) -> bool:
    """Whether the node issues several collectives as one; its results are taken by getitem."""
    return node.target in SINGLE
