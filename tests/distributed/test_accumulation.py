"""Gradients of several micro-batches are those of one process, whenever they are reduced."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.distributed.micro_batches import (
    WAYS,
    Around,
    always,
    by_flag,
    by_no_sync,
    deferring,
    expect,
    net_loss,
    reducing,
    run,
)
from tests.distributed.ranks import Net, both, gradients, has, message, on_ranks, rows, same, sharded, whole
from tests.training import adamw, compare, sgd

COUNTS = (3, 1, 4, 3)
"""Micro-batches of the steps of one training."""


class Tied(nn.Module):
    """A table that is read twice, a frozen layer, and rows that divide by no world size."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(13, 7), nn.Linear(7, 7), nn.Linear(7, 13, bias=False)
        self.norm = nn.LayerNorm(7)
        self.head.weight = self.table.weight
        self.inner.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.inner(self.table(ids)))))


def tied_loss(model: nn.Module, seed: int) -> torch.Tensor:
    ids = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def train_both(make: Callable[[], nn.Module], loss: Any, around: Around, **options: Any) -> nn.Module:
    model, plain = both(make, **options)
    start = copy.deepcopy(plain.state_dict())
    for optimizer in (sgd, adamw):
        model.load_state_dict(start)
        plain.load_state_dict(start)
        ours, theirs = optimizer(model.parameters()), optimizer(plain.parameters())
        for step, count in enumerate(COUNTS):
            run(model, step, count, around, loss)
            expect(plain, step, count, loss)
            same(gradients(model), gradients(plain))
            assert all(p.grad is None or p.grad.placements == p.placements for p in model.parameters())
            for each in (ours, theirs):
                each.step()
                each.zero_grad()
            same(whole(model), whole(plain))
    return model


def check_training(stage: int, around: Around) -> None:
    model = train_both(Tied, tied_loss, around, stage=stage)
    assert model.head.weight.shape == (13, 7)


@pytest.mark.parametrize("around", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_two_ranks_train_as_one_process(stage: int, around: Around) -> None:
    check_training(stage, around)


@pytest.mark.parametrize("around", [deferring, *(pytest.param(way, marks=pytest.mark.full) for way in WAYS[::2])])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(3)
def test_three_ranks_train_as_one_process(stage: int, around: Around) -> None:
    check_training(stage, around)


@pytest.mark.parametrize("around", [by_flag, deferring])
@on_ranks(2)
def test_without_graphs(around: Around) -> None:
    train_both(Tied, tied_loss, around, backend="eager", stage=2)


@pytest.mark.inductor
@pytest.mark.parametrize("around", [by_no_sync, deferring])
@on_ranks(2)
def test_on_inductor(around: Around) -> None:
    train_both(Tied, tied_loss, around, backend="inductor", stage=2)


class Broken(Net):
    """No graph holds it in one piece, and one layer is in none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.a(x))
        torch._dynamo.graph_break()
        return x + self.outside(hidden)

    @torch._dynamo.disable
    def outside(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.b(hidden)


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)), nn.LayerNorm(7))


@pytest.mark.parametrize("around", [deferring, *(pytest.param(way, marks=pytest.mark.full) for way in WAYS[::2])])
@pytest.mark.parametrize(("make", "per_block"), [(Broken, False), (Blocks, True)])
@on_ranks(2)
def test_broken_graphs_and_blocks(make: Any, per_block: bool, around: Around) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_both(make, net_loss, around, stage=1, per_block=per_block)


@on_ranks(2)
def test_small_parameters_stay_replicated() -> None:
    for around in WAYS:
        train_both(Net, net_loss, around, stage=2, persist_below=20)


# Gradients that wait.


@on_ranks(2)
def test_gradients_wait_as_the_partial_mean() -> None:
    model, plain = both(Net)
    with model.no_sync():
        net_loss(model, dist.get_rank()).backward()
    for param in model.parameters():
        assert isinstance(param.grad, DTensor) and param.grad.placements[0].is_partial("avg")
    expect(plain, 0, 1)
    same(gradients(model), gradients(plain))
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
    assert torch.allclose(norms[0].full_tensor(), norms[1])
    same(gradients(model), gradients(plain))


@on_ranks(2)
def test_a_reduced_gradient_is_added_to_what_waits() -> None:
    model, plain = both(Net, persist_below=20)
    for seed, around in enumerate((always, by_no_sync, always, by_no_sync)):
        run(model, seed, 2, around)
        expect(plain, seed, 2)
        same(gradients(model), gradients(plain))


@on_ranks(2)
def test_two_forwards_before_one_backward() -> None:
    model, plain = both(Net)
    rank, ranks = dist.get_rank(), range(2)
    with model.no_sync():
        (net_loss(model, rank) + net_loss(model, 10 + rank)).backward()
    (net_loss(model, 20 + rank) + net_loss(model, 30 + rank)).backward()
    sum(net_loss(plain, 10 * number + other) / 2 for number in range(4) for other in ranks).backward()
    same(gradients(model), gradients(plain))


@on_ranks(2)
def test_backwards_in_another_order_than_forwards() -> None:
    model, plain = both(Net)
    rank = dist.get_rank()
    first, second = net_loss(model, rank), net_loss(model, 10 + rank)
    with model.no_sync():
        net_loss(model, 20 + rank).backward()
    second.backward()  # its graph reduces, what waits is reduced before it
    assert all(param.grad.placements == param.placements for param in model.parameters())
    with model.no_sync():
        net_loss(model, 30 + rank).backward()
    third = net_loss(model, 40 + rank)
    first.backward()
    third.backward()  # its graph does not, and nothing else waits any more
    for seed in range(5):
        expect(plain, 0, 1, lambda model, other, seed=seed: net_loss(model, 10 * seed + other))
    same(gradients(model), gradients(plain))
    assert all(param.grad.placements == param.placements for param in model.parameters())


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        return self.b(x) if use_b else self.a(x)


@on_ranks(2)
def test_what_the_last_backward_does_not_touch_is_reduced_too() -> None:
    model, plain = both(Choice)

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        return model(rows(seed), seed < 10).square().mean()

    run(model, 0, 2, by_no_sync, loss)
    expect(plain, 0, 2, loss)
    assert all(param.grad.placements == param.placements for param in model.parameters())
    same(gradients(model), gradients(plain))


ZEROS: dict[str, Callable[[nn.Module], None]] = {
    "model, to None": lambda model: model.zero_grad(),
    "model, to zero": lambda model: model.zero_grad(set_to_none=False),
    "optimizer, to None": lambda model: sgd(model.parameters()).zero_grad(),
    "optimizer, to zero": lambda model: sgd(model.parameters()).zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("zero", ZEROS)
@on_ranks(2)
def test_zero_grad_discards_what_waits(zero: str) -> None:
    model, plain = both(Net)
    rank = dist.get_rank()
    for before in (by_no_sync, always):
        run(model, 1, 2, before)
        with model.no_sync():
            net_loss(model, rank).backward()
            loss = net_loss(model, 10 + rank)
            ZEROS[zero](model)  # between a forward and its backward
            loss.backward()
        net_loss(model, 20 + rank).backward()
        plain.zero_grad()
        for number in (1, 2):
            expect(plain, 0, 1, lambda model, other, number=number: net_loss(model, 10 * number + other))
        same(gradients(model), gradients(plain))


@on_ranks(2)
def test_hooks_behind_the_accumulation_run_once_for_what_is_reduced() -> None:
    model, plain = both(Net)
    seen: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.full_tensor()}))
    with model.no_sync():
        net_loss(model, dist.get_rank()).backward()
    assert not seen
    net_loss(model, 10 + dist.get_rank()).backward()
    expect(plain, 0, 2)
    same(seen, gradients(plain))


@on_ranks(2)
def test_evaluation_between_micro_batches() -> None:
    model, plain = both(Net)
    with model.no_sync():
        net_loss(model, dist.get_rank()).backward()
        with torch.no_grad():
            assert torch.allclose(model(rows(5)), plain(rows(5)), rtol=1e-5)
    with torch.inference_mode():
        model(rows(5))
    net_loss(model, 10 + dist.get_rank()).backward()
    expect(plain, 0, 2)
    same(gradients(model), gradients(plain))


@on_ranks(2)
def test_copies_accumulate_on_their_own() -> None:
    model, plain = both(Net)
    with model.no_sync():
        net_loss(model, 0).backward()
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert copies[0].state_dict().keys() == plain.state_dict().keys()
    for other in copies[:1]:
        other.zero_grad()
        run(other, 0, 3, by_no_sync)
        plain.zero_grad()
        expect(plain, 0, 3)
        same(gradients(other), gradients(plain))
    assert all(param.grad.placements[0].is_partial() for param in model.parameters())


def test_one_rank_has_nothing_to_reduce() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    zerofx.compile(model, backend="interpreter")
    optimizers = sgd(model.parameters()), sgd(plain.parameters())
    with model.no_sync():
        net_loss(model, 0).backward()
    model.set_requires_gradient_sync(False)
    net_loss(model, 1).backward()
    with deferring(model, 0, 2):
        net_loss(model, 2).backward()
    for seed in range(3):
        net_loss(plain, seed).backward()
    for optimizer in optimizers:
        optimizer.step()
    same(dict(model.named_parameters()), dict(plain.named_parameters()))


@on_ranks(2)
def test_what_waits_is_reduced_in_the_dtype_asked_for() -> None:
    model, plain = both(Net, reduce_dtype="bf16")
    run(model, 0, 3, by_no_sync)
    expect(plain, 0, 3)
    dtypes = {row.dtype for row in zerofx.inspect(model).collectives().rows if row.part == "reduce"}
    assert dtypes == {"bf16"}
    assert not compare(gradients(model), gradients(plain), rtol=2e-2)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_under_autocast_waiting_changes_no_more_than_the_order_of_a_sum(stage: int) -> None:
    found = []
    for around in (always, by_no_sync, deferring, reducing):
        torch.manual_seed(0)
        model = sharded(Net(), stage=stage, precision="bf16")
        run(model, 0, 3, around)
        found.append(gradients(model))
    for each in found[1:]:
        same(each, found[0])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("options", [{"per_block": True}, {"backend": "eager"}])
@on_ranks(2)
def test_what_the_backward_computes_again_reads_parameters_as_its_forward_did(options: dict[str, Any]) -> None:
    model, plain = both(Checkpointed, **options)
    rank = dist.get_rank()
    first = net_loss(model, rank)
    with model.no_sync():
        net_loss(model, 10 + rank).backward()
    first.backward()
    expect(plain, 0, 2)
    same(gradients(model), gradients(plain))


@on_ranks(2)
def test_kept_parameters_are_freed_behind_the_last_micro_batch() -> None:
    model = sharded(Net(), stage=2)
    stands = model.__dict__["_zerofx_engine"].accumulation.stands
    for number in range(3):
        with reducing(model, number, 3):
            whole_weight = weakref.ref(stands.kept["a.weight"])
            net_loss(model, 0).backward()
        assert (whole_weight() is None) is (number == 2)


# What is refused.


@on_ranks(2)
def test_a_change_between_forward_and_backward_is_refused() -> None:
    for options in ({}, {"backend": "eager"}):
        model = sharded(Net(), **options)
        with model.no_sync():
            inside = net_loss(model, 0)
        outside = net_loss(model, 0)
        has(message(inside.backward, RuntimeError), ["changed between a forward and its backward", "no_sync()"])
        model.set_requires_gradient_sync(False)
        has(message(outside.backward, RuntimeError), ["changed between a forward and its backward"])
        assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_a_step_while_gradients_wait_is_refused() -> None:
    model, other = sharded(Net()), sharded(Net())
    optimizer = sgd(model.parameters())
    with model.no_sync():
        net_loss(model, 0).backward()
    net_loss(other, 0).backward()
    sgd(other.parameters()).step()
    has(
        message(optimizer.step, RuntimeError),
        ["SGD.step()", "6 of them, such as that of 'a.weight'", "outside of no_sync()"],
    )
    net_loss(model, 0).backward()
    optimizer.step()


@on_ranks(2)
def test_tensor_hooks_are_refused_where_gradients_wait() -> None:
    model = sharded(Net())
    next(model.parameters()).register_hook(lambda grad: grad)
    with model.no_sync():
        has(message(lambda: net_loss(model, 0), RuntimeError), ["'a.weight' has a tensor hook", "without no_sync"])
    net_loss(model, 0).backward()


@on_ranks(2)
def test_a_part_of_the_model_has_no_synchronisation_of_its_own() -> None:
    model = sharded(Net())
    with pytest.raises(ValueError, match=r"recurse=False.*as a whole"):
        model.set_requires_gradient_sync(False, recurse=False)
    assert not hasattr(model.a, "no_sync")


@on_ranks(2)
def test_no_sync_nests_and_ends_with_an_exception() -> None:
    model, plain = both(Net)
    with suppress(KeyError), model.no_sync(), model.no_sync():
        net_loss(model, dist.get_rank()).backward()
        raise KeyError
    net_loss(model, 10 + dist.get_rank()).backward()
    expect(plain, 0, 2)
    same(gradients(model), gradients(plain))


@on_ranks(2)
def test_a_failed_micro_batch_keeps_nothing() -> None:
    model, plain = both(Net, stage=2)
    with suppress(KeyError), reducing(model, 0, 3):
        net_loss(model, dist.get_rank())
        raise KeyError
    optimizers = sgd(model.parameters()), sgd(plain.parameters())
    for step in range(2):
        run(model, step, 3, reducing)
        expect(plain, step, 3)
        for optimizer in optimizers:
            optimizer.step()
    same(whole(model), whole(plain))
