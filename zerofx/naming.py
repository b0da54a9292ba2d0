"""The names of collectives and of waits for them, alike in forecasts and in the profiler."""

from __future__ import annotations

import re
from typing import Any, cast

from torch.fx import Node

from zerofx.collectives import SINGLE, WAIT, collective, is_bucket
from zerofx.kernels import is_collective, owner
from zerofx.program import tag

WAITING = "wait for "
NAME = re.compile(rf"({WAITING})?(all_gather_into_tensor|reduce_scatter_tensor|all_reduce)( \S+)*")


def kind_of(node: Node) -> str:
    """The kind of collective that a node issues, alone or for a bucket."""
    target: Any = node.target
    return str(SINGLE.get(target, target)).split(".")[1]


def label(node: Node, kind: str) -> str:
    """The kind, and the parameters of the node's tag."""
    known = tag(node)
    return " ".join([kind, *(known.params if known else ())])


def range_name(node: Node) -> str | None:
    """The name of what a node that issues a collective, or waits for one, takes; None for any other."""
    if node.target is WAIT:
        return WAITING + label(node, kind_of(owner(cast(Node, node.args[0]))))
    if is_bucket(node) or (is_collective(node) and collective(node) is not None):
        return label(node, kind_of(node))
    return None
