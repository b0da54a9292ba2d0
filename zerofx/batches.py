"""Splits a batch into micro-batches along dim 0."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class MicroBatch(NamedTuple):
    """The arguments of one call of `loss_fn` behind the model, and the share of the batch's rows that they hold."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: float


def micro_batches(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    count: int,
    weighted: bool,
    fewer: bool = False,
    rest: bool = False,
) -> list[MicroBatch]:
    """What a step is called with, in `count` micro-batches; with `rest`, fewer of an iterator's where no more are left.

    Of trees of tensors each gets rows of dim 0, the first ones a row more where they do not divide; all else, and
    tensors without a dim, go to each. `weighted`: a `loss_weight` says what micro-batches weigh, and not their rows.
    `fewer`: there are no more than rows.
    """
    if len(args) == 1 and isinstance(args[0], Iterator) and not kwargs:
        return _drawn(args[0], count, weighted, rest)
    if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
        return micro_batches((), args[0], count, weighted, fewer)
    batch = (args, dict(kwargs))
    rows = _rows(batch)
    if count == 1 and set(rows.values()) != {0}:
        return [MicroBatch(*batch, 1.0)]
    size = _one(rows, "make them equal, use tensors without a dim, or close over them in loss_fn")
    if size is None:
        raise ValueError(f"the batch holds no tensor that could be split into {count} micro-batches: pass tensors")
    if fewer and size:
        count = min(count, size)
    if size < count:
        raise ValueError(
            f"a batch of {size} rows cannot be split into {count} micro-batches: pass a larger batch on this rank, or "
            "fewer microbatches to zerofx.train_step or zerofx.Pipeline"
        )
    sizes = [size // count + (place < size % count) for place in range(count)]
    parts = zip(_split(args, sizes), _split(batch[1], sizes), sizes, strict=True)
    return [MicroBatch(arguments, named, part / size) for arguments, named, part in parts]


def _drawn(batches: Iterator[Any], count: int, weighted: bool, rest: bool) -> list[MicroBatch]:
    found = [_arguments(each) for each in itertools.islice(batches, count)]
    if not found:
        raise ValueError("the iterator has no micro-batch left: make a new one, or end the loop before it")
    if len(found) < count and not rest:
        raise ValueError(
            f"the iterator had {len(found)} micro-batches left, and the step takes {count}: give it a multiple of "
            f"{count}, or join what is left to one batch, which a step splits"
        )
    known = [None] * len(found) if weighted else [_one(_rows(each), "pass loss_weight, which says") for each in found]
    sizes = [1 if rows is None else rows for rows in known]
    if 0 in sizes:
        raise ValueError(f"micro-batch {sizes.index(0)} of the iterator has no rows: leave it out")
    return [MicroBatch(*each, size / sum(sizes)) for each, size in zip(found, sizes, strict=True)]


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _rows(batch: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, int]:
    """The rows of each tensor that has a dim, by where it is."""
    args, kwargs = batch
    named = [(f"argument {place}", value) for place, value in enumerate(args)] + list(kwargs.items())
    return {where: len(leaf) for name, value in named for where, leaf in _leaves(name, value)}


def _one(rows: Mapping[str, int], remedy: str) -> int | None:
    """The number of rows that all tensors have; None without any tensor."""
    if len(set(rows.values())) > 1:
        told = ", ".join(f"{where} has {size}" for where, size in list(rows.items())[:4])
        raise ValueError(f"the tensors of a batch have different numbers of rows in dim 0, {told}: {remedy}")
    return next(iter(rows.values()), None)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and value.dim():
        yield name, value
    for key, part in _children(value):
        yield from _leaves(f"{name}[{key!r}]", part)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if type(value) in (list, tuple) or _is_named(value):
        return list(enumerate(value))
    return [(name, getattr(value, name)) for name in _fields(value)]


def _split(value: Any, sizes: list[int]) -> list[Any]:
    if isinstance(value, Tensor) and value.dim():
        return list(torch.split(value, sizes))
    columns = {key: _split(part, sizes) for key, part in _children(value)}
    return [_again(value, {key: column[place] for key, column in columns.items()}) for place in range(len(sizes))]


def _again(value: Any, parts: dict[Any, Any]) -> Any:
    """The value with its children replaced."""
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        made.update(parts)
        return made
    if isinstance(value, Mapping):
        return parts
    if _is_named(value):
        return type(value)(*parts.values())
    if type(value) in (list, tuple):
        return type(value)(parts.values())
    return dataclasses.replace(value, **parts) if parts else value


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _fields(value: Any) -> list[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    return [field.name for field in dataclasses.fields(value) if field.init]
