"""Parameters of every shape, dtype and role get the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed.ranks import Net, backward, both, gradients, on_ranks, rows, same, sharded, square, trained

Builder = Callable[[], torch.Tensor]
SHAPES: dict[str, Builder] = {
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.zeros(0, 8),
    "one": lambda: torch.randn(1),
    "one_row": lambda: torch.randn(1, 3, 7),
    "few_rows": lambda: torch.randn(1, 5),
    "float64": lambda: torch.randn(5, dtype=torch.float64),
    "transposed": lambda: torch.randn(7, 3).t(),
    "strided": lambda: torch.randn(6, 10)[::2, ::3],
    "channels_last": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
}


class Zoo(nn.Module):
    """One parameter of each shape, an integer one without gradient and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(make()) for name, make in SHAPES.items()})
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * self.table.sum()
        for name in SHAPES:
            weight = self.weights[name]
            total = total + (weight * (x.mean() + torch.arange(weight.numel()).view(weight.shape))).sum().sin().float()
        return total


class PartlyFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.norm.weight.requires_grad_(False)


@pytest.mark.parametrize(("stage", "backend"), [(0, "eager"), (3, "eager"), (3, "interpreter")])
@on_ranks(2)
def test_every_shape_trains(stage: int, backend: str) -> None:
    model, plain = trained(Zoo, stage=stage, backend=backend)
    for name, parameter in model.named_parameters():
        given = plain.get_parameter(name)
        assert (parameter.shape, parameter.dtype) == (given.shape, given.dtype)
    placed = {name: p.placements[0] for name, p in model.weights.named_parameters()}
    cut = {name for name, placement in placed.items() if placement != Replicate()}
    assert cut == ({"one_row", "few_rows", "float64", "transposed", "strided", "channels_last"} if stage else set())
    assert model.table.dtype is torch.int64 and torch.equal(model.table, torch.arange(4))
    assert model.get_parameter("unused.weight").grad is None


@on_ranks(2)
def test_frozen_parameters_are_cut_and_get_no_gradient() -> None:
    model, _ = trained(PartlyFrozen)
    assert gradients(model).keys() == {"norm.bias", "b.weight", "b.bias"}
    assert model.get_parameter("a.weight").placements == (Shard(0),)


@on_ranks(2)
def test_parameters_can_be_frozen_and_unfrozen_while_training() -> None:
    model, plain = trained(Net)
    for frozen in (True, False):
        for each in (model, plain):
            each.zero_grad()
            each.a.requires_grad_(not frozen)
        backward(model, plain)
        assert ("a.weight" in gradients(model)) is not frozen


@on_ranks(2)
def test_ignored_parameters_are_neither_synchronised_nor_reduced() -> None:
    torch.manual_seed(dist.get_rank())
    model = Net()
    before = model.b.weight.detach().clone()
    sharded(model, ignored_params=model.b.parameters())
    assert type(model.b.weight) is nn.Parameter and torch.equal(model.b.weight, before)
    square(model, dist.get_rank()).backward()
    found: list[object] = [None, None]
    dist.all_gather_object(found, (model.b.weight.grad, before, gradients(model)["a.weight"]))
    (grad, start, shared), (other_grad, other_start, other_shared) = found
    assert not torch.equal(grad, other_grad) and not torch.equal(start, other_start)
    assert torch.equal(shared, other_shared)


@on_ranks(2)
def test_parameters_of_fewer_elements_than_persist_below_are_replicated() -> None:
    model, _ = trained(Net, persist_below=91)
    placed = {name: p.placements[0] for name, p in model.named_parameters()}
    assert placed == dict.fromkeys(placed, Replicate()) | {"a.weight": Shard(0), "b.weight": Shard(1)}


@on_ranks(2)
def test_ranks_start_from_the_first_ranks_values_unless_told() -> None:
    for sync in (True, False):
        torch.manual_seed(dist.get_rank())
        model = sharded(nn.BatchNorm1d(2).requires_grad_(), sync_init=sync, backend="eager", persist_below=99)
        torch.manual_seed(dist.get_rank())
        other = nn.Linear(3, 3)
        own = other.weight.detach().clone()
        sharded(other, sync_init=sync, backend="eager", persist_below=99)
        torch.manual_seed(0)
        first = nn.Linear(3, 3).weight
        assert torch.equal(other.weight, first if sync else own)
        assert isinstance(model.get_parameter("weight"), DTensor)


@on_ranks(2)
def test_autocast_around_the_model_trains() -> None:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(rows(rank))
        assert out.dtype is torch.bfloat16
        return out.float().square().mean()

    model, plain = both(Net)
    loss(model, dist.get_rank()).backward()
    for rank in range(2):
        (loss(plain, rank) / 2).backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    same(gradients(model), gradients(plain))
