"""The worker pool reports results, exceptions, deaths and hangs by rank, and the next run works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError

LOADED = time.time()


def rank_times(factor: int) -> int:
    return dist.get_rank() * factor


def prints_then_raises(text: str) -> None:
    print(text)
    raise ValueError(text)


def total() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def loaded() -> tuple[int, float, float]:
    return os.getpid(), LOADED, torch.rand(()).item()


def last_rank_raises_alone() -> None:
    if dist.get_rank() == 1:
        raise ValueError("odd shard")
    total()


def every_rank_raises() -> None:
    raise ValueError(f"no rank {dist.get_rank()} here")


def every_rank_raises_out_of_step() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("out of step")


def last_rank_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total()


def last_rank_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def returns_a_lock() -> object:
    import threading

    return threading.Lock()


@pytest.fixture
def two(pool: Callable[[int], Pool]) -> Pool:
    return pool(2)


def test_results_come_back_by_rank(two: Pool) -> None:
    assert two.run(rank_times, 10) == [0, 10]
    assert two.run(lambda: dist.get_world_size()) == [2, 2]


def test_tensors_travel_both_ways(two: Pool) -> None:
    sent = torch.arange(5.0)
    assert all(torch.equal(got, sent + 1) for got in two.run(torch.add, sent, 1))


def test_workers_are_kept_load_a_module_once_and_start_seeded(two: Pool) -> None:
    assert two.run(loaded) == two.run(loaded)


def test_an_exception_is_reported_while_another_rank_waits_in_a_collective(two: Pool) -> None:
    two.run(total)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        two.run(last_rank_raises_alone)
    assert time.monotonic() - start < 10
    text = str(caught.value)
    assert "rank 1: ValueError: odd shard" in text
    assert "in last_rank_raises_alone" in text
    assert "rank 0: still running" in text
    assert "in all_reduce" in text
    assert two.run(total) == [3.0, 3.0]


def test_the_report_of_an_error_holds_what_this_run_printed(two: Pool) -> None:
    two.run_errors(prints_then_raises, "earlier words")
    with pytest.raises(RankError, match="output of this run") as caught:
        two.run(prints_then_raises, "later words")
    assert "later words" in str(caught.value)
    assert "earlier words" not in str(caught.value)


def test_error_messages_come_back_by_rank_and_the_workers_stay(two: Pool) -> None:
    before = two.run(os.getpid)
    assert two.run_errors(every_rank_raises) == ["ValueError: no rank 0 here", "ValueError: no rank 1 here"]
    assert two.run_errors(total) == [None, None]
    assert two.run(os.getpid) == before


def test_unmatched_collectives_left_by_an_error_do_not_reach_the_next_run(two: Pool) -> None:
    assert two.run_errors(every_rank_raises_out_of_step) == ["ValueError: out of step"] * 2
    assert two.run(total) == [3.0, 3.0]


def test_a_killed_worker_is_reported_by_rank(two: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 1: the worker process ended \(SIGKILL\)"):
        two.run(last_rank_is_killed)
    assert two.run(total) == [3.0, 3.0]


def test_a_worker_killed_between_runs_is_replaced(two: Pool) -> None:
    os.kill(two.run(os.getpid)[0], signal.SIGKILL)
    time.sleep(0.5)
    assert two.run(total) == [3.0, 3.0]


def test_a_run_past_its_timeout_names_the_rank_and_its_stack(two: Pool) -> None:
    with pytest.raises(RankError) as caught:
        two.run(last_rank_sleeps, timeout=3)
    assert "rank 0: returned" in str(caught.value)
    assert "rank 1: still running after 3.0 s" in str(caught.value)
    assert "in last_rank_sleeps" in str(caught.value)


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_run(two: Pool) -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        two.run(returns_a_lock)
