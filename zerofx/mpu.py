"""Reads an `mpu`, the bookkeeping object of model-parallel libraries, and checks that all ranks' say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist

from zerofx.config import ConfigError

MODEL, DATA = "model_parallel", "data_parallel"
TENSOR, PIPELINE = "tensor_model_parallel", "pipeline_model_parallel"
WHATS = ("group", "rank", "world_size")


class Kind(NamedTuple):
    """One kind of group of an mpu: the process group, and the function that names it."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    function: str


Said = Mapping[str, tuple[int, ...]]
"""What one rank's mpu says, without process groups: the ranks of its group of each kind, in order."""


def read_mpu(mpu: Any) -> dict[str, Kind]:
    """The groups of this rank: `data_parallel`, `model_parallel`, and the newer ones where there are such functions.

    Raises ConfigError, which names the function, for one that is missing, that raises, or that contradicts another.
    """
    newer = [kind for kind in (TENSOR, PIPELINE) if any(_has(mpu, kind))]
    model = [MODEL] if TENSOR not in newer or all(_has(mpu, MODEL)) else []
    return {kind: _kind(mpu, kind) for kind in (DATA, *model, *newer)}


def said(kinds: Mapping[str, Kind]) -> Said:
    return {kind: found.ranks for kind, found in kinds.items()}


def disagreement(told: Sequence[Said]) -> str | None:
    """What is wrong with what the mpus of all ranks of the default group say, in one sentence; the same on each rank.

    Together, data-parallel and model-parallel groups have to be the rows and columns of one grid of all ranks.
    """
    for kind in dict.fromkeys(kind for each in told for kind in each):
        missing = next((rank for rank, each in enumerate(told) if kind not in each), None)
        if missing is not None:
            return f"{name(kind)}() is there on some ranks and not on rank {missing}: give every rank the same mpu"
        for rank, each in enumerate(told):
            for other in each[kind]:
                if told[other][kind] != each[kind]:
                    return (
                        f"{name(kind)}() is the group of ranks {list(each[kind])} on rank {rank}, and of ranks "
                        f"{list(told[other][kind])} on rank {other}: make each group of the same ranks on all of them"
                    )
    whole = [{MODEL: _model(told, rank)} | dict(each) for rank, each in enumerate(told)]
    return next((problem for rank in range(len(told)) if (problem := _off_the_grid(whole, rank))), None)


def _model(told: Sequence[Said], rank: int) -> tuple[int, ...]:
    """The ranks of a model by the newer kinds, for an mpu that does not say."""
    tensor = told[rank].get(TENSOR, ())
    return tuple(sorted({end for peer in tensor for end in told[peer].get(PIPELINE, (peer,))}))


def _off_the_grid(told: Sequence[Said], rank: int) -> str | None:
    """Why the groups of a rank are not its row and column of a grid, if they are not."""
    mine = told[rank]
    model = mine[MODEL]
    parts = [kind for kind in (TENSOR, PIPELINE) if kind in mine and (TENSOR in mine or len(mine[kind]) > 1)]
    for of, across in ((MODEL, DATA), (DATA, MODEL)):
        for other in mine[of]:
            ours, theirs = mine[across], told[other][across]
            if theirs.index(other) != ours.index(rank) or (other != rank and other in ours):
                return (
                    f"{name(of)}() holds ranks {rank} and {other}, which are number {ours.index(rank)} and "
                    f"{theirs.index(other)} in {name(across)}(), of ranks {list(ours)} and {list(theirs)}: ranks of a "
                    "model-parallel group hold one copy of the model, each in a data-parallel group of its own, and "
                    "have the same place in these"
                )
    size = prod(len(mine[kind]) for kind in parts)
    if (parts and size != len(model)) or any(other not in model for kind in parts for other in mine[kind]):
        told_parts = " and ".join(f"{name(kind)}() of ranks {list(mine[kind])}" for kind in parts)
        return f"on rank {rank}, {told_parts} do not make up {name(MODEL)}() of ranks {list(model)}"
    if len(model) * len(mine[DATA]) != len(told):
        return (
            f"{name(DATA)}() of {len(mine[DATA])} ranks and {name(MODEL)}() of {len(model)} are not all of the "
            f"{len(told)} ranks: zerofx has no further kinds, such as context parallelism"
        )
    return None


def name(kind: str, what: str = "group") -> str:
    return f"mpu.get_{kind}_{what}"


def _has(mpu: Any, kind: str) -> list[bool]:
    """Which of the three functions there are."""
    return [hasattr(mpu, f"get_{kind}_{what}") for what in WHATS]


def _kind(mpu: Any, kind: str) -> Kind:
    group, rank, size = _ask(mpu, kind)
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ConfigError(
            f"{name(kind)}() returned {type(group).__name__} on rank {dist.get_rank()}, and not a ProcessGroup that "
            "this rank is in"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    for what, value, expected in (("rank", rank, dist.get_rank(group)), ("world_size", size, len(ranks))):
        if value != expected:
            raise ConfigError(
                f"{name(kind, what)}() returned {value!r} on rank {dist.get_rank()}, but {name(kind)}() is of ranks "
                f"{list(ranks)}, where it is {expected}"
            )
    return Kind(group, ranks, name(kind))


def _ask(mpu: Any, kind: str) -> Iterator[Any]:
    """What the three functions return."""
    for what in WHATS:
        function: Callable[[], Any] | None = getattr(mpu, f"get_{kind}_{what}", None)
        if not callable(function):
            six = ", ".join(f"get_{each}_{one}" for each in (MODEL, DATA) for one in WHATS)
            raise ConfigError(
                f"the mpu, {_described(mpu)}, has no function get_{kind}_{what}(): give it one; "
                f"zerofx.compile(mpu=...) needs {six}, and all three of each newer kind"
            )
        try:
            yield function()
        except Exception as error:
            raise ConfigError(f"{name(kind, what)}() raised {type(error).__name__}: {error}") from error


def _described(mpu: Any) -> str:
    return f"the module {mpu.__name__}" if hasattr(mpu, "__name__") else f"a {type(mpu).__name__}"
