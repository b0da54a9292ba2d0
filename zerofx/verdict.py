"""Decides from what ranks posted whether they can go on; pure functions of posted states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from zerofx.sequence import Call, Entry

GONE_SECONDS = 3.0  # after which a process that has ended is held to be lost
STOPPED_SECONDS = 10.0  # the same for a process that is stopped
SILENT_SECONDS = 45.0  # the same for a rank on another host, whose process cannot be looked at
IDLE_SECONDS = 30.0  # the same for a rank that no other one waits for
RAISED_SECONDS = 30.0  # how long a rank that raised out of the model may hold up the others
STOPPED, GONE, RUNNING, UNKNOWN = "stopped", "gone", "running", "unknown"


@dataclass(frozen=True)
class State:
    """What a rank posts. `ended`: it left the group or its process ended normally; `raised`: what left the model."""

    rank: int
    host: str
    pid: int
    born: str
    epoch: int = 0
    beat: int = 0
    n: int = 0
    digest: int = 0
    doing: str = ""
    last: str = ""
    raised: str = ""
    ended: bool = False
    heard: bool = False
    calls: tuple[Call, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> State:
        told = json.loads(text)
        calls = tuple(Call(*call) for call in told.pop("calls"))
        marks = tuple((place, digest) for place, digest in told.pop("marks"))
        return cls(**told, calls=calls, marks=marks)


@dataclass(frozen=True)
class Seen:
    """A rank's last state, the seconds since it posted and since it issued a collective, and how its process is."""

    state: State
    quiet: float = 0.0
    still: float = 0.0
    process: str = UNKNOWN


Blocks = Callable[[int, int], tuple[str, Sequence[Entry]]]
"""Where a block of collectives belongs and its entries, by rank and key."""


def cannot_go_on(seen: Sequence[Seen]) -> str | None:
    """Says which rank the others wait for in vain, if that is certain.

    A rank that only takes its time, in whatever code, is never the answer: its process has to be gone or stopped, or it
    has to have ended, or raised out of the model, behind the others.
    """
    there = [each for each in seen if not each.state.ended and _lost(each) is None]
    for each in seen:
        if (how := _lost(each)) is None:
            continue
        waiting = _waiting(each.state, there, failed=True)
        if waiting or each.quiet >= IDLE_SECONDS:
            last = f"its last known collective was {each.state.last}" if each.state.last else "it issued no collective"
            return f"lost rank {each.state.rank}: {how}; {last}{_who(waiting)}"
    for each in seen:
        waiting = _waiting(each.state, there, failed=bool(each.state.raised and each.state.ended))
        over = each.state.ended and each.quiet >= GONE_SECONDS
        stuck = bool(each.state.raised) and each.still >= RAISED_SECONDS
        if not waiting or not (over or stuck):
            continue
        raised = f" raised {each.state.raised}" if each.state.raised else ""
        ended = (" and ended" if raised else " ended") if over else ""
        return f"rank {each.state.rank}{raised}{ended} after {each.state.n} collectives{_who(waiting)}"
    return None


def _lost(seen: Seen) -> str | None:
    if seen.state.ended:
        return None
    if seen.process == GONE and seen.quiet >= GONE_SECONDS:
        return "its process was killed or crashed"
    if seen.process == STOPPED and seen.quiet >= STOPPED_SECONDS:
        return f"its process is stopped and posted nothing for {seen.quiet:.0f} s"
    if seen.process == UNKNOWN and seen.quiet >= SILENT_SECONDS:
        return f"nothing was heard from it for {seen.quiet:.0f} s"
    return None


def _waiting(behind: State, there: Sequence[Seen], failed: bool) -> list[State]:
    """Ranks that cannot go on without the one behind: they issued more than it, or `failed` themselves meanwhile."""
    peers = [each.state for each in there if each.state.epoch == behind.epoch and each.state.rank != behind.rank]
    return [peer for peer in peers if peer.n > behind.n or (failed and peer.raised)]


def _who(waiting: Sequence[State]) -> str:
    if not waiting:
        return ""
    more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    return f"; rank {waiting[0].rank}{more} can't go on without it, in {waiting[0].last}"


def differ(a: State, b: State, blocks: Blocks) -> str | None:
    """Says where the sequences of collectives of two ranks part, if they do up to where both have come."""
    n = min(a.n, b.n)
    if a.epoch != b.epoch or not n:
        return None
    mine, theirs = _places(a), _places(b)
    common = max((place for place in mine.keys() & theirs.keys() if place <= n), default=None)
    if common is not None and mine[common] != theirs[common]:
        return _first_difference(a, b, blocks) or (
            f"ranks {a.rank} and {b.rank} issued different collectives, somewhere up to number {common}"
        )
    return None if common == n else _first_difference(a, b, blocks)


def _places(state: State) -> dict[int, int]:
    return {**dict(state.marks), **{call.n: call.digest for call in state.calls}, state.n: state.digest}


def _first_difference(a: State, b: State, blocks: Blocks) -> str | None:
    """Compares collective by collective, as far as both ranks' last calls reach back."""
    mine, theirs = _entries(a, blocks), _entries(b, blocks)
    for place in sorted(mine.keys() & theirs.keys()):
        (where, entry), (there, other) = mine[place], theirs[place]
        if entry != other:
            return (
                f"ranks issue different collectives, and would hang or exchange wrong values: number {place + 1} "
                f"is {entry} in {where} on rank {a.rank}, but {other} in {there} on rank {b.rank}"
            )
    return None


def _entries(state: State, blocks: Blocks) -> Mapping[int, tuple[str, Entry]]:
    found: dict[int, tuple[str, Entry]] = {}
    for call in state.calls:
        where, entries = blocks(state.rank, call.key)
        found |= {call.n + place: (where, entry) for place, entry in enumerate(entries)}
    return found
