"""Notes the collectives of captured graphs as they run, at the cost of a few microseconds for each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zerofx._torch import compiled_backward
from zerofx.sequence import ISSUED, Block, Issued


def noted(compiled: Callable[..., Any], blocks: dict[str, Block], group: str) -> Callable[..., Any]:
    """A compiled graph that notes its collectives: the forward's when it is called, the backward's when that begins."""
    forward, backward = (blocks.get(name, Block("", ())) for name in ("forward", "backward"))
    forward = blocks.get("inference", forward)
    unknown = {forward.key, backward.key}  # halves that have not run yet

    def begin(issued: Issued, half: Block) -> None:
        issued.doing = half.where
        if not half.entries:
            return
        issued.note(half)
        if half.key in unknown:
            unknown.discard(half.key)
            issued.announce()

    def begin_backward(_: Any) -> None:
        if issued := ISSUED.get(group):
            begin(issued, backward)

    def call(*args: Any) -> Any:
        issued = ISSUED.get(group)
        if issued is None:
            return compiled(*args)
        begin(issued, forward)
        results = compiled(*args)
        issued.doing = ""
        if backward.where and (node := compiled_backward(results)):
            node.register_prehook(begin_backward)
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
