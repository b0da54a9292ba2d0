"""Verdicts over posted states: what is reported, and what is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zerofx.sequence import Block, Entry, Folded
from zerofx.verdict import GONE, RUNNING, STOPPED, UNKNOWN, Seen, State, cannot_go_on, differ

A, B, C = (Entry("all_gather_into_tensor", "unshard", 16, "f32", (name,)) for name in "abc")
BIG = Entry("all_gather_into_tensor", "unshard", 99, "f32", ("big",))


class Ranks:
    """Posted states of ranks that issued given blocks."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}

    def post(self, rank: int, *blocks: list[Entry], **changes: Any) -> State:
        folded = Folded()
        for entries in blocks:
            block = Block(f"graph of rank {rank}", entries)
            self.blocks[block.key] = block
            folded.add(block)
        state = State(rank, "host", 100 + rank, "1", n=folded.n, digest=folded.digest)
        last = f"number {folded.n}"
        return replace(state, calls=tuple(folded.calls), marks=tuple(folded.marks), last=last, **changes)

    def differ(self, mine: list[list[Entry]], theirs: list[list[Entry]]) -> str | None:
        def blocks(_: int, key: int) -> tuple[str, tuple[Entry, ...]]:
            return self.blocks[key].where, self.blocks[key].entries

        return differ(self.post(0, *mine), self.post(1, *theirs), blocks)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ([[A, B]], [[A, B]]),
        ([[A, B], [C]], [[A, B]]),
        ([[A, B], [C]], [[A], [B, C]]),
        ([[A]] * 500, [[A]] * 480),
        ([], [[A]]),
    ],
)
def test_sequences_that_agree_are_no_problem(mine: list[list[Entry]], theirs: list[list[Entry]]) -> None:
    assert Ranks().differ(mine, theirs) is None


def test_the_first_difference_is_named_with_both_sides() -> None:
    found = Ranks().differ([[A, B], [C]], [[A], [C, B]])
    assert found is not None
    assert "number 2 is all_gather_into_tensor (unshard) of b, 16 elements of f32 in graph of rank 0 on rank 0" in found
    assert "of c, 16 elements of f32 in graph of rank 1 on rank 1" in found


def test_a_difference_inside_a_longer_block_is_found() -> None:
    assert "number 1 is" in str(Ranks().differ([[A, B]], [[BIG, A, B]]))


def test_a_difference_that_is_too_old_to_name_is_still_found() -> None:
    for other in (BIG, C):
        found = Ranks().differ([[A], *[[B]] * 3000], [[other], *[[B]] * 3000])
        assert "somewhere up to number 3001" in str(found)


def test_other_sequences_are_not_compared() -> None:
    ranks = Ranks()
    assert differ(ranks.post(0, [A]), ranks.post(1, [B], epoch=1), lambda *_: ("", ())) is None


def pair(behind: dict[str, Any], how: dict[str, Any], n: int = 1, **ahead: Any) -> str | None:
    """The verdict over rank 0, which issued `n` collectives, and rank 1, which issued one."""
    ranks = Ranks()
    first = Seen(ranks.post(0, [A] * n, **ahead), process=RUNNING)
    return cannot_go_on([first, Seen(ranks.post(1, [A], **behind), **how)])


@pytest.mark.parametrize("doing", ["", "compiling a graph", "the forward of graph 0"])
@pytest.mark.parametrize("ahead", [1, 5])
def test_a_rank_that_takes_its_time_is_waited_for(doing: str, ahead: int) -> None:
    assert pair({"doing": doing}, {"quiet": 1.0, "still": 3600.0, "process": RUNNING}, ahead) is None


def test_a_process_that_lives_but_cannot_post_is_waited_for() -> None:
    assert pair({}, {"quiet": 600.0, "still": 600.0, "process": RUNNING}, 5) is None


@pytest.mark.parametrize(("process", "seconds"), [(GONE, 3.0), (STOPPED, 10.0), (UNKNOWN, 45.0)])
def test_a_lost_rank_is_reported_after_its_time(process: str, seconds: float) -> None:
    assert pair({}, {"quiet": seconds - 0.1, "process": process}, 2) is None
    found = str(pair({}, {"quiet": seconds, "process": process}, 2))
    assert found.startswith("lost rank 1: ")
    assert "its last known collective was number 1; rank 0 can't go on without it, in number 2" in found


def test_a_lost_rank_that_nobody_waits_for_gets_longer() -> None:
    assert pair({}, {"quiet": 29.0, "process": GONE}) is None
    assert "lost rank 1" in str(pair({}, {"quiet": 30.0, "process": GONE}))


def test_a_lost_rank_is_blamed_where_another_failed() -> None:
    assert "lost rank 1" in str(pair({}, {"quiet": 3.0, "process": GONE}, raised="RuntimeError: connection closed"))


def test_a_rank_that_ended_is_reported_only_where_others_issued_more() -> None:
    ended = {"ended": True}
    assert pair(ended, {"quiet": 3600.0, "process": GONE}) is None
    assert pair(ended, {"quiet": 3600.0, "process": GONE}, raised="ValueError: caught by the user") is None
    assert pair(ended, {"quiet": 1.0, "process": GONE}, 2) is None
    assert str(pair(ended, {"quiet": 3.0}, 2)).startswith("rank 1 ended after 1 collectives; rank 0 can't go on")


def test_a_rank_that_raised_is_reported_once_it_ended_or_held_up_others() -> None:
    raised = {"raised": "ValueError: a bad batch"}
    assert pair(raised, {"still": 29.0, "process": RUNNING}, 2) is None
    assert "rank 1 raised ValueError: a bad batch after 1" in str(pair(raised, {"still": 30.0, "process": RUNNING}, 2))
    found = pair(raised | {"ended": True}, {"quiet": 3.0}, raised="RuntimeError: connection closed")
    assert "rank 1 raised ValueError: a bad batch and ended after 1 collectives" in str(found)
