"""The sequence of collectives that a rank issues: what is noted while running, and the digests that ranks compare."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from zerofx.show import DTYPE_NAMES
from zerofx.textgraph import read

PRIME, BASE = 2**61 - 1, 1_000_003
WINDOW = 64  # calls kept, so that ranks at different places can be compared at the same place
MARK_EVERY, MARKS = 1000, 32  # collectives between the places that are kept longer


class Entry(NamedTuple):
    """One collective, which ranks share when all fields are equal."""

    kind: str
    role: str
    numel: int
    dtype: str
    params: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.params[:4]) + (f" and {len(self.params) - 4} more" if len(self.params) > 4 else "")
        return f"{self.kind} ({self.role}) of {names}, {self.numel} elements of {self.dtype}"


def _then(digest: int, entry: Entry) -> int:
    """The rolling digest of a sequence that goes on with this collective."""
    code = hashlib.blake2b(repr(tuple(entry)).encode(), digest_size=8).digest()
    return (digest * BASE + int.from_bytes(code, "big")) % PRIME


class Block:
    """Collectives that are issued in one go: those of one half of a graph, or of one op outside of any graph."""

    _keys = itertools.count()

    def __init__(self, where: str, entries: Sequence[Entry]) -> None:
        self.where, self.entries = where, tuple(entries)
        self.key = next(self._keys)
        self.factor = pow(BASE, len(self.entries), PRIME)
        self.digest = functools.reduce(_then, self.entries, 0)

    def after(self, digest: int) -> int:
        """The digest of a sequence that goes on with this block."""
        return (digest * self.factor + self.digest) % PRIME


class Issued:
    """What a rank notes in one process group; noting must cost next to nothing, a thread reads it later."""

    __slots__ = ("announce", "doing", "note", "queue", "raised")

    def __init__(self) -> None:
        self.queue: deque[Block | None] = deque()
        self.note: Callable[[Block | None], None] = self.queue.append
        self.announce: Callable[[], None] = lambda: None
        self.doing = ""
        self.raised = ""


ISSUED: dict[str, Issued] = {}
"""By name of the process group, where ranks are watched."""


class Call(NamedTuple):
    """The place in the sequence where a block begins, the digest up to there, and the block's key."""

    n: int
    digest: int
    key: int


class Folded:
    """The folded sequence: its length and digest, the last calls, and a few older places."""

    def __init__(self) -> None:
        self.n, self.digest = 0, 0
        self.calls: deque[Call] = deque(maxlen=WINDOW)
        self.marks: deque[tuple[int, int]] = deque(maxlen=MARKS)

    def add(self, block: Block) -> None:
        if self.n // MARK_EVERY != (self.n + len(block.entries)) // MARK_EVERY:
            self.marks.append((self.n, self.digest))
        self.calls.append(Call(self.n, self.digest, block.key))
        self.n, self.digest = self.n + len(block.entries), block.after(self.digest)


def blocks_of(text: str, graph: str, names: Mapping[str, str]) -> dict[str, Block]:
    """The collectives of each half of a program, from its text after the last pass; `names` rename its parameters."""
    program = read(text)
    return {
        part.name: Block(
            f"the {part.name} of {graph}",
            [
                Entry(line.collective, line.role, sum(line.numels), line.dtype, _renamed(line.params, names))
                for line in part.sent
                if line.role
            ],
        )
        for part in program.graphs
    }


def _renamed(params: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(param, param) for param in params)


PARAM: ContextVar[str] = ContextVar("PARAM", default="a parameter")
"""The parameter that is read, or whose gradient is reduced, outside of a graph."""


@contextmanager
def of_param(name: str) -> Iterator[None]:
    """Names the parameter of the collectives that are issued meanwhile."""
    before = PARAM.set(name)
    try:
        yield
    finally:
        PARAM.reset(before)


@functools.lru_cache(maxsize=65536)
def _eager_block(kind: str, role: str, numel: int, dtype: torch.dtype, param: str) -> Block:
    return Block("code outside of a graph", [Entry(kind, role, numel, DTYPE_NAMES[dtype], (param,))])


def note_eager(group: str, kind: str, role: str, numel: int, dtype: torch.dtype) -> None:
    """Notes a collective that is issued outside of a graph; `numel` and `dtype` are those of its result."""
    if issued := ISSUED.get(group):
        issued.note(_eager_block(kind, role, numel, dtype, PARAM.get()))
