"""Makes of the records of all ranks the data that the HTML report shows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from math import prod
from typing import Any

from zerofx.layout import rows_at
from zerofx.reporting import compare
from zerofx.reporting.canonical import canonical
from zerofx.reporting.lines import runs_of
from zerofx.reporting.measures import Memory
from zerofx.reporting.recording import GraphRecord, RankRecord
from zerofx.reporting.rows import Rows, StepRows, bytes_of, row_told
from zerofx.reporting.words import sentences
from zerofx.textgraph import BYTES, SHARES, Line
from zerofx.timeline import Timeline


def build(ranks: Sequence[RankRecord]) -> dict[str, Any]:
    """Equal programs of several ranks are told once."""
    first = ranks[0].head
    differences = compare.differences(ranks)
    return {
        "model": first.model,
        "world": first.world,
        "made": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.written)),
        "config": first.config,
        "ranks": [{"rank": each.head.rank, "place": each.head.place, "graphs": len(each.graphs)} for each in ranks],
        "recorded": compare.named([each.head.rank for each in ranks]),
        "differences": compare.told(differences),
        "pipeline": next((each.head.pipeline for each in ranks if each.head.pipeline), None),
        "programs": [_program(having, graph, first.world) for having, graph in _distinct(ranks)],
    }


def _distinct(ranks: Sequence[RankRecord]) -> list[tuple[list[RankRecord], GraphRecord]]:
    """The programs that are not the same, each with the ranks that have it."""
    found: dict[bytes, tuple[list[RankRecord], GraphRecord]] = {}
    known: dict[tuple[str, ...], bytes] = {}
    for rank in ranks:
        for graph in rank.graphs:
            texts = (str(graph.index), graph.kind, graph.name, *(step.text for step in graph.steps))
            if texts not in known:
                known[texts] = _digest(graph)
            found.setdefault(known[texts], ([], graph))[0].append(rank)
    return sorted(found.values(), key=lambda each: (each[0][0].head.place.get("pp", 0), each[1].index))


def _digest(graph: GraphRecord) -> bytes:
    """The same for programs that ranks share."""
    digest = hashlib.sha256(f"{graph.index} {graph.kind} {graph.name}".encode())
    for step in graph.steps:
        digest.update(f"\0{step.name}".encode())
        for row in canonical(step.text):
            digest.update(f"\0{row.compared}".encode())
    return digest.digest()


def _program(having: Sequence[RankRecord], graph: GraphRecord, world: int) -> dict[str, Any]:
    rows = Rows(graph.steps, graph.origins)
    modules = _numbered(origin.module for origin in rows.found.values())
    sources = _numbered(origin.source for origin in rows.found.values())
    last, measures = rows.steps[-1], graph.measures
    told: dict[str, Any] = {
        "label": _label(having, graph, world),
        "kind": graph.kind,
        "texts": rows.texts.all,
        "nodes": {number: row_told(line, rows.found[number], modules, sources) for number, line in rows.lines.items()},
        "modules": list(modules),
        "sources": list(sources),
        "steps": [_step(step) for step in rows.steps],
        "collectives": _collectives(rows, last),
        "params": _params(rows, last, having[0]),
        "memory": [_memory(each, rows, last) for each in measures.memory],
        "machine": measures.machine,
        "spans": [list(vars(span).values()) for span in measures.spans],
        "time": _time(Timeline(measures.spans)),
        "missing": measures.missing,
        "ranks": [each.head.rank for each in having],
    }
    return told | {"words": sentences(told)}


def _label(having: Sequence[RankRecord], graph: GraphRecord, world: int) -> str:
    ranks = [each.head.rank for each in having]
    who = "all ranks" if len(ranks) == world > 1 else compare.named(ranks)
    beside = "" if graph.kind in ("train", "inference") else " beside the model's graphs"
    return f"{graph.name or f'graph {graph.index}'} · {graph.kind}{beside} · {who}"


def _numbered(values: Any) -> dict[str, int]:
    return {value: place for place, value in enumerate(dict.fromkeys(["", *values]))}


def _step(step: StepRows) -> dict[str, Any]:
    graphs = [
        {
            "name": graph.name,
            "inputs": runs_of(graph.inputs),
            "ops": runs_of(graph.ops),
            "outputs": runs_of(graph.outputs),
        }
        for graph in step.graphs
    ]
    told = {"name": step.step.name, "seconds": step.step.seconds, "nodes": step.nodes}
    return told | {"rows": runs_of(step.rows), "graphs": graphs}


def _collectives(rows: Rows, step: StepRows) -> list[dict[str, Any]]:
    """What is issued for parameters and gradients, with the row of the node, and of the first wait for it."""
    found: list[dict[str, Any]] = []
    for graph in step.graphs:
        for place, number in enumerate(graph.ops):
            line = rows.lines[number]
            if line.role and line.collective in SHARES:
                group = line.args[-1].strip("'")
                waited = _waited(rows, graph.ops[place + 1 :], line)
                told = {"part": graph.name, "row": number, "name": line.name, "kind": line.collective}
                told |= {"role": line.role, "params": line.params, "dtype": line.dtype, "group": group}
                found.append(told | {"bytes": _sent(line, rows.axes.get(group, 1)), "ahead": waited})
    return found


def _sent(line: Line, world: int) -> int | None:
    whole = bytes_of(line)
    return None if whole is None else int(whole * SHARES[line.collective](world) * (world - 1))


def _waited(rows: Rows, behind: Sequence[int], line: Line) -> int | None:
    """How many nodes are issued before the first wait for a collective."""
    results = {line.name}
    for distance, number in enumerate(behind):
        later = rows.lines[number]
        if results.isdisjoint(later.reads):
            continue
        if later.target == "c10d.wait_tensor.default":
            return distance
        if later.target == "operator.getitem":
            results.add(later.name)
    return None


def _params(rows: Rows, step: StepRows, rank: RankRecord) -> list[list[Any]]:
    """Name, dtype, size, dim, whole bytes, those of this rank, and how often each is gathered and reduced."""
    trained = {each["name"]: each for each in rank.head.params}
    uses: dict[str, list[int]] = {name: [0, 0] for name in rows.params}
    for graph in step.graphs:
        for number in graph.ops:
            line = rows.lines[number]
            if line.collective and line.role in ("unshard", "reduce_grad"):
                for name in line.params:
                    uses.setdefault(name, [0, 0])[line.role == "reduce_grad"] += 1
    world, place = rows.axes.get("dp", 1), rank.head.place.get("dp", 0)
    found = []
    for name, param in rows.params.items():
        whole = prod(param.size) * BYTES.get(param.dtype, 1)
        own = whole
        if param.dim is not None and param.size[param.dim]:
            own = whole // param.size[param.dim] * rows_at(param.size[param.dim], world, place)
        tied = trained.get(name, {}).get("tied", [])
        found.append([name, param.dtype, list(param.size), param.dim, whole, own, *uses[name], tied])
    return found


def _memory(memory: Memory, rows: Rows, step: StepRows) -> dict[str, Any]:
    graph = next((each for each in step.graphs if each.name == memory.graph), None)
    names = [rows.lines[number].name for number in (*graph.inputs, *graph.ops)] if graph else []
    curve = memory.curve()
    peak = max(curve, default=0)
    at = curve.index(peak) if curve else 0
    told = {"graph": memory.graph, "held": memory.held, "length": memory.length, "extra": memory.extra}
    told |= {"storages": memory.storages, "peak": peak, "place": at}
    return told | {"at": names[at] if at < len(names) else "output"}


def _time(line: Timeline) -> dict[str, float] | None:
    if not line.spans:
        return None
    told = {"step": line.step, "compute": line.compute}
    return told | {"communication": line.communication, "exposed": line.exposed}
