"""Situations that sharding libraries have got wrong train here as in one process, or end in one clear error.

Those in which ranks run different code end their processes: `test_rank_faults` has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.situation_runs import differences, expected, train_rank
from tests.pool import Pool
from tests.situations.calls import CALLS
from tests.situations.forwards import FORWARDS, FrozenNormUnderCheckpoint
from tests.situations.loops import LOOPS, UserHooks
from tests.situations.parameters import PARAMETERS
from tests.situations.situation import Situation

ERROR_SECONDS = 60
SITUATIONS = (*PARAMETERS, *FORWARDS, *CALLS, *LOOPS)
STAGES = (1, 2, 3)
QUICK_ON_INDUCTOR = (FrozenNormUnderCheckpoint, UserHooks)


def settings(kinds: tuple[type[Situation], ...]) -> list[Any]:
    """Stage 3 on two ranks; with --full every stage, and every number of ranks that the situation names."""
    chosen = [(kind, stage, world) for kind in kinds for world in kind.worlds for stage in STAGES]
    return [
        pytest.param(
            *each,
            marks=() if each[1:] == (3, 2) else pytest.mark.full,
            id=f"{each[0].__name__}-stage{each[1]}-world{each[2]}",
        )
        for each in chosen
    ]


@pytest.mark.parametrize(("kind", "stage", "world"), settings(tuple(kind for kind in SITUATIONS if not kind.refused)))
def test_every_rank_trains_as_one_process(
    pool: Callable[[int], Pool], kind: type[Situation], stage: int, world: int
) -> None:
    for options in kind.options:
        results = pool(world).run(train_rank, kind, stage, options, timeout=300)
        for make in kind.optimizers:
            for rank, theirs in enumerate(expected(kind, make, world)):
                worst = differences(results[rank][make.__name__], theirs)
                assert not worst, (options, make.__name__, rank, worst)


@pytest.mark.inductor
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK_ON_INDUCTOR else [pytest.mark.full])
        for kind in SITUATIONS
        if kind.on_inductor and not kind.refused
    ],
)
def test_inductor_trains_every_rank_as_one_process(pool: Callable[[int], Pool], kind: type[Situation]) -> None:
    results = pool(2).run(train_rank, kind, 3, {"backend": "inductor"}, timeout=500)
    for make in kind.optimizers:
        for rank, theirs in enumerate(expected(kind, make, 2)):
            worst = differences(results[rank][make.__name__], theirs)
            assert not worst, (make.__name__, rank, worst)


@pytest.mark.parametrize(("kind", "stage", "world"), settings(tuple(kind for kind in SITUATIONS if kind.refused)))
def test_every_rank_says_what_is_not_possible(
    pool: Callable[[int], Pool], kind: type[Situation], stage: int, world: int
) -> None:
    messages = pool(world).run_errors(train_rank, kind, stage, {}, timeout=ERROR_SECONDS)
    for message in messages:
        assert message is not None and all(words in message for words in kind.refused), messages
