"""All-gather and reduce-scatter by point-to-point messages: `zerofx::all_gather_p2p`, `zerofx::reduce_scatter_p2p`.

On gloo they take a third to a half of the time of its own collectives. They send the same bytes, and what arrives is
written straight to where it is read. Results are complete when an op returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx._torch import CONTIGUOUS, process_group

PACKED = 2**16  # bytes; smaller messages to one rank travel as one, with a copy on either side


@torch.library.custom_op("zerofx::all_gather_p2p", mutates_args=(), tags=CONTIGUOUS)
def all_gather_p2p(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """For each chunk of rows, the rows of all ranks in the order of the ranks."""
    wire = Wire(group_name)
    inputs = [chunk.contiguous() for chunk in inputs]
    wholes = [chunk.new_empty((chunk.shape[0] * group_size, *chunk.shape[1:])) for chunk in inputs]
    messages = list[Message]()
    for chunk, whole in zip(inputs, wholes, strict=True):
        rows = _rows(whole, group_size)
        rows.pop(wire.rank).copy_(chunk)
        messages.append(Message(dict.fromkeys(rows, chunk), rows))
    wire.exchange(messages)
    return wholes


@torch.library.custom_op("zerofx::reduce_scatter_p2p", mutates_args=(), tags=CONTIGUOUS)
def reduce_scatter_p2p(
    inputs: Sequence[Tensor], buffer_bytes: int, reduce_op: str, group_size: int, group_name: str
) -> list[Tensor]:
    """For each tensor, this rank's chunk of its rows: the mean over ranks, summed in the order of the ranks.

    What arrives from the first other rank lands in the result, and that of the others in a buffer of at most
    `buffer_bytes` bytes: over more than two ranks, larger tensors take several rounds.
    """
    assert reduce_op == "avg"
    wire = Wire(group_name)
    inputs = [tensor.contiguous() for tensor in inputs]
    means = [tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:])) for tensor in inputs]
    chunks = [_rows(tensor, group_size) for tensor in inputs]
    buffered = sorted(wire.peers)[1:]
    limit = max(1, buffer_bytes // len(buffered) // inputs[0].itemsize) if buffered else sum(t.numel() for t in means)
    for pieces in _rounds([mean.numel() for mean in means], limit):
        buffer = inputs[0].new_empty((len(buffered), sum(end - start for _, start, end in pieces)))
        messages, sums, used = list[Message](), list[tuple[Tensor, dict[int, Tensor]]](), 0
        for place, start, end in pieces:
            parts = {rank: rows.view(-1)[start:end] for rank, rows in chunks[place].items()}
            mean, mine, size = means[place].view(-1)[start:end], parts.pop(wire.rank), end - start
            arriving = {rank: buffer[i, used : used + size] for i, rank in enumerate(buffered)}
            arriving[min(wire.peers)] = mean
            used += size
            messages.append(Message(parts, arriving))
            sums.append((mean, arriving | {wire.rank: mine}))
        wire.exchange(messages)
        for mean, by_rank in sums:
            _mean([by_rank[rank] for rank in range(group_size)], mean)
    return means


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

    def exchange(self, messages: Sequence[Message]) -> None:
        """Sends and receives all messages at once; every rank gives messages of the same sizes in the same order."""
        small = [message for message in messages if 0 < message.nbytes < PACKED]
        large = [message for message in messages if message.nbytes >= PACKED]
        packed = [_pack(small)] if len(small) > 1 else small
        works = list[dist.Work | None]()
        for message in (*packed, *large):
            for peer in self.peers:
                works.append(dist.isend(message.sent[peer], group=self.group, group_dst=peer))
                works.append(dist.irecv(message.arriving[peer], group=self.group, group_src=peer))
        for work in works:
            cast(dist.Work, work).wait()
        if len(small) > 1:
            _unpack(packed[0], small)


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
