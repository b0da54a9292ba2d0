"""What travels in steps of several micro-batches is the closed form, and their graphs stay few."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.distributed.micro_batches import WAYS, Around, always, by_no_sync, deferring, reducing, run
from tests.distributed.ranks import Net, on_ranks, rows, sharded
from tests.distributed.runs import ByteCounter, Spy, spied, stored
from tests.distributed.test_bytes import sent


class Plain(nn.Sequential):
    """Two weights, which the backward reads both if the input needs a gradient."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 13, bias=False), nn.Tanh(), nn.Linear(13, 5, bias=False))


def input_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(rows(seed).requires_grad_()).square().mean()


def step_bytes(model: nn.Module, count: int, around: Around, counter: ByteCounter) -> Iterator[int]:
    """What this rank really sends in each of three steps."""
    for step in range(3):
        counter.bytes = 0
        run(model, step, count, around, input_loss)
        model.zero_grad()
        yield counter.bytes


def travels(stage: int, count: int, around: Around) -> int:
    """How often parameters and gradients travel in a step, in units of (N-1)/N of their bytes."""
    reductions = 1 if around in (by_no_sync, deferring) else count
    if stage == 0:
        return 2 * reductions
    gathers = 2 * count if stage == 3 else 1 if around in (deferring, reducing) else count
    return gathers + reductions


def check_bytes(stage: int, count: int, around: Around) -> None:
    world = dist.get_world_size()
    counter = ByteCounter(world)
    with spied(), mock.patch.object(Spy, "listeners", (counter,)):
        model = sharded(Plain(), stage=stage)
        found = list(step_bytes(model, count, around, counter))
    times = travels(stage, count, around)
    # An all-reduce is two travels, and a rank sends whole bytes in each.
    once = [sent(size, dim, world, 2 if dim is None else 1) for size, dim in stored(model).values()]
    expected = sum(once) * (times if stage else times // 2)
    assert found == [expected] * 3, (found, expected)


@pytest.mark.parametrize("around", [always, *WAYS])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_bytes_of_a_step_are_the_closed_form(stage: int, around: Around) -> None:
    for count in (1, 2, 4, 8):
        check_bytes(stage, count, around)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(3)
def test_bytes_over_three_ranks_are_the_closed_form(stage: int) -> None:
    for around in (always, *WAYS):
        check_bytes(stage, 3, around)


def test_the_closed_form_is_the_table() -> None:
    count = 4
    table = {always: (8, 8, 8, 12), by_no_sync: (2, 5, 5, 9), deferring: (2, 2, 2, 9), reducing: (8, 5, 5, 12)}
    found = {around: tuple(travels(stage, count, around) for stage in range(4)) for around in table}
    assert found == table


@pytest.mark.parametrize("around", WAYS)
@on_ranks(2)
def test_no_graph_is_compiled_after_the_second_step(around: Around) -> None:
    model, kinds = sharded(Net(), stage=1), []
    for step, count in enumerate((3, 1, 3, 1, 4, 2)):
        run(model, step, count, around)
        model.zero_grad()
        kinds.append([graph.kind for graph in zerofx.inspect(model).graphs])
    assert kinds[1:] == [kinds[1]] * 5
    moved = {by_no_sync: ["reduce"], deferring: ["gather", "reduce"], reducing: ["gather"]}[around]
    assert sorted(kinds[1]) == sorted([*moved, "train", "train"])


@on_ranks(2)
def test_what_is_moved_beside_the_graphs_can_be_inspected() -> None:
    model = sharded(Net(), stage=1)
    run(model, 0, 2, deferring)
    seen = zerofx.inspect(model).collectives()
    assert {(row.part, row.role) for row in seen.rows} == {("gather", "unshard"), ("reduce", "reduce_grad")}
    assert 0 <= seen.bytes_sent - seen.bound < 8 * 13 * 4
