"""How collectives are put into buckets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from torch.fx import Node

BYTES = 25 * 2**20


def nbytes(node: Node) -> int:
    """Bytes of a node's result."""
    value = node.meta["val"]
    return int(value.numel()) * int(value.itemsize)


def grouped(
    nodes: Iterable[Node], key: Callable[[Node], Hashable], size: Callable[[Node], int], limit: int
) -> list[list[Node]]:
    """Buckets of two or more nodes of the same key, in order, each of at most `limit` bytes together.

    A node that is larger goes alone, and the bucket that is open before it stays open.
    """
    open_now: dict[Hashable, tuple[list[Node], int]] = {}
    buckets: list[list[Node]] = []
    for node in nodes:
        if size(node) > limit:
            continue
        bucket, total = open_now.get(key(node), ([], limit + 1))
        if total + size(node) > limit:
            bucket, total = [], 0
            buckets.append(bucket)
        bucket.append(node)
        open_now[key(node)] = bucket, total + size(node)
    return [bucket for bucket in buckets if len(bucket) > 1]
