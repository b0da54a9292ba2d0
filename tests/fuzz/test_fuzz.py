"""Some dozens of random models and configurations; `make fuzz` draws thousands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from tests.fuzz import drawn, ranks, simulated
from tests.fuzz.drawn import Setting, Training
from tests.fuzz.found import FOUND
from tests.fuzz.models import Spec
from tests.pool import Pool

ALWAYS = settings(drawn.EXAMPLES, derandomize=True)


@settings(ALWAYS, max_examples=30)
@given(spec=drawn.specs(), setting=drawn.settings)
def test_every_pass_keeps_what_a_model_means(spec: Spec, setting: Setting) -> None:
    simulated.check(spec, setting)


def run_on_ranks(pool: Callable[[int], Pool], count: int) -> None:
    @settings(ALWAYS, max_examples=count)
    @given(spec=drawn.specs(dropout=False), setting=drawn.settings.map(drawn.on_ranks), training=drawn.trainings())
    def test(spec: Spec, setting: Setting, training: Training) -> None:
        ranks.check(pool, spec, setting, training)

    test()


@pytest.mark.full
def test_real_ranks_train_as_one_process(pool: Callable[[int], Pool]) -> None:
    run_on_ranks(pool, 6)


@pytest.mark.full
def test_many_models_train_on_real_ranks_as_in_one_process(pool: Callable[[int], Pool]) -> None:
    run_on_ranks(pool, 100)


@pytest.mark.parametrize(("spec", "setting"), FOUND.values(), ids=FOUND)
def test_what_was_found_stays_right(spec: Spec, setting: Setting) -> None:
    simulated.check(spec, setting)
