"""How many bytes the halves of a program hold at each of their nodes, from fake values alone: nothing is run.

Storages are counted, not tensors: a view holds what it is a view of. A value is freed after its last use, as the
interpreter does it and as Inductor's code does; results stay. Sizes that are symbols have the values that they were
captured with. What kernels need for themselves, and what an allocator rounds up to, is not counted.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from zerofx import _torch
from zerofx.collectives import P2P, WAIT, collective, first_wait, is_bucket
from zerofx.program import is_view, output_tags, outputs, placeholders, tag

PARAMETERS = ("shard", "replica", "param")
SAME_STORAGE = {WAIT, torch.ops.aten._unsafe_view.default}
"""Ops whose result is their input's storage, though their schemas do not say so."""

Storage = tuple[str, int]
"""A storage by the node that makes it, and its place among the node's results."""


@dataclass
class Life:
    """The storages of one graph of `length` nodes, as far as they come and go there.

    `owners` has the storages that hold each node's value. `spans` has the places of the first and the last node between
    which a storage is there. `held` are the bytes that the caller holds all the while, parameters left out.
    """

    length: int
    sizes: dict[Storage, int] = field(default_factory=dict)
    owners: dict[str, tuple[Storage, ...]] = field(default_factory=dict)
    spans: dict[Storage, tuple[int, int]] = field(default_factory=dict)
    workspace: dict[int, int] = field(default_factory=dict)
    held: int = 0

    def curve(self) -> list[int]:
        """The bytes while each node runs: what it and later nodes read, and what it makes."""
        change = [0] * (self.length + 1)
        for storage, (first, last) in self.spans.items():
            change[first] += self.sizes[storage]
            change[last + 1] -= self.sizes[storage]
        now, found = self.held, list[int]()
        for place in range(self.length):
            now += change[place]
            found.append(now + self.workspace.get(place, 0))
        return found


def forward_life(graph: Graph) -> Life:
    """The forward, or a graph without a backward: the caller holds its inputs."""
    life = _walk(graph)
    inputs = placeholders(graph)
    given = {storage for node in inputs if not is_parameter(node) for storage in life.owners[node.name]}
    return _hold(life, given, {node.name for node in inputs})


def backward_life(graph: Graph, forward: Life, shown: Collection[Node], given: Collection[Node]) -> Life:
    """The backward of a forward of which the caller holds the inputs `given` and the results `shown`.

    Tangents and what the forward saved are freed after their last use.
    """
    life = _walk(graph, forward)
    callers = {storage for node in shown for storage in forward.owners[node.name]}
    life = _hold(life, callers, {node.name for node in given})
    others = callers - {storage for node in given for storage in forward.owners[node.name]}
    life.held = forward.held + sum(forward.sizes[storage] for storage in others)
    return life


def halves(forward: Graph, backward: Graph) -> tuple[Life, Life]:
    """The lives of a program's forward and backward."""
    life = forward_life(forward)
    results = zip(outputs(forward), output_tags(forward), strict=True)
    shown = [node for node, known in results if node is not None and known is not None and known.role == "out"]
    return life, backward_life(backward, life, shown, placeholders(forward))


def deferred_life(graph: Graph, life: Life) -> Life:
    """The life of a backward if gradients were returned whole, and not reduced."""
    reducing = {node for node in graph.nodes if (known := tag(node)) is not None and known.role == "reduce_grad"}
    grads = {read for node in reducing for read in node.all_input_nodes} - reducing
    until_end = {storage for grad in grads for storage in life.owners[grad.name]}
    reduced = {storage for node in reducing for storage in life.owners[node.name]} - until_end
    spans = {
        storage: (first, life.length - 1 if storage in until_end else last)
        for storage, (first, last) in life.spans.items()
        if storage not in reduced
    }
    return replace(life, spans=spans, workspace={})


def is_parameter(node: Node) -> bool:
    known = tag(node)
    return known is not None and known.role in PARAMETERS


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a dense tensor of that size; along dims that it is expanded over there is one element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(_torch.hint(size) for size, stride in sizes if _torch.hint(stride)) * tensor.dtype.itemsize


def _hold(life: Life, callers: Collection[Storage], inputs: Collection[str]) -> Life:
    """Takes out what the caller holds, and counts it in `held`; of inputs that are no `callers` nothing is counted."""
    life.held = sum(life.sizes[storage] for storage in callers if storage in life.sizes)
    life.spans = {
        storage: span for storage, span in life.spans.items() if storage not in callers and storage[0] not in inputs
    }
    return life


def _walk(graph: Graph, before: Life | None = None) -> Life:
    """All storages; inputs that an earlier graph made have its storages."""
    life = Life(len(graph.nodes))
    for place, node in enumerate(graph.nodes):
        owners = _reused(node, life, before)
        if owners is None:
            made = {(node.name, i): size for i, size in _results(node)}
            life.sizes |= made
            owners = tuple(made)
        life.owners[node.name] = owners
        first = 0 if node.op == "placeholder" else place  # inputs are there from the beginning
        for storage in owners:
            life.spans.setdefault(storage, (first, place))
        until = _sent_until(node, place)
        for storage in {storage for read in node.all_input_nodes for storage in life.owners[read.name]}:
            life.spans[storage] = life.spans[storage][0], max(life.spans[storage][1], until)
        if extra := _workspace(node):
            life.workspace[place] = extra
    return life


def _reused(node: Node, life: Life, before: Life | None) -> tuple[Storage, ...] | None:
    """The storages of a node that makes none of its own."""
    if node.op == "output":
        return ()
    if node.op == "placeholder":
        owners = before.owners.get(node.name) if before else None
        if owners is not None and before is not None:
            life.sizes |= {storage: before.sizes[storage] for storage in owners}
        return owners
    if node.target is operator.getitem:
        own = cast(Node, node.args[0]).name, cast(int, node.args[1])
        return (own,) if own in life.sizes else life.owners[own[0]]
    if node.target in SAME_STORAGE or is_view(node):
        return life.owners[node.all_input_nodes[0].name] if node.all_input_nodes else None
    return None


def _results(node: Node) -> Iterator[tuple[int, int]]:
    """Places and bytes of the tensors that a node makes."""
    value = node.meta.get("val")
    for place, part in enumerate(value if isinstance(value, (tuple, list)) else [value]):
        if size := _bytes_in(part):
            yield place, size


def _bytes_in(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes_in, value))
    return nbytes(value) if isinstance(value, torch.Tensor) else 0


def _sent_until(node: Node, place: int) -> int:
    """The place up to which what a node reads is there: that of its wait for a collective, but for copies of parts."""
    if node.target is P2P[0] or not (is_bucket(node) or collective(node)) or node.target is operator.getitem:
        return place
    wait = first_wait(node)
    while node is not wait:
        node, place = node.next, place + 1
    return place


def _workspace(node: Node) -> int:
    """What a reduction by messages holds of other ranks' gradients while it adds them up."""
    if node.target is not P2P[1]:
        return 0
    limit, ranks = cast("tuple[int, int]", (node.args[1], node.args[3]))
    return min(limit, _bytes_in(node.meta["val"]) * max(0, ranks - 2))
