"""Watches, beside the training loop, that the ranks of a group issue the same collectives and are all there.

Each rank posts what it does about once a second to a store that the group's first rank hosts; that rank judges for all,
and the others judge whether it is there itself. The loop only notes what it issues, it never waits for the watch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
from torch import nn

from zerofx import verdict
from zerofx._torch import TCPStore
from zerofx.agree import RankMismatchError
from zerofx.processes import Offer, born, connect, host_store, process_state, this_host
from zerofx.sequence import ISSUED, Block, Entry, Folded, Issued
from zerofx.verdict import GONE, UNKNOWN, Seen, State

TICK_SECONDS = 1.0
LEAVE_SECONDS = 2.5  # how long the first rank keeps the store when it leaves, so that the others hear of it
BLAME_SECONDS = 12.0  # how long a rank that failed in a collective waits to be told because of whom
ANNOUNCE_SECONDS = 1.0
GRACE_SECONDS = 2.0  # between the message and the end of the process
EXIT_CODE = 1
VERDICT = "verdict"


class Watch:
    """The watch of one process in one group, from the first `zerofx.compile` in the group on."""

    def __init__(self, group: dist.ProcessGroup, offer: Offer, server: TCPStore | None, model: nn.Module) -> None:
        self.group, self.group_name, self.offer, self.store = group, group.group_name, offer, server
        self.issued, self.folded, self.blocks = Issued(), Folded(), dict[int, Block]()
        self.models = weakref.WeakSet[nn.Module]([model])
        self.rank, self.world, self.pid = group.rank(), group.size(), os.getpid()
        self.me = State(self.rank, this_host(), self.pid, born(self.pid), offer.epoch)
        self.seen: dict[int, tuple[State, float, float]] = {}
        self.posted, self.theirs = set[int](), dict[tuple[int, int], tuple[str, list[Entry]]]()
        self.issued.announce = self.announce
        self.exchanged, self.exchanges, self.done = threading.Condition(), 0, 0
        self.lock, self.wake = threading.Lock(), threading.Event()
        self.leaving, self.left, self.cut, self.told = False, threading.Event(), False, ""
        self.ending = False
        for run in (self._exchange_all, self._judge_all):
            threading.Thread(target=run, name="zerofx watch", daemon=True).start()

    def keep(self, model: nn.Module) -> bool:
        """Watches on while the model is there; False where the watch is ending."""
        with self.lock:
            if not self.leaving:
                self.models.add(model)
            return not self.leaving

    def begin(self, offer: Offer) -> None:
        """A new model: all ranks begin a new sequence here, where `zerofx.compile` has brought them together."""
        self.announce()
        self.offer = offer
        self.issued.note(None)

    def state(self, **changes: Any) -> State:
        """Folds what was noted into this rank's state."""
        with self.lock:
            while self.issued.queue:
                block = self.issued.queue.popleft()
                if block is None:
                    self.folded = Folded()
                    self.me = replace(self.me, epoch=self.me.epoch + 1, last="")
                    continue
                place = f"number {self.folded.n + len(block.entries)}, {block.entries[-1]} in {block.where}"
                self.folded.add(block)
                self.me = replace(self.me, last=place)
                self.blocks[block.key] = block
            folded = self.folded
            self.me = replace(self.me, n=folded.n, digest=folded.digest)
            self.me = replace(self.me, calls=tuple(folded.calls), marks=tuple(folded.marks))
            self.me = replace(self.me, doing=self.issued.doing, raised=self.issued.raised, **changes)
            return self.me

    def post(self) -> None:
        """Posts what this rank has issued up to now, and reads what others have posted; waits only for the store."""
        with self.exchanged:
            next_one = self.exchanges + 1
            self.wake.set()
            self.exchanged.wait_for(lambda: self.cut or self.left.is_set() or self.done >= next_one, ANNOUNCE_SECONDS)

    def announce(self) -> None:
        """Raises where the collectives up to now contradict what others posted; the others are not waited for."""
        self.post()
        if found := self._differ(self.state()):
            self.told = found
            self.tell(found)
            self.left.wait(3 * TICK_SECONDS)  # the other thread says it, and ends the process if this error does not
            raise RankMismatchError(found)

    def tell(self, message: str) -> None:
        """Ends the ranks of the group with a message, unless they can no longer be told."""
        if self.store is not None and not self.cut:
            with contextlib.suppress(RuntimeError, OSError):
                self.store.set(VERDICT, message)

    def leave(self) -> None:
        """Tells the others that this rank issues nothing more, and ends the watch."""
        with self.lock:
            self.leaving = True
        self.wake.set()
        if self.cut:
            self._end()

    # The thread that talks to the store. It may block while the first rank is stopped.

    def _exchange_all(self) -> None:
        since = None
        try:
            self.store = self.store or connect(self.offer, self.me.host)
            while not self.left.is_set():
                self._check_needed()
                since = since or (time.monotonic() if self.leaving else None)
                self.wake.clear()
                with self.exchanged:
                    self.exchanges += 1
                self._exchange(final=self.leaving)
                with self.exchanged:
                    self.done = self.exchanges
                    self.exchanged.notify_all()
                if since is not None and (self._heard() or time.monotonic() > since + LEAVE_SECONDS):
                    if found := self.told or self._differ(self.state()):
                        self._finish(found)
                    break
                self.wake.wait(0.05 if self.leaving else TICK_SECONDS)
        except (RuntimeError, OSError, ValueError):  # the first rank's process has ended, which the other thread judges
            self.cut = True
        if self.leaving:
            self._end()

    def _check_needed(self) -> None:
        try:
            dist.get_process_group_ranks(self.group)
            destroyed = False
        except (KeyError, ValueError):
            destroyed = True
        with self.lock:
            self.leaving = self.leaving or destroyed or not len(self.models)

    def _exchange(self, final: bool) -> None:
        assert self.store is not None
        state = self.state(beat=self.me.beat + 1, ended=final)
        for key in {call.key for call in state.calls} - self.posted:
            block = self.blocks[key]
            self.store.set(f"block {self.rank} {key}", json.dumps([block.where, block.entries]))
            self.posted.add(key)
        self.store.set(f"state {self.rank}", state.written())
        others = range(1, self.world) if self.rank == 0 else (0,)
        *replies, told = self.store.multi_get([*(f"state {other}" for other in others), VERDICT])
        now = time.monotonic()
        for other, reply in zip(others, replies, strict=True):
            if not reply:
                continue
            theirs = State.read(reply)
            for key in {call.key for call in theirs.calls if (other, call.key) not in self.theirs}:
                where, entries = json.loads(self.store.get(f"block {other} {key}"))
                listed = [Entry(kind, role, size, dtype, tuple(names)) for kind, role, size, dtype, names in entries]
                self.theirs[other, key] = where, listed
            self._see(other, theirs, now)
        self.told = self.told or told.decode()

    def _see(self, other: int, state: State, now: float) -> None:
        before, posted, moved = self.seen.get(other, (None, now, now))
        posted = posted if before and before.beat == state.beat and before.pid == state.pid else now
        moved = moved if before and (before.n, before.epoch) == (state.n, state.epoch) else now
        self.seen[other] = state, posted, moved
        if self.rank and state.ended:
            self.state(heard=True)

    def _heard(self) -> bool:
        """Whether this rank can leave: the first one when all others know, they when they were compared with it."""
        states = [state for state, _, _ in self.seen.values()]
        if self.rank == 0:
            return all(state.ended or state.heard for state in states)
        return any(state.ended or (state.epoch, state.n) >= (self.me.epoch, self.me.n) for state in states)

    def _end(self) -> None:
        self.left.set()
        if ISSUED.get(self.group_name) is self.issued:
            del ISSUED[self.group_name]
        if WATCHES.get(self.group_name) is self:
            del WATCHES[self.group_name]

    # The thread that judges.

    def _judge_all(self) -> None:
        before = time.monotonic()
        while not self.left.wait(TICK_SECONDS):
            now = time.monotonic()
            if now - before > 5 * TICK_SECONDS:  # this process was stopped itself: what it saw is old
                self.seen = {other: (state, now, now) for other, (state, _, _) in self.seen.items()}
            before = now
            if self.cut:
                self._check_needed()
                if self.leaving:
                    self._end()
            if message := self.told or self._judge(now):
                self._finish(message)

    def _judge(self, now: float) -> str | None:
        """Only the first rank judges all; the others judge it."""
        me = self.state()
        seen = [Seen(me), *(self._look(*each, now) for each in list(self.seen.values()))]
        return self._differ(me) or verdict.cannot_go_on(seen)

    def _differ(self, me: State) -> str | None:
        found = (verdict.differ(me, state, self._block) for state, _, _ in list(self.seen.values()))
        return next((problem for problem in found if problem), None)

    def _look(self, state: State, posted: float, moved: float, now: float) -> Seen:
        quiet = now - posted
        process = UNKNOWN
        if state.host == self.me.host:
            process = process_state(state.pid, state.born) if quiet > 2 * TICK_SECONDS else verdict.RUNNING
        elif self.cut and state.rank == 0:
            process = GONE
        return Seen(state, quiet, now - moved, process)

    def _block(self, rank: int, key: int) -> tuple[str, Sequence[Entry]]:
        if rank == self.rank:
            return self.blocks[key].where, self.blocks[key].entries
        return self.theirs[rank, key]

    def _finish(self, message: str) -> None:
        """Ends this process, whose main thread is as a rule in a collective that nothing can wake it from."""
        with _ENDS:
            if any(each.ending for each in (self, *WATCHES.values())):
                return
            self.ending = True
        sys.stderr.write(f"\nzerofx ends rank {self.rank} of {self.world}: {message}\n")
        sys.stderr.flush()
        for each in list(WATCHES.values()):
            if each is not self or self.rank == 0:  # ranks of another group may wait for this one, too
                each.tell(message)
        if any(each.rank == 0 for each in (self, *WATCHES.values())):
            time.sleep(2 * TICK_SECONDS)  # the others read it before the store goes
        self.left.set()
        time.sleep(GRACE_SECONDS)  # a main thread that has failed itself may end on its own meanwhile
        os._exit(EXIT_CODE)

    def at_exit(self) -> None:
        """Waits, after a failure in a collective, for the reason; then leaves."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self.issued.raised:
            self.issued.raised = f"{type(error).__name__}: {error}"
        if _is_failed_collective(error):
            self.left.wait(BLAME_SECONDS)
        self.leave()
        self.left.wait(LEAVE_SECONDS + TICK_SECONDS)
        if self.ending:
            time.sleep(3 * TICK_SECONDS + GRACE_SECONDS)  # `_finish` ends the process meanwhile


def _is_failed_collective(error: BaseException | None) -> bool:
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in words or "nccl" in words)
    )


WATCHES: dict[str, Watch] = {}
_SERVERS: dict[str, TCPStore] = {}
_HOOKED = set[int]()
_ENDS = threading.Lock()


def offer(group: dist.ProcessGroup | None, model: nn.Module) -> Offer | None:
    """What a rank tells the others at `zerofx.compile`; only what the group's first rank says counts."""
    if group is None or group.size() == 1:
        return None
    known = WATCHES.get(group.group_name)
    if known is not None and known.group is group:
        known.post()
    if group.rank() != 0:
        return Offer("", "", 0, 0)
    if known is not None and known.group is group and known.keep(model):
        return replace(known.offer, epoch=known.offer.epoch + 1)
    _SERVERS[group.group_name], made = host_store([VERDICT, *(f"state {rank}" for rank in range(group.size()))])
    return made


def start(group: dist.ProcessGroup | None, offers: Sequence[Offer | None], model: nn.Module) -> None:
    """Begins to watch the group, or a new sequence in a group that is watched already."""
    if group is None or group.size() == 1:
        return
    name, place = group.group_name, offers[0]
    assert place is not None
    known = WATCHES.get(name)
    same = known is not None and (known.offer.host, known.offer.port) == (place.host, place.port)
    if known is not None and same and known.group is group and known.keep(model):
        known.begin(place)
        return
    if known is not None:
        known.leave()
    WATCHES[name] = Watch(group, place, _SERVERS.pop(name, None), model)
    ISSUED[name] = WATCHES[name].issued
    if os.getpid() not in _HOOKED:
        _HOOKED.add(os.getpid())
        Finalize(None, _at_exit, exitpriority=0)  # runs where a process of multiprocessing ends, too


def follow(group_name: str, model: nn.Module) -> None:
    """Keeps the group watched while the model is there, such as the copy of a compiled one."""
    if watch := WATCHES.get(group_name):
        watch.keep(model)


def tell(message: str) -> None:
    """Ends this process and all that wait for it, in whatever group, with a message and within seconds."""
    for watch in list(WATCHES.values()):
        watch.tell(message)
    if WATCHES:
        time.sleep(3 * TICK_SECONDS)  # the others say it before they see that this process has ended


def _at_exit() -> None:
    watches = list(WATCHES.values())
    for watch in watches:
        watch.at_exit()
