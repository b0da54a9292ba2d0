"""With `fuse_optimizer` a step is what it is without, and at no time are all gradients there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

import zerofx
from tests.distributed.ranks import Net, both, full, has, message, on_ranks, rows, sharded, whole
from tests.distributed.runs import Spy, Tensors, members, spied
from tests.distributed.test_train_step import Varied, token_loss
from tests.pool import Pool
from tests.training import MakeOptimizer, adamw, compare
from zerofx.collectives import is_bucket
from zerofx.updates import Updates

STEPS = 3
Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]


def momentum(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)


class ReadTwice(Varied):
    """Of its parameters, one is read twice."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.scale * torch.tanh(self.layer(self.embed(ids) * self.frozen))))


def ids(rank: int, step: int) -> Batch:
    return (torch.randint(0, 13, (6,), generator=torch.Generator().manual_seed(100 * step + rank)),)


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def numbers(rank: int, step: int) -> Batch:
    return (rows(100 * step + rank),)


@contextmanager
def updates() -> Iterator[list[Updates]]:
    """What each step has known of its gradients."""
    seen: list[Updates] = []

    def end(self: Updates) -> None:
        self.over = True
        seen.append(self)

    with mock.patch.object(Updates, "end", end):
        yield seen


def train(model: Any, loss_fn: Loss, optimizer: optim.Optimizer, batch: Any, fused: bool, after: Any = None) -> Any:
    """Some steps; the loss and norm of each."""
    step = zerofx.train_step(model, loss_fn, optimizer, fuse_optimizer=fused, scheduler=after)
    results = [step(*batch(dist.get_rank(), place)) for place in range(STEPS)]
    assert all(param.grad is None for param in model.parameters())
    return [(result.loss, result.grad_norm) for result in results]


def plainly(model: nn.Module, loss_fn: Loss, optimizer: optim.Optimizer, batch: Any) -> Any:
    """The same steps in one process, on the batches of all ranks."""
    results, world = [], dist.get_world_size()
    for place in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_fn(model, *batch(rank, place)) for rank in range(world)) / world
        loss.backward()
        results.append((loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), torch.inf)))
        optimizer.step()
    return results


def near(found: Any, expected: Any) -> None:
    for row, wanted in zip(found, expected, strict=True):
        for value, other in zip(row, wanted, strict=True):
            assert torch.allclose(value, other, rtol=1e-5), (row, wanted)


def check_against_plain(stage: int, backend: str) -> None:
    cases = ((Net, mean_loss, numbers, set()), (ReadTwice, token_loss, ids, {"unused.weight", "unused.bias"}))
    for make_model, loss_fn, batch, unused in cases:
        model, plain = both(make_model, stage=stage, persist_below=30, backend=backend)
        start = copy.deepcopy(whole(model))
        for make in (momentum, adamw):
            model.load_state_dict(start)
            plain.load_state_dict(start)
            with updates() as seen:
                found = train(model, loss_fn, make(model.parameters()), batch, True)
            near(found, plainly(plain, loss_fn, make(plain.parameters()), batch))
            assert not compare(whole(model), whole(plain), rtol=1e-5)
            assert all(each.done == each.params.keys() - unused for each in seen) and len(seen) == STEPS
        assert len(zerofx.inspect(model).graphs) == 1


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_fused_steps_are_those_of_one_process(pool: Callable[[int], Pool], world: int, stage: int) -> None:
    pool(world).run(check_against_plain, stage, "interpreter", timeout=300)


def same_bits(optimizer: optim.Optimizer, expected: optim.Optimizer) -> None:
    """Whether both have states of the same names, kinds and values."""
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert repr(ours["param_groups"]) == repr(theirs["param_groups"]) and list(ours["state"]) == list(theirs["state"])
    for key, state in theirs["state"].items():
        assert list(ours["state"][key]) == list(state)
        for name, value in state.items():
            found = ours["state"][key][name]
            assert (type(found), found.dtype) == (type(value), value.dtype)
            assert torch.equal(full(found), full(value)), name


OPTIMIZERS: list[MakeOptimizer] = [
    momentum,
    adamw,
    lambda params: optim.Adam(params, lr=torch.tensor(1e-2), amsgrad=True, maximize=True, weight_decay=0.1),
    lambda params: optim.AdamW(params, lr=1e-2, foreach=True),
    lambda params: optim.Adam([{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(params)]),
    lambda params: optim.RMSprop(params, lr=1e-3, momentum=0.5),
    lambda params: optim.Adagrad(params, lr=1e-2),
]


@on_ranks(2)
def test_parameters_and_states_have_the_bits_of_the_ordinary_step_and_go_on_with_it() -> None:
    model, other = both(Net)[0], both(Net)[0]
    start = copy.deepcopy(whole(model))
    for make in OPTIMIZERS:
        model.load_state_dict(start)
        other.load_state_dict(start)
        first, expected = make(model.parameters()), make(other.parameters())
        steps = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (first, expected)]
        losses = train(model, mean_loss, first, numbers, True, steps[0])
        assert repr(losses) == repr(train(other, mean_loss, expected, numbers, False, steps[1]))
        same_bits(first, expected)
        later = make(model.parameters())
        later.load_state_dict(first.state_dict())
        for fused in (False, True):
            train(model, mean_loss, later, numbers, fused)
            train(other, mean_loss, expected, numbers, False)
            same_bits(later, expected)
        assert not compare(whole(model), whole(other), rtol=0)


class Broken(Net):
    """Code that torch.compile cannot put into one graph; a weight is read on both sides of it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.a(x))
        torch._dynamo.graph_break()
        return self.b(F.gelu(hidden) * self.scale) + hidden @ self.a.weight


def twice(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - model(-x)).square().mean()


def ignored(model: nn.Module, x: Tensor) -> Tensor:
    model(2 * x)
    return model(x).square().mean()


def also_outside(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + model.b.weight.square().sum()


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))


NAMES = {"a.weight", "a.bias", "norm.weight", "norm.bias", "b.weight", "b.bias"}
SITUATIONS: list[tuple[Callable[[], nn.Module], Loss, set[str], dict[str, Any]]] = [
    (Broken, mean_loss, NAMES, {}),
    (Net, twice, NAMES, {}),
    (Net, ignored, set(), {}),
    (Net, also_outside, NAMES - {"b.weight"}, {}),
    (layers, mean_loss, {f"{n}.{kind}" for n in range(3) for kind in ("weight", "bias")}, {"per_block": True}),
]
"""A model, a loss, the parameters that are updated in the backward, and options."""


@pytest.mark.parametrize("number", range(len(SITUATIONS)))
@on_ranks(2)
def test_a_parameter_is_updated_when_no_graph_reads_it_any_more(number: int) -> None:
    make_model, loss_fn, early, options = SITUATIONS[number]
    model, plain = both(make_model, **options)
    with updates() as seen:
        found = train(model, loss_fn, momentum(model.parameters()), numbers, True)
    near(found, plainly(plain, loss_fn, momentum(plain.parameters()), numbers))
    assert not compare(whole(model), whole(plain), rtol=1e-5)
    assert [each.done for each in seen] == [early] * STEPS


@on_ranks(2)
def test_what_is_not_a_fused_step_leaves_gradients_as_ever() -> None:
    model, plain = both(Net)
    optimizer = momentum(model.parameters())
    step = zerofx.train_step(model, mean_loss, optimizer, fuse_optimizer=True)
    step(*numbers(dist.get_rank(), 0))
    with torch.no_grad():
        assert model(rows(0)).isfinite().all()
    plain.load_state_dict(whole(model))
    mean_loss(model, rows(1)).backward()
    mean_loss(plain, rows(1)).backward()
    grads = {name: full(param.grad) for name, param in model.named_parameters()}
    assert not compare(grads, {name: param.grad for name, param in plain.named_parameters()}, rtol=1e-5)
    has(message(lambda: step(rows(0)), RuntimeError), ("gradients before the step",))


@on_ranks(2)
def test_a_gradient_that_comes_behind_its_update_is_an_error() -> None:
    model = sharded(Net())
    optimizer = momentum(model.parameters())

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        penalty = sum(param.square().sum() for param in model.parameters())  # its gradients come last
        return penalty.full_tensor() + model(x).square().mean()

    told = message(lambda: zerofx.train_step(model, loss_fn, optimizer, fuse_optimizer=True)(rows(0)), RuntimeError)
    has(told, ("was updated in the backward, and has then got another gradient", "leave out fuse_optimizer"))


@on_ranks(2)
def test_hooks_behind_the_step_run_once_and_late_hooks_before_it_are_refused() -> None:
    model, calls = sharded(Net()), []
    optimizer = momentum(model.parameters())
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    step = zerofx.train_step(model, mean_loss, optimizer, fuse_optimizer=True)
    step(rows(0))
    assert calls == [1]
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    has(message(lambda: step(rows(0))), ("does not go with a hook before the optimizer's step",))
    handle.remove()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    has(message(lambda: step(rows(0))), ("does not go with hooks on parameters",))


WIDTH, LAYERS = 64, 12


class Alive:
    """The most bytes of reduced gradients that are alive at a time, and of all of them."""

    def __init__(self) -> None:
        self.known: list[tuple[StorageWeakRef, int]] = []
        self.most, self.all = 0, 0

    def __call__(self, node: Node, given: Tensors, result: Tensors) -> None:
        if node.meta["zerofx"].role == "reduce_grad" and is_bucket(node):
            self.see(members(result))

    def see(self, grads: Sequence[Tensor]) -> None:
        self.known += [(StorageWeakRef(grad.untyped_storage()), grad.nbytes) for grad in grads]
        self.all += sum(grad.nbytes for grad in grads)
        self.most = max(self.most, sum(size for storage, size in self.known if not storage.expired()))


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def live_gradients(fused: bool) -> tuple[int, int]:
    alive = Alive()
    with spied(), mock.patch.object(Spy, "listeners", (alive,)):
        model = sharded(deep(), bucket_mb=WIDTH * WIDTH * 4 / 2**20)
        step = zerofx.train_step(model, mean_loss, adamw(model.parameters()), fuse_optimizer=fused)
        step(rows(dist.get_rank(), 4, WIDTH))
    return alive.most, alive.all


def test_live_gradients_are_a_few_buckets_and_not_all(pool: Callable[[int], Pool]) -> None:
    bucket = (WIDTH * WIDTH + WIDTH) * 4 // 2
    for most, total in pool(2).run(live_gradients, False):
        assert most == total == LAYERS * bucket
    for most, total in pool(2).run(live_gradients, True):
        assert most <= 3 * bucket and total == LAYERS * bucket


def inductor_bits() -> tuple[int, int]:
    """Checks fused steps on Inductor; what is alive of handed-over gradients when the next ones come, and of all."""
    alive, receive = Alive(), Updates.receive

    def watch(self: Updates, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        alive.see(grads)
        receive(self, names, grads)

    def batch(rank: int, step: int) -> Batch:
        return (rows(100 * step + rank, 4, WIDTH),)

    options = {"backend": "inductor", "bucket_mb": WIDTH * WIDTH * 4 / 2**20}
    (model, plain), other = both(deep, **options), both(deep, **options)[0]
    with mock.patch.object(Updates, "receive", watch):
        found = train(model, mean_loss, momentum(model.parameters()), batch, True)
    near(found, plainly(plain, mean_loss, momentum(plain.parameters()), batch))
    train(other, mean_loss, momentum(other.parameters()), batch, False)
    assert not compare(whole(model), whole(other), rtol=0)
    return alive.most, alive.all // STEPS


@pytest.mark.inductor
def test_inductor_frees_each_gradient_behind_its_update(pool: Callable[[int], Pool]) -> None:
    bucket = (WIDTH * WIDTH + WIDTH) * 4 // 2
    for most, total in pool(2).run(inductor_bits, timeout=300):
        assert most <= 3 * bucket and total == LAYERS * bucket


@pytest.mark.inductor
def test_fused_steps_of_tied_and_frozen_parameters_on_inductor(pool: Callable[[int], Pool]) -> None:
    pool(2).run(check_against_plain, 0, "inductor", timeout=300)
