"""A sharded model trains to the same parameters as ordinary PyTorch in one process on the same global batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest

from tests.distributed.runs import DEFAULT, NONE, SOME, STEPS, Builder, Setting, interpreted, run
from tests.models import gpt, gpt2, mlp_odd, resnet
from tests.pool import Pool
from tests.training import MakeOptimizer, Trained, adamw, compare, reference, sgd

BUILDERS = (mlp_odd, gpt, gpt2, resnet)
QUICK = {
    *((builder, 2, 3, NONE) for builder in BUILDERS),
    *((builder, 2, 0, NONE) for builder in (mlp_odd, gpt)),
    (gpt, 3, 0, NONE),
    (gpt2, 3, 3, NONE),
    (gpt2, 2, 3, SOME),
    (resnet, 2, 3, DEFAULT),
    (mlp_odd, 3, 3, NONE),
    (resnet, 3, 3, NONE),
    (mlp_odd, 1, 3, NONE),
    (gpt2, 1, 3, DEFAULT),
    (resnet, 1, 0, NONE),
}
QUICK_INDUCTOR = {(mlp_odd, 2, 3), (gpt, 2, 3)}
FULL_INDUCTOR = {
    (gpt2, 2, 0),
    (gpt2, 2, 3),
    (gpt2, 3, 3),
    (resnet, 2, 0),
    (resnet, 2, 3),
    (resnet, 1, 3),
    (mlp_odd, 3, 3),
}


def name(setting: Setting) -> str:
    return f"{setting.builder.__name__}-world{setting.world}-stage{setting.stage}-persist{setting.persist_below}"


INTERPRETED_SETTINGS = [
    pytest.param(setting := interpreted(*key), id=name(setting), marks=() if key in QUICK else pytest.mark.full)
    for key in itertools.product(BUILDERS, (1, 2, 3), (0, 3), (NONE, SOME, DEFAULT))
]
INDUCTOR_SETTINGS = [
    pytest.param(
        setting := Setting(*key, NONE, (sgd, adamw), "inductor"),
        id=name(setting),
        marks=() if key in QUICK_INDUCTOR else pytest.mark.full,
    )
    for key in itertools.product(BUILDERS, (1, 2, 3), (0, 3))
    if key in QUICK_INDUCTOR | FULL_INDUCTOR
]


@functools.cache
def expected(builder: Builder, make: MakeOptimizer, world: int) -> Trained:
    return reference(builder, make, STEPS, world)


@pytest.mark.parametrize("setting", INTERPRETED_SETTINGS)
def test_interpreted_graphs_train_as_one_process(pool: Callable[[int], Pool], setting: Setting) -> None:
    check(pool, setting)


@pytest.mark.inductor
@pytest.mark.parametrize("setting", INDUCTOR_SETTINGS)
def test_inductor_trains_as_one_process(pool: Callable[[int], Pool], setting: Setting) -> None:
    check(pool, setting)


def check(pool: Callable[[int], Pool], setting: Setting) -> None:
    if setting.builder in (gpt2, resnet):
        pytest.importorskip("transformers")
    ranks = run(pool, setting)
    gathers = [row for row in ranks[0].collectives.rows if row.kind == "all_gather_into_tensor"]
    if setting.persist_below == NONE:
        assert bool(gathers) == (setting.stage == 3 and setting.world > 1)
    for make in setting.makers:
        one = expected(setting.builder, make, setting.world)
        results = [each.trained[make.__name__] for each in ranks]
        parameters = {name: one.state[name] for name in one.grads}
        assert compare(results[0].state, one.state, rtol=1e-5) == {}
        for result in results[1:]:
            assert compare({name: result.state[name] for name in parameters}, parameters, rtol=1e-5) == {}
        losses = [sum(step) / setting.world for step in zip(*(result.losses for result in results), strict=True)]
        assert losses == pytest.approx(one.losses, rel=1e-5)
