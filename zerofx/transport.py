"""All-gather and reduce-scatter between pairs of ranks: `zerofx::all_gather_p2p`, `zerofx::reduce_scatter_p2p`.

Ranks of one host exchange through memory that they share, others by point-to-point messages, which on gloo take a third
to a half of the time of its own collectives. They send the same bytes, and what arrives is written straight to where it
is read. As with collectives, results are complete when `wait_tensor` has waited for them, and what is sent must stay as
it is until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx._torch import process_group, register_work
from zerofx.meet import neighbours_of
from zerofx.messages import Messages


@torch.library.custom_op("zerofx::all_gather_p2p", mutates_args=())
def all_gather_p2p(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """For each chunk of rows, the rows of all ranks in the order of the ranks."""
    group = process_group(group_name)
    wholes = [chunk.new_empty((chunk.shape[0] * group_size, *chunk.shape[1:])) for chunk in inputs]
    rows = [whole.chunk(group_size) for whole in wholes if whole.numel()]
    for chunk, parts in zip((chunk for chunk in inputs if chunk.numel()), rows, strict=True):
        parts[group.rank()].copy_(chunk)
    way = neighbours_of(group) or Messages(group)
    _promise(wholes, way.gather(rows))
    return wholes


@torch.library.custom_op("zerofx::reduce_scatter_p2p", mutates_args=())
def reduce_scatter_p2p(
    inputs: Sequence[Tensor], buffer_bytes: int, reduce_op: str, group_size: int, group_name: str
) -> list[Tensor]:
    """For each tensor, this rank's chunk of its rows: the mean over ranks, summed in the order of the ranks.

    What arrives in messages waits in a buffer of at most `buffer_bytes` bytes.
    """
    assert reduce_op == "avg"
    group = process_group(group_name)
    means = [tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:])) for tensor in inputs]
    rows = [tensor.contiguous().chunk(group_size) for tensor in inputs if tensor.numel()]
    way = neighbours_of(group) or Messages(group, buffer_bytes)
    _promise(means, way.scatter(rows, [mean for mean in means if mean.numel()]))
    return means


@all_gather_p2p.register_fake
def _(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    return [chunk.new_empty((chunk.shape[0] * group_size, *chunk.shape[1:])) for chunk in inputs]


@reduce_scatter_p2p.register_fake
def _(inputs: Sequence[Tensor], buffer_bytes: int, reduce_op: str, group_size: int, group_name: str) -> list[Tensor]:
    return [tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:])) for tensor in inputs]


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
