"""Tests whose body runs on every rank of a pool, and the small model and comparisons that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import zerofx
from tests.pool import Pool
from tests.training import State, compare, full

Loss = Callable[[nn.Module, int], torch.Tensor]


def on_ranks(world: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function whose assertions hold on each of `world` ranks."""

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        def test(pool: Callable[[int], Pool], **given: Any) -> None:
            pool(world).run(run_body, test, *given.values())

        own = inspect.signature(body)
        pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = own.replace(parameters=[pool, *own.parameters.values()])
        test.body = body
        test.__name__, test.__qualname__, test.__module__ = body.__name__, body.__qualname__, body.__module__
        return test

    return decorate


def run_body(test: Any, *args: Any) -> None:
    """What a rank runs: it gets the test by its name, so that a traceback shows the test's lines."""
    test.body(*args)


class Net(nn.Module):
    """Linear 7 -> 13 -> 7 with a LayerNorm and a buffer: the dims of the weights divide by no world size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 7)
        self.register_buffer("scale", torch.ones(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.norm(self.a(x))) * self.scale)


def rows(seed: int, *shape: int) -> torch.Tensor:
    """Normal random numbers, 4 x 7 unless told."""
    return torch.randn(shape or (4, 7), generator=torch.Generator().manual_seed(seed))


def square(model: nn.Module, rank: int) -> torch.Tensor:
    return model(rows(rank)).square().mean()


def sharded(model: nn.Module, **options: Any) -> Any:
    """The model with all of its parameters cut, however small."""
    return zerofx.compile(model, **{"persist_below": 0, "backend": "interpreter"} | options)


def both(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """A sharded model and a plain one with the same start."""
    torch.manual_seed(0)
    model = sharded(make(), **options)
    torch.manual_seed(0)
    return model, make()


def trained(make: Callable[[], nn.Module], loss: Loss = square, **options: Any) -> tuple[Any, Any]:
    """A sharded and a plain model after a backward, whose gradients have been found equal."""
    model, plain = both(make, **options)
    backward(model, plain, loss)
    return model, plain


def backward(model: nn.Module, plain: nn.Module, loss: Loss = square, among: Sequence[int] = ()) -> None:
    """Adds the gradients of this rank's loss, and to the plain model the mean of all ranks', and compares them."""
    loss(model, dist.get_rank()).backward()
    ranks = among or range(dist.get_world_size())
    for rank in ranks:
        (loss(plain, rank) / len(ranks)).backward()
    same(gradients(model), gradients(plain))


def gradients(model: nn.Module) -> State:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(model: nn.Module) -> State:
    """The state dict in full tensors."""
    return {name: full(value) for name, value in model.state_dict().items()}


def same(state: State, expected: State) -> None:
    worst = compare(state, expected, rtol=1e-5)
    assert not worst, worst


def message(function: Callable[[], Any], kind: type[Exception] = Exception) -> str:
    """What the function says when it raises an exception of `kind`."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError("it raised nothing")


def has(text: str | None, words: Iterable[str]) -> None:
    missing = [word for word in words if word not in (text or "")]
    assert not missing, f"{missing} not in {text!r}"
