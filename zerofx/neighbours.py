"""Exchanges between the ranks of a group that share a host, through memory that all of them map.

Each rank writes what it sends into a ring of its own and rings at the others' doors, which are sockets; they read it
there, and ring when they have. All ranks exchange the same sizes in the same order, so the place in a ring follows from
the sizes alone. A rank that ends closes its sockets, which the others see at once.
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from zerofx.rounds import Cut, mean_into, rounds

RING_BYTES = 16 * 2**20
PIECE_BYTES = RING_BYTES // 4  # the most that is written in one go
ALIGNED = 64  # bytes
RECORD = struct.Struct("<cQ")
"""What a rank tells at a door: that it has written or read a piece, and the bytes of it."""
WRITTEN, READ = b"w", b"r"


class Part(NamedTuple):
    """What goes to the other ranks, and what to do with what comes from them; ranks are in their order.

    `sent` is one tensor for each other rank, or one for all of them; contiguous, of one size and dtype. `take` gets a
    tensor like these from each other rank and must not keep it.
    """

    sent: Sequence[Tensor]
    take: Callable[[Sequence[Tensor]], None]

    @property
    def nbytes(self) -> int:
        return self.sent[0].nbytes * len(self.sent)


class Piece:
    """Parts that are written and read in one go.

    `start` counts the bytes of a ring from the first piece on; a piece does not go round the ring's end.
    """

    def __init__(self, parts: Sequence[Part], number: int, after: int) -> None:
        self.parts, self.number = parts, number
        self.nbytes = sum(part.nbytes for part in parts)
        after = -(-after // ALIGNED) * ALIGNED
        left = RING_BYTES - after % RING_BYTES
        self.start = after if self.nbytes <= left else after + left

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Neighbours:
    """The ranks of a group on this host: everyone's ring, and a socket to each other rank."""

    def __init__(self, rank: int, rings: Sequence[mmap], doors: Mapping[int, socket.socket]) -> None:
        self.rank, self.rings, self.doors = rank, rings, doors
        self.unwritten, self.unread = deque[Piece](), deque[Piece]()
        self.occupied = deque[tuple[int, int]]()  # numbers and starts of pieces: their tensors are let go of
        self.posted, self.end = 0, 0
        self.written, self.read = dict.fromkeys(doors, 0), dict.fromkeys(doors, 0)
        self.heard, self.gone = dict.fromkeys(doors, b""), set[int]()
        self.selector = selectors.DefaultSelector()
        for other, door in doors.items():
            self.selector.register(door, selectors.EVENT_READ, other)

    def gather(self, rows: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """Sends this rank's row of each tensor, and takes the others'; what it returns waits for them."""

        def part(_: Cut, places: list[Tensor]) -> Part:
            mine = places.pop(self.rank)
            return Part([mine], partial(_copy, places))

        return self._exchange(rows, PIECE_BYTES, part)

    def scatter(self, rows: Sequence[Sequence[Tensor]], means: Sequence[Tensor]) -> Callable[[], None]:
        """Sends each rank its row of each tensor; what it returns waits for those that arrive, and has their means."""

        def part(cut: Cut, sent: list[Tensor]) -> Part:
            mine = sent.pop(self.rank)
            return Part(sent, partial(_mean, cut.of(means), mine, self.rank))

        return self._exchange(rows, PIECE_BYTES // len(self.doors), part)

    def _exchange(
        self, rows: Sequence[Sequence[Tensor]], limit: int, part: Callable[[Cut, list[Tensor]], Part]
    ) -> Callable[[], None]:
        """Makes parts of the rows of all ranks, cut so that a piece holds at most `limit` bytes of each."""
        sizes, itemsize = [parts[0].numel() for parts in rows], rows[0][0].itemsize if rows else 1
        pieces = [[part(cut, cut.of_rows(rows)) for cut in cuts] for cuts in rounds(sizes, limit // itemsize)]
        return self.post(pieces)

    def post(self, pieces: Sequence[Sequence[Part]]) -> Callable[[], None]:
        """Sends pieces of at most PIECE_BYTES each; what it returns reads them and all that was posted before."""
        for parts in pieces:
            piece = Piece(parts, self.posted, self.end)
            self.posted, self.end = self.posted + 1, piece.end
            self.unwritten.append(piece)
            self.unread.append(piece)
        last = self.posted
        for _ in range(2):  # the others get what there is room for before this rank hears that they differ
            while self._write():
                pass
            self._listen(0)
        return lambda: self._finish(last)

    def close(self) -> None:
        self.selector.close()
        for door in self.doors.values():
            door.close()

    def _finish(self, last: int) -> None:
        """Reads the pieces before number `last` as they come, and writes those that had no room yet."""
        while any(pieces and pieces[0].number < last for pieces in (self.unread, self.unwritten)):
            if not (self._read(last) or self._write()):
                self._listen(default_pg_timeout.total_seconds())

    def _read(self, last: int) -> bool:
        """Reads the next piece if all others have written it and it is before number `last`; whether it did."""
        if not self.unread or not self.unread[0].number < min(last, *self.written.values()):
            return False
        piece = self.unread.popleft()
        start = piece.start
        for part in piece.parts:
            part.take([self._at(other, self.rank, start, part) for other in sorted(self.doors)])
            start += part.nbytes
        self._tell(READ, piece)
        return True

    def _write(self) -> bool:
        """Writes the next piece if there is room for it; whether it did."""
        if not self.unwritten or not self._has_room(self.unwritten[0]):
            return False
        piece = self.unwritten.popleft()
        start = piece.start
        for part in piece.parts:
            for other, tensor in zip(sorted(self.doors), part.sent, strict=False):
                self._at(self.rank, other, start, part).copy_(tensor)
            start += part.nbytes
        self.occupied.append((piece.number, piece.start))
        self._tell(WRITTEN, piece)
        return True

    def _at(self, writer: int, reader: int, start: int, part: Part) -> Tensor:
        """The place in the writer's ring of what a part, which begins at `start`, has for the reader."""
        like = part.sent[0]
        if len(part.sent) > 1:
            start += (reader - (reader > writer)) * like.nbytes
        return torch.frombuffer(self.rings[writer], dtype=like.dtype, count=like.numel(), offset=start % RING_BYTES)

    def _has_room(self, piece: Piece) -> bool:
        while self.occupied and self.occupied[0][0] < min(self.read.values()):
            self.occupied.popleft()
        return not self.occupied or piece.end - self.occupied[0][1] <= RING_BYTES

    def _tell(self, what: bytes, piece: Piece) -> None:
        for door in self.doors.values():
            with suppress(OSError):  # who has ended is missed where this rank waits for it
                door.sendall(RECORD.pack(what, piece.nbytes))

    def _listen(self, seconds: float) -> None:
        """Hears what others tell, and waits up to so many seconds for the first of it."""
        if seconds and self.unread:
            missed = [rank for rank in self.gone if self.written[rank] <= self.unread[0].number]
            if missed:
                raise RuntimeError(f"rank {missed[0]} of the gloo group has ended, and rank {self.rank} waits for it")
        ready = self.selector.select(seconds)
        if seconds and not ready:
            raise RuntimeError(f"the other ranks of the gloo group sent nothing for {seconds:.0f} s")
        for key, _ in ready:
            rank, heard = key.data, b""
            with suppress(OSError):
                heard = self.doors[rank].recv(2**16)
            if not heard:
                self.selector.unregister(self.doors[rank])
                self.gone.add(rank)
                self.read[rank] = sys.maxsize
            heard = self.heard[rank] + heard
            whole = len(heard) // RECORD.size * RECORD.size
            self.heard[rank] = heard[whole:]
            for what, nbytes in RECORD.iter_unpack(heard[:whole]):
                self._hear(rank, what, nbytes)

    def _hear(self, rank: int, what: bytes, nbytes: int) -> None:
        if what == READ:
            self.read[rank] += 1
            return
        number = self.written[rank]
        self.written[rank] += 1
        mine = next((piece.nbytes for piece in self.unread if piece.number == number), nbytes)
        if mine != nbytes:
            raise RuntimeError(
                f"rank {rank} of the gloo group sends {nbytes} bytes where rank {self.rank} sends {mine}: they do not "
                "run the same program"
            )


def _copy(places: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
    for place, tensor in zip(places, arrived, strict=True):
        place.copy_(tensor)


def _mean(out: Tensor, mine: Tensor, rank: int, arrived: Sequence[Tensor]) -> None:
    mean_into(out, [*arrived[:rank], mine, *arrived[rank:]])
