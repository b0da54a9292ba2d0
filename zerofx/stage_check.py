"""Checks that stages in turn compute what the whole graph does from which they were cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.fx import Node

from zerofx.pipeline import PipelineError
from zerofx.stage_graphs import Stage
from zerofx.stage_line import Line


class StageError(PipelineError):
    """Stages are not the model that they were cut from."""


def check_stages(line: Line, stages: Sequence[Stage]) -> None:
    """Raises StageError for the first thing that is wrong, which it names, with the stage.

    Values are known by the names of their nodes. Each is computed in one stage, or, where that needs no parameter, in
    all that read it; from the same values as in the whole graph; what a stage reads it computes, receives or is given;
    each stage receives what the one before sends; nothing that was received is written to; and the last one returns
    what the model does.
    """
    for problem in _problems(line, stages):
        raise StageError(f"the stages of the pipeline are not the model: {problem}; please report this")


def _problems(line: Line, stages: Sequence[Stage]) -> Iterator[str]:
    whole = {node.name: node for node in line.nodes}
    owner = dict[str, int]()
    for place, stage in enumerate(stages):
        nodes = list(stage.module.graph.nodes)
        given = [node.name for node in nodes if node.op == "placeholder"]
        received = [each.name for each in stage.receives]
        if len(given) != len(stage.inputs) + len(received) or given[len(stage.inputs) :] != received:
            yield f"stage {place} is given {given} and declares {len(stage.inputs)} inputs and {received}"
        taken = {each for name in received for each in line.facts[whole[name]].storages}
        for node in (each for each in nodes if each.op not in ("placeholder", "output") and each.name in whole):
            yield from _wrong_inputs(place, node, whole[node.name])
            if line.is_own(whole[node.name]) and not line.is_region(whole[node.name]):
                if node.name in owner:
                    yield f"{node.name} is computed in stage {owner[node.name]} and again in stage {place}"
                owner[node.name] = place
            if taken & line.facts[whole[node.name]].written:
                yield f"{node.name} in stage {place} writes to what the stage receives"
    for name, node in whole.items():
        if line.is_own(node) and not line.is_region(node):
            if name not in owner and _is_read(line, node, owner):
                yield f"{name} is computed in no stage"
            for source in (each.name for each in node.all_input_nodes if each.name in owner and name in owner):
                if owner[source] > owner[name]:
                    yield f"{name} in stage {owner[name]} reads {source}, which stage {owner[source]} computes"
    for place, (before, after) in enumerate(pairwise(stages)):
        if before.sends != after.receives or _returned(before) != [each.name for each in before.sends]:
            yield f"stage {place} returns {_returned(before)} and stage {place + 1} receives {after.receives}"
    if _returned(stages[-1]) != [node.name for node in line.whole.outputs]:
        yield f"the last stage returns {_returned(stages[-1])}"


def _wrong_inputs(place: int, node: Node, original: Node) -> Iterator[str]:
    """What a node reads, whose parameters may be read through a node of their own."""
    found = [source.all_input_nodes[0] if source.op == "call_module" else source for source in node.all_input_nodes]
    if node.target != original.target or [n.name for n in found] != [n.name for n in original.all_input_nodes]:
        yield (
            f"{node.name} in stage {place} is {node.target} of {[n.name for n in found]}, and in the model "
            f"{original.target} of {[n.name for n in original.all_input_nodes]}"
        )


def _is_read(line: Line, node: Node, owner: Mapping[str, Any]) -> bool:
    """Whether the model's result, a write or another computation needs a node; Dynamo leaves some that nothing does."""
    return node in line.whole.outputs or bool(line.facts[node].written) or any(n.name in owner for n in node.users)


def _returned(stage: Stage) -> list[str]:
    (end,) = stage.module.graph.find_nodes(op="output")
    return [node.name for node in end.args[0]]
