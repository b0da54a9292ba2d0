"""All-gather and reduce-scatter by point-to-point messages: `zerofx::all_gather_p2p`, `zerofx::reduce_scatter_p2p`.

On gloo they take a third to a half of the time of its own collectives. They send the same bytes, and what arrives is
written straight to where it is read. As with collectives, results are complete when `wait_tensor` has waited for them,
and what is sent must stay as it is until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx._torch import process_group, register_work

PACKED = 2**16  # bytes; smaller messages to one rank travel as one, with a copy on either side


@torch.library.custom_op("zerofx::all_gather_p2p", mutates_args=())
def all_gather_p2p(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """For each chunk of rows, the rows of all ranks in the order of the ranks."""
    wire = Wire(group_name)
    wholes = [chunk.new_empty((chunk.shape[0] * group_size, *chunk.shape[1:])) for chunk in inputs]
    messages = list[Message]()
    for chunk, whole in zip(inputs, wholes, strict=True):
        rows = _rows(whole, group_size)
        mine = rows.pop(wire.rank).copy_(chunk)
        messages.append(Message(dict.fromkeys(rows, mine), rows))
    _promise(wholes, wire.exchange(messages))
    return wholes


@torch.library.custom_op("zerofx::reduce_scatter_p2p", mutates_args=())
def reduce_scatter_p2p(
    inputs: Sequence[Tensor], buffer_bytes: int, reduce_op: str, group_size: int, group_name: str
) -> list[Tensor]:
    """For each tensor, this rank's chunk of its rows: the mean over ranks, summed in the order of the ranks.

    What arrives from the first other rank lands in the result, and that of the others in a buffer of at most
    `buffer_bytes` bytes: over more than two ranks, larger tensors take several rounds, of which the first runs ahead.
    """
    assert reduce_op == "avg"
    wire = Wire(group_name)
    inputs = [tensor.contiguous() for tensor in inputs]
    means = [tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:])) for tensor in inputs]
    buffered = max(0, len(wire.peers) - 1)
    limit = max(1, buffer_bytes // buffered // inputs[0].itemsize) if buffered else sum(t.numel() for t in means)
    rounds = [Round(wire, inputs, means, pieces) for pieces in _rounds([mean.numel() for mean in means], limit)]

    def finish(rest: Sequence[Round], first: Callable[[], None]) -> None:
        first()
        for each in rest:
            each.begin()()

    if rounds:
        first, *rest = rounds
        under_way = first.begin()
        _promise(means, lambda: finish(rest, under_way))
    return means


class Round:
    """One exchange of pieces of gradients: (place, start, end), into the same pieces of their means."""

    def __init__(
        self, wire: Wire, inputs: Sequence[Tensor], means: Sequence[Tensor], pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        self.wire, self.inputs, self.means, self.pieces = wire, inputs, means, pieces

    def begin(self) -> Callable[[], None]:
        """Sends; what it returns waits for what arrives, and adds it up."""
        wire, ranks = self.wire, len(self.wire.peers) + 1
        in_mean, *buffered = sorted(wire.peers)
        buffer = self.inputs[0].new_empty((len(buffered), sum(end - start for _, start, end in self.pieces)))
        messages, sums, used = list[Message](), list[tuple[Tensor, dict[int, Tensor]]](), 0
        for place, start, end in self.pieces:
            parts = {rank: rows.view(-1)[start:end] for rank, rows in _rows(self.inputs[place], ranks).items()}
            mean, mine, size = self.means[place].view(-1)[start:end], parts.pop(wire.rank), end - start
            arriving = {rank: buffer[i, used : used + size] for i, rank in enumerate(buffered)} | {in_mean: mean}
            used += size
            messages.append(Message(parts, arriving))
            sums.append((mean, arriving | {wire.rank: mine}))
        arrive = wire.exchange(messages)

        def finish() -> None:
            arrive()
            for mean, by_rank in sums:
                _mean([by_rank[rank] for rank in range(ranks)], mean)

        return finish


@all_gather_p2p.register_fake
def _(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    return [chunk.new_empty((chunk.shape[0] * group_size, *chunk.shape[1:])) for chunk in inputs]


@reduce_scatter_p2p.register_fake
def _(inputs: Sequence[Tensor], buffer_bytes: int, reduce_op: str, group_size: int, group_name: str) -> list[Tensor]:
    return [tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:])) for tensor in inputs]


class Message(NamedTuple):
    """What goes to each other rank, and where what it sends in return is written; contiguous, of one dtype."""

    sent: Mapping[int, Tensor]
    arriving: Mapping[int, Tensor]

    @property
    def nbytes(self) -> int:
        return next(iter(self.sent.values())).nbytes


class Wire:
    """The way to the other ranks of a process group."""

    def __init__(self, group_name: str) -> None:
        self.group = process_group(group_name)
        self.rank, size = self.group.rank(), self.group.size()
        self.peers = [(self.rank + step) % size for step in range(1, size)]

    def exchange(self, messages: Sequence[Message]) -> Callable[[], None]:
        """Sends and receives all messages at once; what it returns waits until all have arrived and left.

        Every rank gives messages of the same sizes in the same order.
        """
        small = [message for message in messages if 0 < message.nbytes < PACKED]
        large = [message for message in messages if message.nbytes >= PACKED]
        packed = [_pack(small)] if len(small) > 1 else small
        works = list[dist.Work | None]()
        for message in (*packed, *large):
            for peer in self.peers:
                works.append(dist.isend(message.sent[peer], group=self.group, group_dst=peer))
                works.append(dist.irecv(message.arriving[peer], group=self.group, group_src=peer))

        def arrive() -> None:
            for work in works:
                cast(dist.Work, work).wait()
            if len(small) > 1:
                _unpack(packed[0], small)

        return arrive


class Promise(dist.Work):
    """What wait_tensor waits for."""

    def __init__(self, keep: Callable[[], None]) -> None:
        super().__init__()
        self.keep: Callable[[], None] | None = keep

    def wait(self, timeout: object = None) -> bool:
        keep, self.keep = self.keep, None
        if keep is not None:
            keep()
        return True


def _promise(results: Sequence[Tensor], keep: Callable[[], None]) -> None:
    """Lets the first wait for one of the results, which come together, do what is left to do."""
    promise = Promise(keep)
    for result in results:
        register_work(result, promise)


def _pack(messages: Sequence[Message]) -> Message:
    peers = messages[0].sent
    sent = {peer: torch.cat([message.sent[peer].reshape(-1) for message in messages]) for peer in peers}
    return Message(sent, {peer: torch.empty_like(tensor) for peer, tensor in sent.items()})


def _unpack(packed: Message, messages: Sequence[Message]) -> None:
    for peer, arrived in packed.arriving.items():
        sizes = [message.arriving[peer].numel() for message in messages]
        for message, part in zip(messages, arrived.split_with_sizes(sizes), strict=True):
            message.arriving[peer].copy_(part.view_as(message.arriving[peer]))


def _rows(tensor: Tensor, parts: int) -> dict[int, Tensor]:
    """The rows that belong to each rank."""
    rows = tensor.shape[0] // parts
    return {rank: tensor.narrow(0, rank * rows, rows) for rank in range(parts)}


def _rounds(sizes: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts tensors of these sizes into (place, start, end), in rounds of at most `limit` elements each."""
    pieces, free = list[tuple[int, int, int]](), limit
    for place, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + free)
            pieces.append((place, start, end))
            free -= end - start
            start = end
            if not free:
                yield pieces
                pieces, free = [], limit
    if pieces:
        yield pieces


def _mean(parts: Sequence[Tensor], out: Tensor) -> None:
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    out.div_(len(parts))
