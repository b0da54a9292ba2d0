"""Buckets keep the order, the keys and the limit, and join what they can."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch.fx import Graph, Node

from zerofx.buckets import grouped, nbytes

LIMIT = 10
Sized = list[tuple[str, int]]


def buckets(sized: Sized, limit: int = LIMIT) -> list[list[int]]:
    """The buckets of nodes with these keys and sizes, as places in the list."""
    graph = Graph()
    nodes = [graph.placeholder(f"n{place}") for place in range(len(sized))]
    known = dict(zip(nodes, sized, strict=True))
    found = grouped(nodes, lambda node: known[node][0], lambda node: known[node][1], limit)
    return [[nodes.index(node) for node in bucket] for bucket in found]


def numbers(seed: int) -> Sized:
    """A few to many nodes of up to three keys, some of no bytes and some larger than the limit."""
    chance = random.Random(seed)
    return [(chance.choice("abc"), chance.randint(0, LIMIT + 3)) for _ in range(chance.randint(0, 40))]


SEEDS = pytest.mark.parametrize("seed", range(50))


@SEEDS
def test_a_bucket_has_two_or_more_of_one_key_within_the_limit(seed: int) -> None:
    sized = numbers(seed)
    for bucket in buckets(sized):
        assert len(bucket) > 1
        assert len({sized[place][0] for place in bucket}) == 1
        assert sum(sized[place][1] for place in bucket) <= LIMIT


@SEEDS
def test_order_is_kept_and_no_node_is_in_two_buckets(seed: int) -> None:
    sized = numbers(seed)
    for key in "abc":
        places = [place for bucket in buckets(sized) for place in bucket if sized[place][0] == key]
        assert places == sorted(set(places))
    assert [bucket[0] for bucket in buckets(sized)] == sorted(bucket[0] for bucket in buckets(sized))


@SEEDS
def test_two_buckets_of_a_key_that_follow_one_another_did_not_fit_into_one(seed: int) -> None:
    sized = numbers(seed)
    for key in "abc":
        mine = [bucket for bucket in buckets(sized) if sized[bucket[0]][0] == key]
        for bucket, later in pairwise(mine):
            following = next(
                p for p in range(bucket[-1] + 1, len(sized)) if sized[p][0] == key and sized[p][1] <= LIMIT
            )
            assert following <= later[0]
            assert sum(sized[place][1] for place in (*bucket, following)) > LIMIT


@SEEDS
def test_collectives_are_fewer_than_twice_what_the_bytes_need(seed: int) -> None:
    sized = [(key, size) for key, size in numbers(seed) if 0 < size <= LIMIT]
    for key in "abc":
        sizes = [size for mine, size in sized if mine == key]
        joined = [bucket for bucket in buckets(sized) if sized[bucket[0]][0] == key]
        count = len(sizes) - sum(len(bucket) - 1 for bucket in joined)
        assert count <= max(2 * -(-sum(sizes) // LIMIT), 1)


@pytest.mark.parametrize(
    ("sized", "expected"),
    [
        ([], []),
        ([("a", 4)], []),
        ([("a", 5), ("a", 5)], [[0, 1]]),
        ([("a", 5), ("a", 6)], []),
        ([("a", 5), ("a", 5), ("a", 1)], [[0, 1]]),
        ([("a", 9), ("a", 5), ("a", 5)], [[1, 2]]),
        ([("a", 4), ("b", 4), ("a", 4), ("b", 4)], [[0, 2], [1, 3]]),
        ([("a", 4), ("a", 11), ("a", 4)], [[0, 2]]),
        ([("a", 10), ("a", 0), ("a", 0)], [[0, 1, 2]]),
        ([("a", 11), ("a", 11)], []),
    ],
)
def test_the_buckets_of(sized: Sized, expected: list[list[int]]) -> None:
    assert buckets(sized) == expected


def test_nothing_but_empty_tensors_shares_a_bucket_of_no_bytes() -> None:
    assert buckets([("a", 0), ("a", 1), ("a", 0)], limit=0) == [[0, 2]]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"), [((3, 5), torch.float32, 60), ((), torch.float64, 8), ((0, 4), torch.bfloat16, 0)]
)
def test_bytes_are_elements_times_the_size_of_each(shape: tuple[int, ...], dtype: torch.dtype, expected: int) -> None:
    node: Node = Graph().placeholder("x")
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    assert nbytes(node) == expected
