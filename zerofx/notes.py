"""Notes the collectives of captured graphs as they run, at the cost of a few microseconds for each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from zerofx._torch import compiled_backward
from zerofx.sequence import ISSUED, Block, Issued, blocks_of


class Halves(NamedTuple):
    """The collectives of a graph's forward, or of a graph that is alone, and of its backward."""

    forward: Block
    backward: Block


def halves_of(text: str, where: str, names: Mapping[str, str] | None = None) -> Halves:
    """The collectives in a program's text after the last pass, with other names for its parameters if given."""
    blocks = blocks_of(text, where, names or {})
    nothing = Block("", ())
    backward = blocks.pop("backward", nothing)
    return Halves(next(iter(blocks.values()), nothing), backward)


def noted(compiled: Callable[..., Any], halves: Callable[[Sequence[Any]], Halves], group: str) -> Callable[..., Any]:
    """A compiled graph that notes its collectives: the forward's when it is called, the backward's when that begins.

    `halves` are those of a call with these arguments.
    """
    known = set[int]()  # halves that have run

    def begin(issued: Issued, half: Block) -> None:
        issued.doing = half.where
        if not half.entries:
            return
        issued.note(half)
        if half.key not in known:
            known.add(half.key)
            issued.announce()

    def call(*args: Any) -> Any:
        issued = ISSUED.get(group)
        if issued is None:
            return compiled(*args)
        forward, backward = halves(args)
        begin(issued, forward)
        results = compiled(*args)
        issued.doing = ""
        if backward.where and (node := compiled_backward(results)):
            node.register_prehook(lambda _: begin(now, backward) if (now := ISSUED.get(group)) else None)
        return results

    return call


@contextmanager
def compiling(group: str) -> Iterator[None]:
    """The time in which a graph is compiled."""
    if (issued := ISSUED.get(group)) is None:
        yield
        return
    before, issued.doing = issued.doing, "compiling a graph"
    try:
        yield
    finally:
        issued.doing = before


def note_call(group: str, error: BaseException | None = None) -> None:
    """Notes that a model is called, or what its call raised."""
    if issued := ISSUED.get(group):
        issued.raised = f"{type(error).__name__}: {error}" if error else ""
