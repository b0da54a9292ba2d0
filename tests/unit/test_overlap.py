"""On the simulated timeline of an H100 node, stage 3 hides its communication behind a 7B GPT's computation."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.bench.gpt import elements
from tests.bench.overlap import SEVEN_B, traced
from zerofx.config import Config
from zerofx.manager import Pass, run
from zerofx.planning.hardware import H100
from zerofx.program import Level, Program
from zerofx.recipe import recipe
from zerofx.timeline import Timeline, timeline

WORLD, TOKENS = 8, SEVEN_B.context
FOUR_LAYERS = replace(SEVEN_B, layers=4)


def logical(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    return tuple(step for step in passes if step.level is Level.LOGICAL)


@pytest.fixture(scope="module")
def partitioned() -> Program:
    """Four layers of the GPT, cut into forward and backward."""
    return traced(FOUR_LAYERS, Config(passes=logical), WORLD)


def foreseen(partitioned: Program, prefetch: int = 1) -> Timeline:
    program = copy.deepcopy(partitioned)
    run(program, recipe(Config(prefetch=prefetch), "nccl"))
    return timeline(program, H100)


def exposed(found: Timeline, part: str) -> list[str]:
    """The parameters that are waited for, longer than a launch takes."""
    waits = [s for s in found.spans if s.kind == "wait" and s.part == part and s.seconds > H100.launch]
    return [span.name.split(" ")[-1] for span in waits]


def test_four_layers_expose_at_most_a_tenth_of_the_step(partitioned: Program) -> None:
    found = foreseen(partitioned)
    assert found.exposed <= 0.1 * found.step
    assert found.step == pytest.approx(found.compute + found.exposed)
    assert found.communication > 0.4 * found.step


def test_only_the_head_of_the_forward_and_the_tail_of_the_backward_are_exposed(partitioned: Program) -> None:
    found = foreseen(partitioned, prefetch=2)
    ends = {"tokens.weight", "positions.weight", "blocks.0.qkv.weight", "blocks.0.qkv.bias", "norm.bias"}
    head, tail = exposed(found, "forward"), exposed(found, "backward")
    assert head[0] == tail[-1] == "tokens.weight"
    assert {*head, *tail} <= ends


def test_more_prefetch_never_makes_the_step_slower_and_none_exposes_more(partitioned: Program) -> None:
    timelines = [foreseen(partitioned, prefetch) for prefetch in (0, 1, 2, 4)]
    assert all(more.step <= less.step for less, more in pairwise(timelines))
    assert timelines[0].exposed > 4 * timelines[1].exposed
    assert len({round(found.communication, 9) for found in timelines}) == 1


def test_arithmetic_is_six_for_each_parameter_and_token_and_attention(partitioned: Program) -> None:
    found, size = foreseen(partitioned), FOUR_LAYERS
    multiplied = elements(size) - (size.vocabulary + TOKENS) * size.width  # embeddings are looked up
    attention = 7 / 2 * 4 * TOKENS**2 * size.width / 2 * size.layers  # two products forward, five backward; causal
    assert found.flops == pytest.approx(6 * multiplied * TOKENS + attention, rel=1e-3)


@pytest.mark.full
def test_seven_billion_parameters_expose_at_most_a_tenth_of_the_step() -> None:
    assert 6.5e9 < elements(SEVEN_B) < 7.5e9
    found = timeline(traced(SEVEN_B, Config(), WORLD), H100)
    assert found.exposed <= 0.1 * found.step
    assert found.exposed == pytest.approx(found.step - found.compute)
