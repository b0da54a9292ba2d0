"""What one rank of a pipeline raises in a step is raised on all of them, before any parameter is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zerofx.agree import RankMismatchError


@contextmanager
def naming_ended_ranks() -> Iterator[None]:
    """Says in place of gloo, which tells of sockets, why a rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        raise RuntimeError(
            "another rank of this pipeline has ended or failed, as its own output says: this rank cannot go on"
        ) from error


def raise_together(problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raises a rank's problem there, and RankMismatchError, which names the rank and the problem, on all others.

    Called on all ranks of a group of the hosts'; where no rank has a problem it takes one all-reduce of a number.
    """
    if group is None or group.size() == 1:
        if problem is not None:
            raise problem
        return
    told: list[str | None] = [None] * group.size()
    with naming_ended_ranks():
        count = torch.tensor([0 if problem is None else 1])
        dist.all_reduce(count, group=group)
        if not count.item():
            return
        dist.all_gather_object(told, problem and f"{type(problem).__name__}: {problem}", group=group)
    if problem is not None:
        raise problem
    rank, why = next((rank, each) for rank, each in enumerate(told) if each)
    raise RankMismatchError(f"a step failed on rank {rank}, and has updated nothing on any rank: {why}")
