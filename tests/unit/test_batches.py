"""Batches are split along dim 0, whatever tree their tensors are in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from zerofx.batches import MicroBatch, micro_batches


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Sample:
    ids: torch.Tensor
    name: str = "all"


def split(*args: Any, count: int = 2, weighted: bool = False, rest: bool = False, **named: Any) -> list[MicroBatch]:
    return micro_batches(args, named, count, weighted, rest=rest)


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * 2).view(count, 2)


@pytest.mark.parametrize(
    ("size", "count", "sizes"), [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (5, 3, [2, 2, 1]), (3, 1, [3])]
)
def test_rows_are_split_in_order_the_first_parts_having_one_more(size: int, count: int, sizes: list[int]) -> None:
    parts = split(rows(size), count=count)
    assert [len(part.args[0]) for part in parts] == sizes
    assert torch.equal(torch.cat([part.args[0] for part in parts]), rows(size))
    assert [part.share for part in parts] == [each / size for each in sizes]


def test_every_tree_is_split_and_what_is_no_batch_goes_to_each() -> None:
    ids, scalar = rows(4), torch.tensor(0.5)
    tree = {"pair": Pair(ids, [ids, None]), "sample": Sample(ids), "flag": True, "scalar": scalar}
    for place, part in enumerate(split((ids, "text"), tree=OrderedDict(tree))):
        mine, ((own, text),), named = ids[2 * place : 2 * place + 2], part.args, part.kwargs["tree"]
        assert type(named) is OrderedDict and named["flag"] is True and named["scalar"] is scalar
        assert type(named["pair"]) is Pair and type(named["sample"]) is Sample and named["pair"].right[1] is None
        assert text == "text" and named["sample"].name == "all"
        for found in (own, named["pair"].left, named["pair"].right[0], named["sample"].ids):
            assert torch.equal(found, mine)


def test_a_mapping_alone_is_named_arguments() -> None:
    parts = split({"x": rows(2), "y": rows(2)})
    assert [part.args for part in parts] == [(), ()]
    assert [sorted(part.kwargs) for part in parts] == [["x", "y"]] * 2
    assert torch.equal(parts[1].kwargs["y"], rows(2)[1:])


def drawn() -> Iterator[Any]:
    yield rows(3), rows(3)
    yield {"x": rows(1)}
    yield rows(4)


def test_an_iterator_gives_micro_batches_weighed_by_their_rows() -> None:
    iterator = drawn()
    first, second = split(iterator)
    assert [len(each) for each in first.args] == [3, 3] and len(second.kwargs["x"]) == 1
    assert (first.share, second.share) == (0.75, 0.25)
    (last,) = split(iterator, rest=True)
    assert len(last.args[0]) == 4 and last.share == 1.0
    with pytest.raises(ValueError, match="no micro-batch left: make a new one"):
        split(iterator)


def test_one_micro_batch_is_the_batch_itself() -> None:
    mask = rows(1)
    (part,) = split(rows(4), mask=mask, count=1)
    assert part.kwargs["mask"] is mask and part.share == 1.0


def test_a_mask_for_all_rows_in_a_drawn_micro_batch_needs_a_weight() -> None:
    with pytest.raises(ValueError, match="argument 0 has 4, argument 1 has 1: pass loss_weight"):
        split(iter([(rows(4), rows(1))] * 2))
    assert len(split(iter([(rows(4), rows(1))]), weighted=True, rest=True)) == 1


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((rows(4), {"mask": rows(3)}), r"argument 0 has 4, argument 1\['mask'\] has 3: make them equal"),
        ((rows(1),), "a batch of 1 rows cannot be split into 2 micro-batches"),
        ((rows(0),), "a batch of 0 rows cannot be split"),
        (("text", torch.tensor(1)), "holds no tensor that could be split"),
        ((iter([rows(2)]),), "the iterator had 1 micro-batches left, and the step takes 2: give it a multiple of 2"),
        ((iter([rows(2), rows(0)]),), "micro-batch 1 of the iterator has no rows"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(*batch)


def test_an_empty_batch_is_refused_in_one_part_too() -> None:
    with pytest.raises(ValueError, match="a batch of 0 rows"):
        split(rows(0), count=1)
