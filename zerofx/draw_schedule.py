"""Draws in text what each rank of a pipeline computes when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerofx.schedules import Action


class Placed(NamedTuple):
    """An action, and from when to when it runs."""

    action: Action
    start: float
    end: float


def gantt(placed: Sequence[Sequence[Placed]]) -> str:
    """One line for each rank; `0F2` is the forward of stage 0 on micro-batch 2, and a dot is a unit of waiting.

    B is a backward, I and W are its halves for inputs and for weights. A unit is the time of a stage's forward.
    """
    width = max((len(str(each.action)) for rank in placed for each in rank), default=0) + 1
    lines = list[str]()
    for rank, each in enumerate(placed):
        line, at = "", 0.0
        for action, start, end in each:
            line += ".".ljust(width) * round(start - at)
            line += str(action).ljust(width) + "-".ljust(width, "-") * (round(end - start) - 1)
            at = end
        lines.append(f"rank {rank} | {line.rstrip()}")
    return "\n".join(lines)
