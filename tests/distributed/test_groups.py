"""Models are sharded over the group that the user names: each averages over its own ranks only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerofx
from tests.distributed.ranks import (
    Net,
    backward,
    both,
    gradients,
    on_ranks,
    rows,
    same,
    sharded,
    square,
    trained,
    whole,
)


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))


def narrow_loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(rows(rank, 3, 2)).square().mean()


@on_ranks(4)
def test_fewer_rows_than_ranks_leave_empty_parts() -> None:
    model, plain = trained(narrow, narrow_loss)
    assert model.get_parameter("0.weight").to_local().shape[0] == (1 if dist.get_rank() < 2 else 0)
    for each in (model, plain):
        torch.optim.AdamW(each.parameters(), lr=0.1).step()
        each.zero_grad()
    backward(model, plain, narrow_loss)


def pairs_of_mesh() -> tuple[DeviceMesh, list[int]]:
    """A 2-D mesh whose `dp` axis is its last: ranks 0 and 1, and ranks 2 and 3."""
    first = dist.get_rank() // 2 * 2
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")), [first, first + 1]


def strided_pairs_of_mesh() -> tuple[DeviceMesh, list[int]]:
    """The same with `dp` first: ranks 0 and 2, and ranks 1 and 3."""
    first = dist.get_rank() % 2
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), [first, first + 2]


def unnamed_pairs() -> tuple[DeviceMesh, list[int]]:
    """A 1-D mesh without names around groups that the user made."""
    groups = {rank: dist.new_group([rank, rank + 1]) for rank in (0, 2)}
    first = dist.get_rank() // 2 * 2
    return DeviceMesh.from_group(groups[first], "cpu"), [first, first + 1]


@pytest.mark.parametrize("make", [pairs_of_mesh, strided_pairs_of_mesh, unnamed_pairs])
@on_ranks(4)
def test_each_pair_averages_over_its_own_ranks(make: object) -> None:
    mesh, ranks = make()
    model, plain = both(Net, mesh=mesh)
    backward(model, plain, square, among=ranks)
    found: list[object] = [None] * 4
    dist.all_gather_object(found, gradients(model)["a.weight"])
    apart = [rank for rank in range(4) if not torch.equal(found[rank], found[dist.get_rank()])]
    assert apart == [rank for rank in range(4) if rank not in ranks]
    assert {row.group for row in zerofx.inspect(model).collectives().rows} == {"dp"}


@on_ranks(4)
def test_each_pair_starts_from_its_own_first_rank() -> None:
    mesh, ranks = unnamed_pairs()
    torch.manual_seed(dist.get_rank())
    model = sharded(Net(), mesh=mesh, backend="eager")
    torch.manual_seed(ranks[0])
    same(whole(model), Net().state_dict())


@on_ranks(2)
def test_a_mesh_of_one_rank_reduces_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    model, plain = both(Net, mesh=mesh)
    backward(model, plain, square, among=[dist.get_rank()])
    assert zerofx.inspect(model).collectives().bytes_sent == 0
