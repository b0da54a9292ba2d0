"""Compares what must be equal over all ranks that train a model, whatever groups these are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from zerofx import _torch, watch
from zerofx.agree import agree
from zerofx.mesh import ModelParallel

Facts = Mapping[str, Mapping[str, Any]]
"""By axis, what must be equal on all ranks along it."""
Told = Sequence[tuple[dist.ProcessGroup | None, Sequence[Any]]]
"""The groups of this rank, and what their ranks offer the watch."""


def agree_all(
    facts: Facts,
    problem: Exception | None,
    group: dist.ProcessGroup | None,
    parallel: ModelParallel,
    model: nn.Module | None = None,
    caller: str = "zerofx.compile",
) -> Told:
    """Raises on every rank if one rank has a problem, or if facts differ along an axis.

    The rank with the problem raises that; the others name it. With a `model`, what is returned starts its watch.
    """
    told = list[tuple[dist.ProcessGroup | None, Sequence[Any]]]()
    groups = {"dp": group} | {axis.name: _torch.process_group(axis.group) for axis in parallel.axes}
    for axis, each in groups.items():
        offered = watch.offer(each, model) if model is not None and problem is None else None
        try:
            told.append((each, agree(facts.get(axis, {}), problem, each, offered, caller)))
        except Exception as error:  # ranks of the groups to come must hear of it
            problem = error
    if problem is not None:
        raise problem
    return told
