"""What a half of a step does, as rows of numbers: short to keep, and longer for more blocks without another trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.fx import Graph, Node

from zerofx.collectives import SINGLE, WAIT, collective, is_bucket
from zerofx.kernels import Kernel, nbytes, owner, steps
from zerofx.liveness import Life, Storage, halves
from zerofx.program import Program, group, output_tags, outputs, tag

Numbers = NDArray[np.float64]
GRADIENTS, ACTIVATIONS, BUCKETS, WORKSPACE = range(4)
KINDS = ("gradients", "activations", "buckets", "workspace")
"""What the bytes are that come and go in a step: the columns of a track of memory."""
FLOPS, BYTES, WAITED, NODES = range(4)
"""The columns of a track of time: FLOP, bytes of a kernel or of what is sent, how many collectives ago that was issued
which is waited for, and the nodes of the graph that it stands for.
"""


class DepthError(ValueError):
    """Two tracks of different depth do not differ by what a block adds."""


@dataclass(frozen=True)
class Track:
    """Rows in the order in which things happen: a key, which says what happens, and its numbers."""

    keys: tuple[Any, ...]
    rows: Numbers

    def deeper(self, next_deeper: Track, more: int) -> Track:
        """The track of a model with `more` blocks more than this one's, from that of a model with one more.

        What is in both is kept, with numbers that grow by the same from block to block; what the other one has besides
        is what a block adds, and comes once for each. Raises DepthError where this one has rows that the other lacks.
        """
        keys: list[Any] = []
        rows: list[Numbers] = []
        matcher = SequenceMatcher(None, self.keys, next_deeper.keys, autojunk=False)
        for kind, start, stop, other_start, other_stop in matcher.get_opcodes():
            if kind == "equal":
                here, there = self.rows[start:stop], next_deeper.rows[other_start:other_stop]
                keys += self.keys[start:stop]
                rows.append(here + more * (there - here))
            elif kind == "insert":
                keys += next_deeper.keys[other_start:other_stop] * more
                rows += [next_deeper.rows[other_start:other_stop]] * more
            else:
                raise DepthError("a model with one block more lacks what the smaller one does")
        return Track(tuple(keys), np.concatenate(rows) if rows else self.rows)

    def larger(self, other: Track, times: float) -> Track:
        """The track whose numbers differ from this one's by `times` what the other's do.

        Raises DepthError where something else happens in the other one.
        """
        if [_happens(key) for key in self.keys] != [_happens(key) for key in other.keys]:
            raise DepthError("in the two tracks not the same happens")
        return Track(self.keys, self.rows + times * (other.rows - self.rows))


def _happens(key: Any) -> Any:
    """What a key says but for numbers."""
    return tuple(part for part in key if isinstance(part, str))


@dataclass(frozen=True)
class Half:
    """The forward or the backward: bytes that come and go, kernels and collectives, and what is held all the while.

    `memory` has for each node what its bytes change by, of each of `KINDS`; workspace is there at that node only.
    """

    memory: Track
    time: Track
    held: float = 0.0

    def deeper(self, next_deeper: Half, more: int) -> Half:
        """See `Track.deeper`."""
        memory = self.memory.deeper(next_deeper.memory, more)
        held = self.held + more * (next_deeper.held - self.held)
        return Half(memory, self.time.deeper(next_deeper.time, more), held)

    def larger(self, other: Half, times: float) -> Half:
        """See `Track.larger`."""
        held = self.held + times * (other.held - self.held)
        return Half(self.memory.larger(other.memory, times), self.time.larger(other.time, times), held)

    def curve(self) -> Numbers:
        """The bytes of each of `KINDS` while each node runs; of activations also what is held."""
        rows = self.memory.rows
        found = rows.cumsum(axis=0)
        found[:, WORKSPACE] = rows[:, WORKSPACE]
        found[:, ACTIVATIONS] += self.held
        return found

    def scattered(self, share: float) -> Half:
        """The half in which gradients are reduce-scattered in place of all-reduced: `share` of their bytes stays."""
        memory = self.memory.rows.copy()
        memory[:, GRADIENTS] *= share
        keys = [
            ("send", key[1], "reduce_scatter", key[3]) if key[0] == "send" and key[1] == "reduce_grad" else key
            for key in self.time.keys
        ]
        return Half(Track(self.memory.keys, memory), Track(tuple(keys), self.time.rows), self.held)

    def sliced(self, parts: int) -> Half:
        """The half of a rank that computes and holds one of that many parts of everything."""
        time = self.time.rows.copy()
        time[:, [FLOPS, BYTES]] /= parts
        memory = Track(self.memory.keys, self.memory.rows / parts)
        return Half(memory, Track(self.time.keys, time), self.held)

    @property
    def flops(self) -> float:
        return float(self.time.rows[:, FLOPS].sum())


@dataclass(frozen=True)
class Tape:
    """The two halves of one micro-batch."""

    forward: Half
    backward: Half

    @property
    def model_flops(self) -> float:
        """FLOP of forward and backward where nothing is computed again: a backward has twice those of a forward."""
        return 3 * self.forward.flops

    def deeper(self, next_deeper: Tape, more: int) -> Tape:
        """See `Track.deeper`."""
        return Tape(self.forward.deeper(next_deeper.forward, more), self.backward.deeper(next_deeper.backward, more))

    def larger(self, other: Tape, times: float) -> Tape:
        """See `Track.larger`."""
        return Tape(self.forward.larger(other.forward, times), self.backward.larger(other.backward, times))

    def scattered(self, share: float) -> Tape:
        """See `Half.scattered`."""
        return Tape(self.forward.scattered(share), self.backward.scattered(share))


def tape_of(program: Program) -> Tape:
    """The tape of a program that is cut into forward and backward, behind its physical passes."""
    forward, backward = program.graphs["forward"], program.graphs["backward"]
    lives = halves(forward, backward)
    saved = _kinds(forward, lambda _: ACTIVATIONS)
    return Tape(
        Half(_memory(forward, lives[0], saved), _time(forward), float(lives[0].held)),
        Half(_memory(backward, lives[1], _kinds(backward, saved)), _time(backward), float(lives[1].held)),
    )


def _kinds(graph: Graph, saved: Callable[[Storage], int]) -> Callable[[Storage], int]:
    """Says what a storage of a graph is, from the node that makes it; those from an earlier graph are `saved`."""
    made = {node.name: node for node in graph.nodes if node.op != "placeholder" or tag(node)}
    returned = {
        _maker(value).name
        for value, known in zip(outputs(graph), output_tags(graph), strict=True)
        if value is not None and known is not None and known.role in ("grad", "partial")
    }
    whole = set[str]()
    for node in graph.nodes:
        known = tag(node)
        if known is not None and known.role == "reduce_grad" and (is_bucket(node) or collective(node) is not None):
            whole |= {_maker(source).name for source in node.all_input_nodes}

    def kind(storage: Storage) -> int:
        node = made.get(storage[0])
        if node is None:
            return saved(storage)
        known = tag(node)
        if node.name in returned:
            return GRADIENTS
        if node.name in whole or (known is not None and known.role in ("unshard", "reduce_grad", "whole")):
            return BUCKETS
        return ACTIVATIONS

    return kind


def _maker(node: Node) -> Node:
    """The node that makes the storage which a value is in, as far as a half can tell."""
    while node.op == "call_function" and node.target is WAIT:
        node = node.all_input_nodes[0]
    return owner(node)


def _memory(graph: Graph, life: Life, kind: Callable[[Storage], int]) -> Track:
    rows = np.zeros((len(graph.nodes) + 1, len(KINDS)))
    for storage, (first, last) in life.spans.items():
        rows[first, kind(storage)] += life.sizes[storage]
        rows[last + 1, kind(storage)] -= life.sizes[storage]
    for place, size in life.workspace.items():
        rows[place, WORKSPACE] = size
    return Track(tuple(_key(node) for node in graph.nodes), rows[:-1])


def _key(node: Node) -> tuple[Any, ...]:
    known = tag(node)
    value = node.meta.get("val")
    size = 0 if is_bucket(node) else nbytes(value)
    return (node.op if node.op != "call_function" else str(node.target), known.role if known else "", size)


def _time(graph: Graph) -> Track:
    keys: list[Any] = []
    rows: list[Sequence[float]] = []
    issued: dict[Node, int] = {}
    covered = 0
    place = {node: at for at, node in enumerate(graph.nodes)}
    for step in steps(graph):
        last = max(place[node] for node in (step.nodes if isinstance(step, Kernel) else [step])) + 1
        more, covered = max(0, last - covered), max(covered, last)
        if isinstance(step, Kernel):
            keys.append(("kernel", step.op, str(step.dtype), step.name, step.flops, step.nbytes))
            rows.append((step.flops, step.nbytes, 0, more))
            continue
        known = tag(step)
        role = known.role if known else ""
        if step.target is WAIT:
            sent = issued[owner(step.all_input_nodes[0])]
            keys.append(("wait", role))
            rows.append((0, 0, len(issued) - sent, more))
            continue
        issued[step] = len(issued)
        keys.append(("send", role, _kind(step), group(step)))
        rows.append((0, _whole_bytes(step), 0, more))
    return Track(tuple(keys), np.array(rows, dtype=np.float64).reshape(-1, 4))


def _kind(node: Node) -> str:
    target: Any = node.target
    return str(SINGLE.get(target, target)).split(".")[1]


def _whole_bytes(node: Node) -> float:
    gathered: Iterable[Node] = [node] if _kind(node).startswith("all_gather") else node.all_input_nodes
    return float(sum(nbytes(each.meta["val"]) for each in gathered))
