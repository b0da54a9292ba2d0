"""Between pairs of ranks, by memory or by messages, every rank gets what the collectives bring; sums by rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from zerofx import meet, messages, neighbours
from zerofx.ops import c10d
from zerofx.transport import all_gather_p2p, reduce_scatter_p2p

ROWS = ((1, 5), (3, 2, 4), (2,), (0, 3), (700, 60))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Setting = tuple[torch.dtype, int, int, bool]
SETTINGS: list[Setting] = list(product(DTYPES, (1000, 2**22), (0, 2**16), (False, True)))
"""The dtype, the most bytes of a buffer or piece, the bytes below which messages are packed, and whether by memory."""


def tensors(rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank brings: `world` chunks of rows of several shapes, the last in other strides."""
    numbers = torch.Generator().manual_seed(rank)
    brought = [torch.randn(rows * world, *rest, generator=numbers).to(dtype) for rows, *rest in ROWS]
    return [*brought[:-1], brought[-1].t().contiguous().t()]


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextmanager
def by_memory(wanted: bool) -> Iterator[None]:
    """While it is entered, the ranks exchange through memory, whose places are new, or by messages."""
    with mock.patch.dict(meet.MET, clear=True):
        if wanted:
            meet.meet(world_group())
        found = meet.neighbours_of(world_group())
        assert (found is not None) == wanted
        yield
        if found is not None:
            assert found.posted and not found.unread and not found.unwritten
            found.close()


def mean_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


def exchange() -> dict[Setting, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Means and wholes for each setting; what was issued last is waited for first."""
    rank, world, name = dist.get_rank(), dist.get_world_size(), world_group().group_name
    found = {}
    for setting in SETTINGS:
        dtype, limit, packed, memory = setting
        own = tensors(rank, world, dtype)
        sizes = mock.patch.multiple(neighbours, RING_BYTES=4 * limit // 64 * 64, PIECE_BYTES=limit)
        with mock.patch.object(messages, "PACKED", packed), sizes, by_memory(memory):
            means = reduce_scatter_p2p(own, limit, "avg", world, name)
            wholes = all_gather_p2p([tensor.chunk(world)[0].clone() for tensor in own], world, name)
            for result in (*reversed(wholes), *means):
                c10d.wait_tensor(result)
        found[setting] = means, wholes
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_means_and_wholes_have_the_bits_of_one_process(pool: Callable[[int], Pool], world: int) -> None:
    for rank, found in enumerate(pool(world).run(exchange)):
        assert list(found) == SETTINGS
        for setting, (means, wholes) in found.items():
            brought = [tensors(other, world, setting[0]) for other in range(world)]
            for i, (rows, *_) in enumerate(ROWS):
                mine = slice(rank * rows, (rank + 1) * rows)
                assert torch.equal(means[i], mean_in_order([theirs[i][mine] for theirs in brought])), setting
                assert torch.equal(wholes[i], torch.cat([theirs[i][:rows] for theirs in brought])), setting


def many_under_way(steps: int) -> bool:
    """Whether gathers that are waited for in another order than they are issued, and late, all come right."""
    rank, world, name = dist.get_rank(), dist.get_world_size(), world_group().group_name
    waiting, right = list[tuple[int, torch.Tensor]](), True
    sizes = mock.patch.multiple(neighbours, RING_BYTES=2**14, PIECE_BYTES=2**12)
    with sizes, by_memory(True):
        for step in range(steps):
            (whole,) = all_gather_p2p([torch.full((1 + 37 * (step % 11),), float(step * world + rank))], world, name)
            waiting.append((step, whole))
            while len(waiting) > (step % 7 if step + 1 < steps else 0):
                number, got = waiting.pop(len(waiting) // 2)
                expected = number * world + torch.arange(world).repeat_interleave(len(got) // world)
                right &= torch.equal(c10d.wait_tensor(got), expected.float())
    return right


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_may_be_under_way_and_be_waited_for_in_any_order(pool: Callable[[int], Pool], world: int) -> None:
    assert pool(world).run(many_under_way, 200) == [True] * world


def differ() -> str:
    with mock.patch.dict(meet.MET, clear=True):
        meet.meet(world_group())
        size = 8 * (1 + dist.get_rank())
        try:
            c10d.wait_tensor(*all_gather_p2p([torch.zeros(size)], dist.get_world_size(), world_group().group_name))
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            dist.barrier()
    return ""


def test_ranks_that_send_different_sizes_are_told(pool: Callable[[int], Pool]) -> None:
    first, second = pool(2).run(differ)
    assert "rank 1 of the gloo group sends 64 bytes where rank 0 sends 32" in first
    assert "rank 0 of the gloo group sends 32 bytes where rank 1 sends 64" in second


def meet_without(cannot: str) -> bool:
    """Whether ranks that cannot all share memory, because of the last one, go by messages, and all of them."""
    last = dist.get_rank() == dist.get_world_size() - 1
    faults = {
        "host": mock.patch.object(meet, "this_host", return_value="elsewhere"),
        "memory": mock.patch.object(os, "memfd_create", mock.Mock(side_effect=OSError)),
        "door": mock.patch.object(meet.socket, "send_fds", mock.Mock(side_effect=OSError)),
    }
    limit = mock.patch.object(meet, "CONNECT_SECONDS", 1.0)
    with mock.patch.dict(meet.MET, clear=True), limit, faults[cannot] if last else mock.MagicMock():
        meet.meet(world_group())
        return meet.neighbours_of(world_group()) is None


@pytest.mark.parametrize("cannot", ["host", "memory", "door"])
def test_where_one_rank_cannot_share_memory_all_send_messages(pool: Callable[[int], Pool], cannot: str) -> None:
    assert pool(3).run(meet_without, cannot) == [True] * 3
