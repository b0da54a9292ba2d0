"""Says in words what a program does: how often ranks talk, how much they send, what they hold, what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce"}
HALVES = {"forward": "the forward", "backward": "the backward", "inference": "a call"}


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return (
                f"{count:,.0f} B" if unit == "B" else f"{count:,.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
            )
        count /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 1:
        return f"{seconds:,.3g} s"
    return f"{seconds * 1e3:,.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.3g} us"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def sentences(program: Mapping[str, Any]) -> list[str]:
    """Of one program of the report, the most important first."""
    return [*_sent(program), *_held(program), *_timed(program), *_passed(program)]


def _sent(program: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Mapping[str, Any]] = program["collectives"]
    if not rows:
        return ["No collective is issued for parameters or gradients."]
    found: list[str] = []
    for part in dict.fromkeys(row["part"] for row in rows):
        here = [row for row in rows if row["part"] == part]
        kinds = Counter(KINDS.get(row["kind"], row["kind"]) for row in here)
        params = {row["kind"]: 0 for row in here}
        for row in here:
            params[row["kind"]] += len(row["params"])
        each = [
            f"{counted(kinds[KINDS.get(kind, kind)], KINDS.get(kind, kind))} of {counted(params[kind], 'parameter')}"
            for kind in params
        ]
        sent = size(sum(row["bytes"] or 0 for row in here))
        where = HALVES.get(part, f"the program {part!r}")
        found.append(f"{where[0].upper()}{where[1:]} issues {' and '.join(each)}; each rank sends {sent}.")
    return found


def _held(program: Mapping[str, Any]) -> list[str]:
    memory: Sequence[Mapping[str, Any]] = program["memory"]
    if not memory:
        return [program["missing"]] if program["missing"] else []
    top = max(memory, key=lambda each: each["peak"])
    where = HALVES.get(top["graph"], top["graph"])
    what = "Besides parameters, gradients and optimizer states"
    return [f"{what} a rank holds at most {size(top['peak'])}, in {where} at node {top['at']}."]


def _timed(program: Mapping[str, Any]) -> list[str]:
    time = program["time"]
    if not time:
        return []
    told = f"On hardware {program['machine']!r} it is predicted to take {duration(time['step'])}"
    if not time["communication"]:
        return [f"{told}."]
    told += f": computation {duration(time['compute'])}, communication {duration(time['communication'])}"
    share = time["exposed"] / time["step"]
    return [f"{told}, of which {duration(time['exposed'])} is exposed ({share:.1%} of the step)."]


def _passed(program: Mapping[str, Any]) -> list[str]:
    steps: Sequence[Mapping[str, Any]] = program["steps"]
    seconds = sum(step["seconds"] for step in steps)
    made = f"{counted(len(steps) - 1, 'step')} made {counted(steps[-1]['nodes'], 'node')}"
    return [f"{made} of the {steps[0]['nodes']:,} captured; passes and checks took {seconds:.2f} s."]
