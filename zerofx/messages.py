"""Exchanges between the ranks of a group by point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.rounds import Cut, mean_into, rounds

PACKED = 2**16  # bytes; smaller messages to one rank travel as one, with a copy on either side


class Message(NamedTuple):
    """What goes to each other rank, and where what it sends in return is written; contiguous, of one dtype."""

    sent: Mapping[int, Tensor]
    arriving: Mapping[int, Tensor]

    @property
    def nbytes(self) -> int:
        return next(iter(self.sent.values())).nbytes


class Messages:
    """The way to the other ranks of a group; `buffer_bytes` bound what arrives to be summed."""

    def __init__(self, group: dist.ProcessGroup, buffer_bytes: int = 0) -> None:
        self.group, self.rank, self.buffer_bytes = group, group.rank(), buffer_bytes
        self.peers = [(self.rank + step) % group.size() for step in range(1, group.size())]

    def gather(self, rows: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
        """Sends this rank's row of each tensor, and receives the others'; what it returns waits for them."""
        messages = list[Message]()
        for parts in rows:
            arriving = {peer: parts[peer] for peer in self.peers}
            messages.append(Message(dict.fromkeys(self.peers, parts[self.rank]), arriving))
        return self.exchange(messages)

    def scatter(self, rows: Sequence[Sequence[Tensor]], means: Sequence[Tensor]) -> Callable[[], None]:
        """Sends each rank its row of each tensor; what it returns waits for those that arrive, and has their means.

        What arrives from the first other rank lands in the mean, and that of the others in a buffer: over more than two
        ranks larger tensors take several rounds, of which the first runs ahead.
        """
        sizes, buffered = [mean.numel() for mean in means], len(self.peers) - 1
        limit = self.buffer_bytes // buffered // means[0].itemsize if buffered and means else sum(sizes)
        first, *rest = [*rounds(sizes, limit)] or [[]]
        under_way = self._round(rows, means, first)

        def finish() -> None:
            under_way()
            for cuts in rest:
                self._round(rows, means, cuts)()

        return finish

    def _round(
        self, rows: Sequence[Sequence[Tensor]], means: Sequence[Tensor], cuts: Sequence[Cut]
    ) -> Callable[[], None]:
        in_mean, *buffered = sorted(self.peers)
        sizes = [cut.end - cut.start for cut in cuts]
        room = [means[0].new_empty(sum(sizes)).split_with_sizes(sizes) for _ in buffered]
        messages, sums = list[Message](), list[tuple[Tensor, list[Tensor]]]()
        for i, cut in enumerate(cuts):
            mean = cut.of(means)
            sent = dict(enumerate(cut.of_rows(rows)))
            arriving = {in_mean: mean} | {peer: room[j][i] for j, peer in enumerate(buffered)}
            by_rank = arriving | {self.rank: sent.pop(self.rank)}
            messages.append(Message(sent, arriving))
            sums.append((mean, [by_rank[rank] for rank in sorted(by_rank)]))
        arrive = self.exchange(messages)

        def finish() -> None:
            arrive()
            for mean, parts in sums:
                mean_into(mean, parts)

        return finish

    def exchange(self, messages: Sequence[Message]) -> Callable[[], None]:
        """Sends and receives all messages at once; what it returns waits until all have arrived and left.

        Every rank gives messages of the same sizes in the same order.
        """
        small = [message for message in messages if message.nbytes < PACKED]
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


def _pack(messages: Sequence[Message]) -> Message:
    peers = messages[0].sent
    sent = {peer: torch.cat([message.sent[peer].reshape(-1) for message in messages]) for peer in peers}
    return Message(sent, {peer: torch.empty_like(tensor) for peer, tensor in sent.items()})


def _unpack(packed: Message, messages: Sequence[Message]) -> None:
    for peer, arrived in packed.arriving.items():
        sizes = [message.arriving[peer].numel() for message in messages]
        for message, part in zip(messages, arrived.split_with_sizes(sizes), strict=True):
            message.arriving[peer].copy_(part.view_as(message.arriving[peer]))
