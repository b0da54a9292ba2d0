"""Schedules of pipelines are complete, do not stand still, and have the bubble that theory gives them."""

from __future__ import annotations

from typing import Any

import pytest

from zerofx.pipeline import SCHEDULES, SINGLE, Pipeline, PipelineError
from zerofx.schedule_check import ScheduleError, Simulated, check_messages, check_schedule, simulate
from zerofx.schedules import Action, forwards_of, messages_of, order_of


def pipeline(schedule: str, ranks: int, parts: int, per_rank: int | None = None) -> Pipeline:
    several = per_rank or (1 if schedule in SINGLE else 2)
    return Pipeline(ranks * several, schedule, parts, stages_per_rank=per_rank)


def checked(asked: Pipeline) -> Simulated:
    return check_schedule(asked, order_of(asked))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_every_schedule_runs_to_its_end(schedule: str, ranks: int, parts: int) -> None:
    found = checked(pipeline(schedule, ranks, parts))
    assert found.expected is None or found.bubble == pytest.approx(found.expected)
    assert 0 <= found.bubble < 1 and all(1 <= most <= parts for most in found.in_flight)


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("looped-bfs", 4)],
)
def test_bubbles_are_those_of_the_closed_form(schedule: str, per_rank: int) -> None:
    assert checked(pipeline(schedule, 4, 16, per_rank)).bubble == pytest.approx(3 / (per_rank * 16 + 3))


def test_1f1b_keeps_few_micro_batches_in_flight_and_gpipe_all() -> None:
    assert checked(pipeline("1f1b", 4, 8)).in_flight == (4, 3, 2, 1)
    assert checked(pipeline("1f1b", 4, 2)).in_flight == (2, 2, 2, 1)
    assert checked(pipeline("gpipe", 4, 8)).in_flight == (8, 8, 8, 8)


@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv", "dualpipev"])
def test_zero_bubble_schedules_have_less_than_half_of_the_bubble_of_1f1b(schedule: str) -> None:
    assert checked(pipeline(schedule, 4, 16)).bubble < 0.5 * checked(pipeline("1f1b", 4, 16)).bubble


def test_an_evaluation_runs_each_forward_once() -> None:
    asked = pipeline("zbv", 4, 8)
    assert simulate(asked, forwards_of(asked, asked.microbatches)).in_flight == (8,) * 8


def test_a_standstill_is_found_and_drawn() -> None:
    asked = pipeline("1f1b", 4, 8)
    order = order_of(asked)
    order[1][0], order[1][3] = order[1][3], order[1][0]
    with pytest.raises(ScheduleError, match=r"standstill: .*rank 1 waits for 1F0 before 1B0.*\nrank 0 \| 0F0 0F1"):
        check_schedule(asked, order)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_messages_that_cross_where_sends_block_are_found(schedule: str) -> None:
    asked = pipeline(schedule, 2, 4)
    messages = messages_of(asked, order_of(asked))
    check_messages(asked, messages)
    receive = next(place for place, action in enumerate(messages[1]) if action[1].value == "RECV_F")
    late = [*messages[1][:receive], *messages[1][receive + 1 :], messages[1][receive]]
    with pytest.raises(ScheduleError, match="standstill where sends block: rank 0 with 0SEND_F0, rank 1 with 1F0"):
        check_messages(asked, [messages[0], late])


def test_messages_that_arrive_in_another_order_are_found() -> None:
    asked = pipeline("gpipe", 2, 4)
    first, second = messages_of(asked, order_of(asked))
    a, b = [place for place, action in enumerate(second) if action[1].value == "RECV_F"][:2]
    second.insert(a, second.pop(b))
    with pytest.raises(ScheduleError, match="rank 0 sends in another order than rank 1 receives"):
        check_messages(asked, [first, second])


def test_a_computation_that_is_missing_or_on_the_wrong_rank_is_found() -> None:
    asked = pipeline("1f1b", 2, 4)
    order = order_of(asked)
    order[0].remove(Action("B", 0, 2))
    with pytest.raises(ScheduleError, match="stage 0 and micro-batch 2 1 forwards, 0 backwards"):
        check_schedule(asked, order)
    with pytest.raises(ScheduleError, match="rank 0 run 1"):
        check_schedule(asked, order_of(asked)[::-1])


def test_more_micro_batches_in_flight_than_1f1b_has_are_found() -> None:
    asked = pipeline("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match="keeps 4 micro-batches in flight at stage 0, and 1F1B at most 2"):
        check_schedule(asked, order_of(pipeline("gpipe", 2, 4)))


def test_a_chart_shows_who_computes_what_when() -> None:
    assert checked(pipeline("1f1b", 2, 2)).gantt().splitlines() == [
        "rank 0 | 0F0 0F1 .   .   0B0 ----.   0B1 ----",
        "rank 1 | .   1F0 1B0 ----1F1 1B1 ----",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"schedule": "2f2b"}, "schedule must be one of 'gpipe', '1f1b'"),
        ({"schedule": "pipedream"}, "asynchronous.*several updates old.*take '1f1b'"),
        ({"stages": 0}, "stages must be an int, 1 or more"),
        ({"microbatches": 0}, "microbatches must be an int"),
        ({"stages": 3, "schedule": "zbv", "microbatches": 4}, "stages must be a multiple of 2"),
        ({"stages": 8, "schedule": "interleaved-1f1b", "microbatches": 2}, "microbatches must be at least 4"),
        ({"stages": 8, "schedule": "dualpipev", "microbatches": 4}, "microbatches must be at least 8"),
        ({"stages": 8, "schedule": "interleaved-1f1b", "microbatches": 9}, "microbatches must be a multiple of 4"),
        ({"stages_per_rank": 2}, "stages_per_rank must be 1 with"),
        ({"split_at": ["a", "b"]}, "split_at must be 3 names"),
        ({"split_at": "a"}, "split_at must be names of modules"),
    ],
)
def test_what_is_not_possible_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        Pipeline(**{"stages": 4, "microbatches": 8} | given)
