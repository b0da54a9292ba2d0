"""Finds out whether all ranks of a group share a host, and opens what they exchange through there."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from mmap import mmap

import torch.distributed as dist

from zerofx.neighbours import RING_BYTES, Neighbours
from zerofx.processes import this_host

CONNECT_SECONDS = 20.0
RANK = struct.Struct("I")
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the process at the other end of a socket."""

MET: dict[str, tuple[dist.ProcessGroup, Neighbours | None]] = {}
"""By name of the process group; None where the ranks do not share a host and its memory."""


def neighbours_of(group: dist.ProcessGroup) -> Neighbours | None:
    """What the group's ranks exchange through, if they have met and share this host."""
    known, found = MET.get(group.group_name, (None, None))
    return found if known is group else None


def meet(group: dist.ProcessGroup) -> None:
    """Opens the way between the ranks of a group if all of them are on this host; every rank calls it."""
    known, old = MET.get(group.group_name, (None, None))
    if known is group:
        return
    if old is not None:
        old.close()
    found: Neighbours | None = None
    with _listening() as (listener, name):
        told: list[tuple[str, str]] = [("", "")] * group.size()
        dist.all_gather_object(told, (this_host(), name), group=group)
        names = [name for _, name in told]
        if all(names) and len({host for host, _ in told}) == 1:
            try:
                found = _open(group.rank(), names, listener)
            except OSError:  # memory or sockets that these processes do not share
                found = None
        everyone = [False] * group.size()
        dist.all_gather_object(everyone, found is not None, group=group)
    if found is not None and not all(everyone):
        found.close()
        found = None
    MET[group.group_name] = group, found


@contextmanager
def _listening() -> Iterator[tuple[socket.socket | None, str]]:
    """A socket and its name, which is no file: Linux has such sockets, and memory without a name. Empty elsewhere."""
    name = f"\0zerofx {secrets.token_hex(16)}"
    if not hasattr(os, "memfd_create"):
        yield None, ""
        return
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(name)
            listener.listen()
            listener.settimeout(CONNECT_SECONDS)
        except OSError:
            name = ""
        yield listener, name


def _open(rank: int, names: list[str], listener: socket.socket | None) -> Neighbours:
    """Connects to the ranks before this one, lets those behind it connect, and swaps rings with all of them."""
    assert listener is not None
    with ExitStack() as undo:
        memory = os.memfd_create("zerofx ring")
        undo.callback(os.close, memory)
        os.ftruncate(memory, RING_BYTES)
        rings, doors = {rank: mmap(memory, RING_BYTES)}, dict[int, socket.socket]()
        opened = undo.enter_context(ExitStack())
        for place in range(len(names) - 1):
            if place < rank:
                door = opened.enter_context(socket.socket(socket.AF_UNIX))
                door.settimeout(CONNECT_SECONDS)
                door.connect(names[place])
            else:
                door = opened.enter_context(listener.accept()[0])
                door.settimeout(CONNECT_SECONDS)
            socket.send_fds(door, [RANK.pack(rank)], [memory])
            other, rings[other], doors[other] = *_received(door), door
        for door in doors.values():
            door.settimeout(None)
        opened.pop_all()
    return Neighbours(rank, [rings[other] for other in range(len(names))], doors)


def _received(door: socket.socket) -> tuple[int, mmap]:
    """The rank at the other end, and its ring. Raises OSError for a process of another user."""
    _, user, _ = CREDENTIALS.unpack(door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    told, files, *_ = socket.recv_fds(door, RANK.size, 1)
    try:
        if user != os.geteuid() or len(told) != RANK.size or len(files) != 1:
            raise OSError("another program is at the door")
        return RANK.unpack(told)[0], mmap(files[0], RING_BYTES)
    finally:
        for file in files:
            os.close(file)
