"""What a step cannot do right is refused in one sentence with the remedy: its arguments on every rank, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import zerofx
from tests.distributed.ranks import Net, has, message, on_ranks, rows, sharded
from tests.pool import Pool, RankError
from zerofx.agree import RankMismatchError
from zerofx.config import ConfigError

OTHER = nn.Linear(3, 3)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters())


class Refusal(NamedTuple):
    """Arguments of train_step, or how its optimizer is made, and words of the error."""

    words: tuple[str, ...]
    arguments: dict[str, Any] = {}  # noqa: RUF012
    optimizer: Callable[[nn.Module], Any] = adam
    scheduler: Callable[[Any], Any] | None = None


class Own(optim.SGD):
    """An optimizer of the user's."""


FUSED = {"fuse_optimizer": True}
REFUSALS = {
    "no micro-batches": Refusal(("microbatches=0", "must be an int, 1 or more"), {"microbatches": 0}),
    "a fraction of a batch": Refusal(("microbatches=2.0", "an int, 1 or more"), {"microbatches": 2.0}),
    "a clip of nothing": Refusal(("clip=0", "must be a norm above 0, or None"), {"clip": 0}),
    "an unknown word": Refusal(("accumulate='later'", "one of 'auto', 'defer', 'reduce'"), {"accumulate": "later"}),
    "an unknown scale": Refusal(("loss_scale='auto'", "'dynamic', a zerofx.DynamicLossScale"), {"loss_scale": "auto"}),
    "a negative scale": Refusal(("loss_scale=-1", "a number above 0"), {"loss_scale": -1}),
    "a number of tokens": Refusal(("loss_weight=7", "a function of a batch"), {"loss_weight": 7}),
    "no optimizer": Refusal(("optimizer=None", "a torch.optim.Optimizer, built"), optimizer=lambda _: None),
    "LBFGS": Refusal(
        ("optimizer=a LBFGS", "LBFGS calls the loss again"), optimizer=lambda model: optim.LBFGS(model.parameters())
    ),
    "another model's": Refusal(
        ("group 0 holds 2 parameter(s), the first of shape (3, 3)", "build it from model.parameters()"),
        optimizer=lambda _: optim.SGD(OTHER.parameters()),
    ),
    "a plateau": Refusal(
        ("call ReduceLROnPlateau.step yourself",), scheduler=lambda opt: optim.lr_scheduler.ReduceLROnPlateau(opt)
    ),
    "no word on fusing": Refusal(("fuse_optimizer=1", "must be True or False"), {"fuse_optimizer": 1}),
    "fused micro-batches": Refusal(("does not go with microbatches=2", "saves nothing"), FUSED | {"microbatches": 2}),
    "a fused clip": Refusal(("does not go with clip=1.0", "norm is known only then"), FUSED | {"clip": 1.0}),
    "a fused scale": Refusal(("does not go with a loss scale", "precision='bf16'"), FUSED | {"loss_scale": 2.0}),
    "fused weights": Refusal(("does not go with loss_weight", "return the mean"), FUSED | {"loss_weight": len}),
    "a user's fused optimizer": Refusal(
        ("does not go with Own", "elementwise optimizers, ASGD, Adadelta"), FUSED, lambda model: Own(model.parameters())
    ),
    "a differentiable step": Refusal(
        ("does not go with differentiable=True",),
        FUSED,
        lambda model: optim.Adam(model.parameters(), differentiable=True),
    ),
    "another optimizer's scheduler": Refusal(
        ("built from the optimizer that the step is given",),
        scheduler=lambda opt: optim.lr_scheduler.StepLR(adam(OTHER), 1),
    ),
    "an unknown name": Refusal(("'micro_batches'", "closest one is 'microbatches'"), {"micro_batches": 2}),
    "no scheduler": Refusal(("one of torch.optim.lr_scheduler",), scheduler=lambda opt: 3),
}


def refused(name: str, on_rank: tuple[int, ...]) -> None:
    model, case = sharded(Net()), REFUSALS[name] if dist.get_rank() in on_rank else Refusal(())
    optimizer = case.optimizer(model)
    arguments = dict(case.arguments)
    if case.scheduler is not None:
        arguments["scheduler"] = case.scheduler(optimizer)
    zerofx.train_step(model, loss_of, optimizer, **arguments)


@pytest.mark.parametrize("name", REFUSALS)
def test_impossible_arguments_are_refused(pool: Callable[[int], Pool], name: str) -> None:
    for told in pool(2).run_errors(refused, name, (0, 1)):
        has(told, ("zerofx.train_step", *REFUSALS[name].words))
    first, second = pool(2).run_errors(refused, name, (1,))
    has(first, ("RankMismatchError: zerofx.train_step failed on rank 1", *REFUSALS[name].words))
    has(second, ("ConfigError", *REFUSALS[name].words))


@on_ranks(2)
def test_ranks_must_ask_for_the_same() -> None:
    model = sharded(Net())
    given = {"microbatches": 1 + dist.get_rank()}
    told = message(lambda: zerofx.train_step(model, loss_of, adam(model), **given), RankMismatchError)
    has(told, ("ranks differ in microbatches: rank 0 of the group has 1, rank 1 has 2",))
    given = {"loss_weight": len} if dist.get_rank() else {}
    told = message(lambda: zerofx.eval_step(model, loss_of, **given), RankMismatchError)
    has(told, ("ranks differ in whether there is a loss_weight",))


@on_ranks(2)
def test_an_optimizer_from_before_compile_is_named() -> None:
    model = Net()
    optimizer = adam(model)
    sharded(model)
    told = message(lambda: zerofx.train_step(model, loss_of, optimizer), RuntimeError)
    has(told, ("was built before zerofx.compile and holds the old parameter",))


@on_ranks(2)
def test_updates_in_the_backward_need_a_graph_and_no_loss_scale() -> None:
    for options, words in (({"backend": "eager"}, "which makes no graph"), ({"precision": "fp16"}, "a loss scale")):
        model = sharded(Net(), **options)
        told = message(lambda model=model: zerofx.train_step(model, loss_of, adam(model), **FUSED), ConfigError)
        has(told, ("fuse_optimizer=True) does not go with", words))


def test_a_model_that_was_not_compiled_is_refused() -> None:
    for make in (lambda: zerofx.train_step(OTHER, loss_of, adam(OTHER)), lambda: zerofx.eval_step(OTHER, loss_of)):
        has(message(make, ConfigError), ("call zerofx.compile(model) first",))


@on_ranks(2)
def test_a_loss_that_is_no_scalar_is_refused() -> None:
    model = sharded(Net())
    for loss_fn, found in ((lambda model, x: model(x), "a tensor (4, 7) of torch.float32"), (lambda *_: 1.0, "float")):
        told = message(lambda fn=loss_fn: zerofx.train_step(model, fn, adam(model))(rows(0)), TypeError)
        has(told, (f"loss_fn returned {found} and not a scalar", "the sum together with loss_weight"))


@on_ranks(2)
def test_gradients_from_before_the_step_are_refused() -> None:
    model = sharded(Net())
    step = zerofx.train_step(model, loss_of, adam(model))
    loss_of(model, rows(0)).backward()
    has(message(lambda: step(rows(0)), RuntimeError), ("would mix with those of the batch", "model.zero_grad()"))
    model.zero_grad()
    assert step(rows(0)).loss.isfinite()


def micro(count: int) -> Iterator[Tensor]:
    yield from (rows(place) for place in range(count))


def differing_iterators() -> None:
    model = sharded(Net())
    step = zerofx.train_step(model, loss_of, adam(model), microbatches=3)
    step(micro(3))
    for _ in range(50):
        step(micro(3 - dist.get_rank()))
        torch.distributed.barrier()


def test_ranks_whose_iterators_differ_end_with_the_reason(pool: Callable[[int], Pool]) -> None:
    with pytest.raises(RankError, match="the iterator had 2 micro-batches left, and the step takes 3"):
        pool(2).run(differing_iterators, timeout=60)
