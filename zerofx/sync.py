"""DDP's `no_sync` and FSDP2's `set_requires_gradient_sync`, methods of a compiled model's root."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import nn

if TYPE_CHECKING:
    from zerofx.accumulate import Accumulation


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """While it is entered, forwards of the model leave gradients to wait, and their backwards reduce none.

    DDP's method. Each rank's gradients add up whole in `p.grad`, as partial DTensors; the next backward whose forward
    runs outside reduces their sum. `zero_grad` discards them. Run a forward and its backward both inside or both
    outside: a backward raises RuntimeError where that has changed, as does an optimizer's step while gradients wait.
    """
    return _without_sync(_accumulation(model))


@contextmanager
def _without_sync(accumulation: Accumulation) -> Iterator[None]:
    before, accumulation.synchronises = accumulation.synchronises, False
    try:
        yield
    finally:
        accumulation.synchronises = before


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether backwards of the forwards to come reduce gradients, FSDP2's method for what `no_sync` does.

    Raises ValueError with `recurse=False`: the parameters of a model are synchronised together.
    """
    if not recurse:
        raise ValueError(
            "set_requires_gradient_sync(recurse=False) is not possible: zerofx synchronises a model as a whole"
        )
    _accumulation(model).synchronises = bool(requires_gradient_sync)


METHODS: dict[str, Callable[..., Any]] = {
    "no_sync": no_sync,
    "set_requires_gradient_sync": set_requires_gradient_sync,
}


def give_methods(model: nn.Module) -> None:
    """Gives a compiled model's root DDP's and FSDP2's methods, unless its class has its own.

    Partials and not bound methods, since copies and pickles of them belong to the copy of the module.
    """
    for name, method in METHODS.items():
        if not hasattr(type(model), name):
            model.__dict__[name] = functools.partial(method, model)


def _accumulation(model: nn.Module) -> Accumulation:
    engine = model.__dict__["_zerofx_engine"]
    if engine.pipelined is not None:
        raise RuntimeError(
            "no_sync and set_requires_gradient_sync are for loops, and a pipeline runs in zerofx.train_step, which "
            "reduces gradients once a step: leave them out, and give the Pipeline more microbatches"
        )
    return cast("Accumulation", engine.accumulation)
