"""A plan's figures beside those of a recorded run, as rows of the report."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from zerofx.planning.report import Moment, Plan, size

PASSES = ("forward 0", "backward 0")
"""The parts of a planned step that the graphs of a run are: the first micro-batch."""


def told(plan: Plan, run: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of what it is, what the plan says and what `run` says, which `zerofx.reporting.build.build` has made.

    A run records graphs, so its bytes are those of one forward and backward, without parameters, states and what waits
    between micro-batches, and its seconds those that the record's machine is foreseen to take for them.
    """
    first = run["ranks"][0]["rank"]
    programs = [each for each in run["programs"] if each["kind"] == "train" and first in each["ranks"]]
    params = {row[0]: prod(row[2]) for each in programs for row in each["params"]}
    world = prod(count for _, count in plan.ranks)
    sent = sum(each.nbytes for each in plan.fullest.traffic)
    rows = [
        ["ranks", f"{world:,}", f"{run['world']:,}"],
        ["elements of parameters", f"{plan.elements:,}", f"{sum(params.values()):,}"],
        ["held beside parameters and states, at most", size(_beside(plan)), size(_peak(programs))],
        ["sent by a rank", size(sent), size(sum(row["bytes"] or 0 for p in programs for row in p["collectives"]))],
        [f"seconds on {plan.hardware}", f"{plan.seconds:.4g}", _seconds(programs)],
    ]
    return {"rows": rows, "verdict": plan.verdict, "asked": ", ".join(f"{k}={v}" for k, v in plan.asked)}


def _beside(plan: Plan) -> int:
    """Activations, buckets and gradients in the first forward and backward."""

    def beside(moment: Moment) -> int:
        return moment.memory.total - moment.memory.parameters - moment.memory.states

    return max((beside(moment) for moment in plan.fullest.curve if moment.part in PASSES), default=0)


def _peak(programs: list[dict[str, Any]]) -> int:
    return max((memory["peak"] for program in programs for memory in program["memory"]), default=0)


def _seconds(programs: list[dict[str, Any]]) -> str:
    machines = {program["machine"] for program in programs if program["time"]}
    if not machines:
        return "?"
    seconds = sum(program["time"]["step"] for program in programs if program["time"])
    return f"{seconds:.4g} on {', '.join(sorted(machines))}, without the update"
