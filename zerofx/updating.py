"""`zerofx::update`: the op by which a backward hands reduced gradients to what updates their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Receive = Callable[[Sequence[str], Sequence[Tensor]], None]
"""Takes the gradients of parameters, named as in the graph; they are the graph's again when it returns."""


class Receiving:
    """What receives the gradients of the backward that is under way. Backwards run one at a time."""

    def __init__(self) -> None:
        self.receive: Receive | None = None

    @contextmanager
    def by(self, receive: Receive) -> Iterator[None]:
        """Lets that receive the gradients meanwhile."""
        before, self.receive = self.receive, receive
        try:
            yield
        finally:
            self.receive = before

    def around(self, node: torch.autograd.graph.Node, receive: Receive) -> None:
        """Lets that receive the gradients of the backward that runs in the node."""

        def begin(_: Any) -> None:
            self.receive = receive

        def end(*_: Any) -> None:
            self.receive = None

        node.register_prehook(begin)
        node.register_hook(end)


RECEIVING = Receiving()


# Not a custom_op: that would take every hand-over for a write, also where the gradient waits for another graph's.
torch.library.define("zerofx::update", "(Tensor[] grads, Tensor(a!)[] stored, str[] names) -> ()")


@torch.library.impl("zerofx::update", "default")
def update(grads: Sequence[Tensor], stored: Sequence[Tensor], names: Sequence[str]) -> None:
    """Hands over the reduced gradients of parameters, to update them.

    `stored` are the graph's inputs that have the storage of one of these parameters, which an update writes to.
    """
    if RECEIVING.receive is None:
        raise RuntimeError("zerofx::update runs outside of a backward: nothing is there to receive gradients")
    RECEIVING.receive(names, grads)


@torch.library.register_fake("zerofx::update")  # type: ignore[untyped-decorator]
def _(grads: Sequence[Tensor], stored: Sequence[Tensor], names: Sequence[str]) -> None:
    return None
