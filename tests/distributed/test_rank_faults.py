"""Faults of real ranks end in one message on every rank; what only takes its time is waited for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.faulty import STAGES, world_of
from tests.pool import ENVIRONMENT, ROOT
from tests.situations.ranks import RANKS

SWAPS = ("swaps, then ends", "swaps, then compiles")
USUAL = (
    "killed",
    "stopped",
    "diverges",
    "raises",
    "out of memory",
    "recompiles",
    "shapes",
    "again",
    "swaps blocks",
    *SWAPS,
)
RARE = (STAGES, "host killed", "host stopped", "leaves", "interrupted", "sleeps")
OWN_CODE = [(kind.__name__, stage, world) for kind in RANKS for world in kind.worlds for stage in (1, 2, 3)]
GROUPS = (
    (*USUAL, *(f"{name} 3 2" for name, stage, world in OWN_CODE if (stage, world) == (3, 2))),
    RARE,
    tuple(f"{name} {stage} 2" for name, stage, world in OWN_CODE if world == 2 and stage != 3),
    tuple(f"{name} {stage} 4" for name, stage, world in OWN_CODE if world == 4),
)
"""Faults of which the runs go on at the same time."""
LIMIT = 60.0  # seconds in which every rank must have ended


@dataclass(frozen=True)
class Ended:
    """How a rank ended: exit code, output, and the seconds from the fault, or the last compilation, to its end."""

    code: int
    text: str
    seconds: float


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Ended]]:
    """`runs(fault)`: all ranks of the run with that fault."""
    done: dict[str, list[Ended]] = {}

    def get(fault: str) -> list[Ended]:
        if fault not in done:
            faults = next(group for group in GROUPS if fault in group)
            done.update(run_all(faults, tmp_path_factory.mktemp("ranks")))
        return done[fault]

    return get


def run_all(faults: tuple[str, ...], folder: Path) -> dict[str, list[Ended]]:
    command = [sys.executable, "-m", "tests.distributed.faulty", str(folder), "interpreter", *faults]
    environment = {**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    ended = json.loads((folder / "ended").read_text())
    return {
        fault: [_ended(folder / f"{fault} {rank}", *ended[fault][str(rank)]) for rank in range(world_of(fault))]
        for fault in faults
    }


def _ended(log: Path, code: int, when: float) -> Ended:
    text = log.read_text()
    faults = re.findall(r"^fault (\S+)", text, re.MULTILINE)
    return Ended(code, text, when - float(faults[-1]) if faults else 0.0)


def one_message(ended: Ended) -> str:
    """The message of a rank that ended because of another one."""
    assert ended.code not in (0, -9), ended.text
    assert ended.seconds < LIMIT
    (message,) = re.findall(r"zerofx ends rank \d of \d: (.*)$", ended.text, re.MULTILINE)
    print(f"ended after {ended.seconds:.1f} s: {message}")
    return message


@pytest.mark.parametrize(
    ("fault", "lost", "how"),
    [
        ("killed", 1, "was killed or crashed"),
        ("stopped", 1, "is stopped"),
        pytest.param("host killed", 0, "was killed or crashed", marks=pytest.mark.full),
        pytest.param("host stopped", 0, "is stopped", marks=pytest.mark.full),
    ],
)
def test_a_lost_rank_is_named_with_its_last_collective(
    runs: Callable[[str], list[Ended]], fault: str, lost: int, how: str
) -> None:
    message = one_message(runs(fault)[1 - lost])
    assert message.startswith(f"lost rank {lost}: its process {how}")
    assert re.search(
        r"its last known collective was number \d+, \w+ \((unshard|reduce_grad)\) of .*first.weight", message
    )


def test_ranks_whose_graphs_differ_are_told_the_first_difference(runs: Callable[[str], list[Ended]]) -> None:
    messages = [one_message(ended) for ended in runs("diverges")]
    assert messages[0] == messages[1]
    assert "ranks issue different collectives" in messages[0]
    sides = messages[0].split(" in the forward of graph ")
    assert [("extra.weight" in side) for side in sides] in ([False, True, False], [True, False, False])


def settings() -> list[Any]:
    return [
        pytest.param(
            f"{name} {stage} {world}",
            id=f"{name}-stage{stage}-world{world}",
            marks=() if (stage, world) == (3, 2) else pytest.mark.full,
        )
        for name, stage, world in OWN_CODE
    ]


@pytest.mark.parametrize("situation", settings())
def test_ranks_that_run_code_of_their_own_are_told_the_first_difference(
    runs: Callable[[str], list[Ended]], situation: str
) -> None:
    for ended in runs(situation):
        assert re.search(r": number \d+ is .* on rank \d, but .* on rank \d$", one_message(ended))


@pytest.mark.parametrize("fault", SWAPS)
def test_a_difference_in_the_last_step_is_told_though_it_hangs_nobody(
    runs: Callable[[str], list[Ended]], fault: str
) -> None:
    for ended in runs(fault):
        message = one_message(ended)
        assert "of last.weight, 192 elements" in message and "of spare.weight, 192 elements" in message


def test_blocks_that_share_a_graph_are_told_apart(runs: Callable[[str], list[Ended]]) -> None:
    for ended in runs("swaps blocks"):
        message = one_message(ended)
        assert re.search(r"blocks\.0\.bias, 272 elements .* for blocks\.0 on rank", message)
        assert re.search(r"blocks\.1\.bias, 272 elements .* for blocks\.1 on rank", message)


def test_a_rank_that_raised_is_named_to_the_others(runs: Callable[[str], list[Ended]]) -> None:
    other, raised = runs("raises")
    assert raised.code == 1 and "ValueError: a bad batch" in raised.text
    assert "rank 1 raised ValueError: a bad batch and ended after" in one_message(other)


def test_a_rank_without_memory_is_named_to_the_others(runs: Callable[[str], list[Ended]]) -> None:
    other, raised = runs("out of memory")
    assert raised.code == 1 and "can't allocate memory" in raised.text
    assert "rank 1 raised RuntimeError" in (told := one_message(other)) and "can't allocate memory" in told


@pytest.mark.full
def test_all_ranks_hear_at_once_of_one_whose_stage_cannot_compute(runs: Callable[[str], list[Ended]]) -> None:
    ended = runs(STAGES)
    assert "ArithmeticError: no good numbers" in ended[1].text and ended[1].code == 1
    for each in (ended[0], *ended[2:]):
        told = one_message(each)
        assert told == "a step failed on rank 1, for which others of its stage wait: ArithmeticError: no good numbers"
        assert each.seconds < 15


@pytest.mark.parametrize("fault", ["recompiles", "shapes", "again", pytest.param("sleeps", marks=pytest.mark.full)])
def test_what_only_takes_its_time_is_waited_for(runs: Callable[[str], list[Ended]], fault: str) -> None:
    for ended in runs(fault):
        assert ended.code == 0 and "trained" in ended.text, ended.text
        assert "zerofx ends" not in ended.text


@pytest.mark.full
def test_a_rank_that_left_early_is_named_to_the_others(runs: Callable[[str], list[Ended]]) -> None:
    other, left = runs("leaves")
    assert left.code == 0
    assert "rank 1 ended after" in one_message(other)


@pytest.mark.full
def test_an_interrupt_of_all_ranks_ends_them_without_a_verdict(runs: Callable[[str], list[Ended]]) -> None:
    for ended in runs("interrupted"):
        assert "KeyboardInterrupt" in ended.text and "zerofx ends" not in ended.text
        assert ended.seconds < LIMIT
