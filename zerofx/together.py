"""Lets all ranks end a phase of saving or loading alike: with what all of them told, or with one error on each."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from zerofx.agree import RankMismatchError, agree
from zerofx.manifest import CheckpointError
from zerofx.unfit import in_one_line

SPACE = "; free space, or give another folder"
WRITABLE = "; give a folder that this process may write to"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), SPACE),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST), WRITABLE),
}


def together(
    caller: str,
    group: dist.ProcessGroup | None,
    problem: BaseException | None,
    note: Any = None,
    facts: Mapping[str, Any] | None = None,
) -> list[Any]:
    """All ranks' notes. Raises CheckpointError on every rank if one has a problem, or if ranks differ in the facts.

    It is the same on all: where several ranks have a problem, that of the first one.
    """
    texts = [None if problem is None else sentence(problem)]
    if group is not None and group.size() > 1:
        texts *= group.size()
        dist.all_gather_object(texts, texts[0], group=group)
    for rank, text in enumerate(texts):
        if text is not None:
            where = f" on rank {rank} of the group" if len(texts) > 1 else ""
            raise CheckpointError(f"{caller} failed{where}: {text}") from problem
    try:
        return agree(facts or {}, None, group, note, caller)
    except RankMismatchError as error:
        raise CheckpointError(str(error)) from None


def sentence(problem: BaseException) -> str:
    """What a problem says in one line."""
    if isinstance(problem, CheckpointError):
        return str(problem)
    if isinstance(problem, OSError) and problem.strerror:
        where = f": {problem.filename}" if problem.filename else ""
        return f"{problem.strerror}{where}{REMEDIES.get(problem.errno or 0, '')}"
    return in_one_line(problem)
