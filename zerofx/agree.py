"""Compares what must be equal on every rank, so that a difference is one sentence on all of them and not a hang."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

TELL_SECONDS = 30.0


class RankMismatchError(RuntimeError):
    """Ranks called a function of zerofx with different models or arguments, or one of them could not go on."""


def agree(
    facts: Mapping[str, Any],
    problem: Exception | None,
    group: dist.ProcessGroup | None,
    note: Any = None,
    caller: str = "zerofx.compile",
    remedy: str = "give every rank the same model and the same arguments",
) -> list[Any]:
    """Raises on every rank if one rank has a problem, or if the facts differ between ranks; returns all ranks' notes.

    The rank with the problem raises that; the others name it. What was heard of another group is said as it is.
    """
    if group is None or group.size() == 1:
        if problem is not None:
            raise problem
        return [note]
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, (dict(facts), problem and _told(problem, group, caller), note), group=group)
    if problem is not None:
        raise problem
    for rank, (theirs, trouble, _) in enumerate(told):
        if trouble:
            raise RankMismatchError(trouble)
        first = told[0][0]
        for name in dict.fromkeys([*first, *theirs]):
            if first.get(name) != theirs.get(name):
                raise RankMismatchError(
                    f"ranks differ in {name}: rank 0 of the group has {first.get(name)!r}, rank {rank} has "
                    f"{theirs.get(name)!r}; {remedy}"
                )
    return [theirs for _, _, theirs in told]


def _told(problem: Exception, group: dist.ProcessGroup, caller: str) -> str:
    """What the other ranks of the group say of a rank's problem."""
    if isinstance(problem, RankMismatchError):
        return str(problem)
    return f"{caller} failed on rank {group.rank()} of the group: {problem}"


HEARD = "_zerofx_heard"


def agree_in_world(facts: Mapping[str, Any], problem: Exception | None, note: Any, caller: str) -> list[Any]:
    """`agree` over all ranks of the default group, so that what it raises need not be told again."""
    try:
        return agree(facts, problem, dist.group.WORLD, note, caller)
    except Exception as error:
        error.__dict__[HEARD] = True
        raise


def refuse_without_mesh(problem: Exception) -> NoReturn:
    """Raises the problem of a rank that has no usable mesh, after it has told the others through the default group.

    They may share a mesh of fewer ranks and not listen there: it waits up to TELL_SECONDS for an answer. Without one
    the default group is left with a collective that nobody else has entered.
    """
    if dist.is_initialized() and not problem.__dict__.get(HEARD):
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        teller = threading.Thread(target=_tell, args=(problem, device), name="zerofx refusal", daemon=True)
        teller.start()
        teller.join(TELL_SECONDS)
    raise problem


def _tell(problem: Exception, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    with contextlib.suppress(Exception):
        agree({}, problem, dist.group.WORLD)
