"""Point-to-point messages bring every rank what the collectives bring, with sums in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from zerofx import transport
from zerofx.ops import c10d
from zerofx.transport import all_gather_p2p, reduce_scatter_p2p

ROWS = ((1, 5), (3, 2, 4), (2,), (0, 3), (700, 60))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Setting = tuple[torch.dtype, int, int]
SETTINGS: list[Setting] = list(product(DTYPES, (1000, 2**22), (0, 2**16)))
"""The dtype, the most bytes of a buffer, and the bytes below which messages are packed."""


def tensors(rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank brings: `world` chunks of rows of several shapes, the last in other strides."""
    numbers = torch.Generator().manual_seed(rank)
    brought = [torch.randn(rows * world, *rest, generator=numbers).to(dtype) for rows, *rest in ROWS]
    return [*brought[:-1], brought[-1].t().contiguous().t()]


def group_name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def mean_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


def exchange() -> dict[Setting, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Means and wholes for each setting."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for dtype, buffer_bytes, packed in SETTINGS:
        own = tensors(rank, world, dtype)
        with mock.patch.object(transport, "PACKED", packed):
            means = reduce_scatter_p2p(own, buffer_bytes, "avg", world, group_name())
            wholes = all_gather_p2p([tensor.chunk(world)[0].clone() for tensor in own], world, group_name())
            for result in (*reversed(wholes), *means):
                c10d.wait_tensor(result)
        found[dtype, buffer_bytes, packed] = means, wholes
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
