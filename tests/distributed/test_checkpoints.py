"""A checkpoint holds all of a training, and is taken up on other ranks, at other stages and by other libraries."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zerofx
from tests.distributed.checkpoint_runs import STEPS, WRAPS, Training, begin, everything, leg, steps
from tests.distributed.ranks import Net, rows, same, sharded, square, whole
from tests.pool import Pool

LEGS = (("stage 1", 2), ("stage 3", 3), ("plain", 1), ("fsdp2", 2), ("stage 0", 4), ("stage 3", 4), ("stage 2", 2))


def test_a_training_goes_on_over_other_ranks_stages_and_libraries(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    uninterrupted = begin(WRAPS["plain"], seed=0)
    for number, (kind, world) in enumerate(LEGS):
        ended = pool(world).run(leg, kind, tmp_path, number) if world > 1 else [leg(kind, tmp_path, number)]
        if number:
            before = everything(uninterrupted)
        steps(uninterrupted, STEPS * number, 0, 1)
        for found, left, loaded in ended:
            same(left, everything(uninterrupted))
            if number:
                same(found, before)
                assert (loaded.step, loaded.extra["legs"], loaded.world) == (
                    STEPS * number,
                    number,
                    LEGS[number - 1][1],
                )
                assert loaded.extra["where"].tolist() == list(range(number))
    assert zerofx.latest(tmp_path) == tmp_path / f"leg-{len(LEGS)}"


def goes_on(folder: Path, kind: str) -> None:
    """A second training of other start values, that loads, and then is the first one to the bit."""
    random.seed(dist.get_rank())
    first, second = begin(WRAPS[kind], seed=0), begin(WRAPS[kind], seed=1)
    steps(first, 0, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(dist.get_rank() + 5)
    zerofx.save(folder / "a", first.model, first.optimizer, scheduler=first.scheduler)
    drawn = random.random(), np.random.rand(), torch.rand(3)
    zerofx.load(folder / "a", second.model, second.optimizer, scheduler=second.scheduler)
    assert (random.random(), np.random.rand()) == drawn[:2] and torch.equal(torch.rand(3), drawn[2])
    for training in (first, second):
        steps(training, STEPS, dist.get_rank(), dist.get_world_size())
    expected = everything(first)
    assert expected.keys() == everything(second).keys()
    assert all(torch.equal(value, expected[name]) for name, value in everything(second).items())


@pytest.mark.parametrize("kind", ["stage 3", pytest.param("stage 0", marks=pytest.mark.full)])
def test_on_as_many_ranks_a_training_goes_on_to_the_bit(pool: Callable[[int], Pool], tmp_path: Path, kind: str) -> None:
    pool(2).run(goes_on, tmp_path, kind)


def of_other_ranks(folder: Path, save: bool) -> tuple[float, float]:
    if save:
        torch.manual_seed(dist.get_rank())
        random.seed(3)
        zerofx.save(folder / "a", sharded(Net()))
    else:
        zerofx.load(folder / "a", sharded(Net()))
    return torch.rand(()).item(), random.random()


def test_other_ranks_get_generators_of_their_own_where_those_saved_differed(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    saved = pool(2).run(of_other_ranks, tmp_path, True)
    once, again = (pool(3).run(of_other_ranks, tmp_path, False) for _ in range(2))
    assert once == again
    assert len({torch_one for torch_one, _ in once}) == 3
    assert {python_one for _, python_one in once + saved} == {saved[0][1]}


def own_values(folder: Path) -> None:
    """Buffers, and a parameter that zerofx ignores with its states, are each rank's own."""
    rank = dist.get_rank()
    nets = [Net() for _ in range(2)]
    models = [sharded(net, ignored_params=[net.b.bias]) for net in nets]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    models[0].scale.fill_(rank + 2.0)
    square(models[0], rank).backward()
    optimizers[0].step()
    zerofx.save(folder / "a", models[0], optimizers[0])
    zerofx.load(folder / "a", models[1], optimizers[1])
    assert torch.equal(models[1].scale, models[0].scale)
    biases = [model.get_parameter("b.bias") for model in models]
    assert torch.equal(*biases)
    assert torch.equal(*(o.state[bias]["momentum_buffer"] for o, bias in zip(optimizers, biases, strict=True)))


def first_ranks(folder: Path) -> None:
    model = sharded(Net())
    zerofx.load(folder / "a", model)
    assert model.scale.unique().tolist() == [2.0]


def test_each_rank_has_its_own_buffers_and_ignored_parameters_again(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool(2).run(own_values, tmp_path)
    pool(3).run(first_ranks, tmp_path)


def by_torch(folder: Path) -> None:
    """Functions of torch's own load what zerofx.save wrote, and take and set the state of a compiled model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = begin(WRAPS["stage 3"], seed=0)
    steps(trained, 0, rank, world)
    zerofx.save(folder / "a", trained.model, trained.optimizer)
    other = begin(WRAPS["fsdp2"], seed=1)
    state = {
        "model": get_model_state_dict(other.model),
        "optimizer": get_optimizer_state_dict(other.model, other.optimizer),
    }
    # Torch makes states of parameters that have had no gradient, too, which no checkpoint has.
    dcp.load(state, checkpoint_id=folder / "a", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(other.model, state["model"])
    set_optimizer_state_dict(other.model, other.optimizer, state["optimizer"])
    expected = everything(trained)
    given = everything(Training(other.model, other.optimizer, trained.scheduler))
    shared = {name: value for name, value in given.items() if name in expected}
    assert given.keys() - expected.keys() == {f"nothing/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    same(shared, expected)
    for full_state in (False, True):
        options = StateDictOptions(full_state_dict=full_state)
        third = sharded(nn.Sequential(Net()))
        taken = get_model_state_dict(sharded(nn.Sequential(Net())), options=options)
        set_model_state_dict(third, taken, options=options)
        same(whole(third), {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in taken.items()})


def test_torchs_own_functions_read_a_checkpoint(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    pool(2).run(by_torch, tmp_path)


def in_other_dtypes(folder: Path) -> None:
    model = sharded(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    square(model, 0).backward()
    optimizer.step()
    zerofx.save(folder / "a", model, optimizer)
    with torch.device("meta"):
        net = Net().bfloat16()
    rounded = sharded(
        net, init_fn=lambda module: [t.zero_() for t in (*module.parameters(False), *module.buffers(False))]
    )
    states = torch.optim.AdamW(rounded.parameters())
    zerofx.load(folder / "a", rounded, states)
    same(whole(rounded), {name: value.bfloat16() for name, value in whole(model).items()})
    names = dict(rounded.named_parameters())
    assert states.state[names["a.weight"]]["exp_avg"].dtype is torch.bfloat16
    assert rounded(rows(0).bfloat16()).isfinite().all()


def test_a_model_of_another_dtype_made_on_meta_takes_rounded_values(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool(2).run(in_other_dtypes, tmp_path)


def parts_of_a_model(folder: Path) -> None:
    """Each rank holds other modules, as the stages of a pipeline do."""
    torch.manual_seed(0)
    names = ["first", "second"]
    every = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
    mine = nn.ModuleDict({names[dist.get_rank()]: every[names[dist.get_rank()]]})
    optimizer = torch.optim.SGD(mine.parameters(), 0.1, momentum=0.9)
    next(iter(mine.values()))(torch.ones(3)).sum().backward()
    optimizer.step()
    zerofx.save(folder / "a", mine, optimizer)
    zerofx.load(folder / "a", mine, optimizer)


def test_ranks_that_hold_other_parts_of_a_model_make_one_checkpoint(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool(2).run(parts_of_a_model, tmp_path)
    torch.manual_seed(0)
    model, expected = (nn.ModuleDict({name: nn.Linear(3, 3) for name in ("first", "second")}) for _ in range(2))
    torch.manual_seed(0)
    expected = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("first", "second")})
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, expected)]
    sum(each(torch.ones(3)).sum() for each in expected.values()).backward()
    optimizers[1].step()
    zerofx.load(tmp_path / "a", model, optimizers[0])
    same(model.state_dict(), expected.state_dict())
    assert len(optimizers[0].state) == 4
