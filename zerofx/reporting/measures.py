"""What a program holds, and when it runs on a model of a machine: numbers that a record keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerofx.liveness import Life, forward_life, halves
from zerofx.planning.hardware import CPU, Hardware
from zerofx.program import Program
from zerofx.read import TextError
from zerofx.text import parse
from zerofx.timeline import Span, timeline


@dataclass(frozen=True)
class Memory:
    """One graph. `storages` are (node, place among its results, bytes, first and last place); places count the graph's
    inputs, ops and its output. The caller holds `held` bytes throughout; `extra` has, by place, what
    a node takes besides.
    """

    graph: str
    held: int
    length: int
    storages: tuple[tuple[str, int, int, int, int], ...]
    extra: dict[str, int]

    def curve(self) -> list[int]:
        """The bytes while each node runs."""
        change = [0] * (self.length + 1)
        for _, _, size, first, last in self.storages:
            change[first] += size
            change[last + 1] -= size
        now, found = self.held, list[int]()
        for place in range(self.length):
            now += change[place]
            found.append(now + self.extra.get(str(place), 0))
        return found


@dataclass(frozen=True)
class Measures:
    """`spans` are those of the timeline on `machine`; `missing` says why there are no numbers."""

    memory: tuple[Memory, ...] = ()
    machine: str = ""
    spans: tuple[Span, ...] = ()
    missing: str = ""


def measures_of(program: Program, machine: Hardware = CPU) -> Measures:
    """The numbers of a program behind its last pass; passes of others may make what has none."""
    try:
        return Measures(_memory(program), machine.name, timeline(program, machine).spans)
    except Exception as error:  # training must not end because a report lacks a number
        return Measures(missing=f"This program cannot be measured: {type(error).__name__}: {error}")


def measures_of_text(text: str, machine: Hardware = CPU) -> Measures:
    """Those of a program of which only the text is left."""
    try:
        return measures_of(parse(text), machine)
    except TextError as error:
        return Measures(missing=f"This program cannot be measured from its text: {error}")


def measures_told(measures: Measures) -> dict[str, Any]:
    """As JSON."""
    spans = [list(vars(span).values()) for span in measures.spans]
    memory = [vars(each) for each in measures.memory]
    return {"memory": memory, "machine": measures.machine, "spans": spans, "missing": measures.missing}


def measures_from(told: Mapping[str, Any]) -> Measures:
    """Those that were written as JSON."""
    memory = tuple(
        Memory(**{**each, "storages": tuple(tuple(storage) for storage in each["storages"])}) for each in told["memory"]
    )
    return Measures(memory, told["machine"], tuple(Span(*span) for span in told["spans"]), told["missing"])


def _memory(program: Program) -> tuple[Memory, ...]:
    graphs = program.graphs
    if graphs.keys() == {"forward", "backward"}:
        lives = dict(zip(("forward", "backward"), halves(graphs["forward"], graphs["backward"]), strict=True))
    else:
        lives = {name: forward_life(graph) for name, graph in graphs.items()}
    return tuple(_told(name, life) for name, life in lives.items())


def _told(name: str, life: Life) -> Memory:
    storages = tuple((*storage, life.sizes[storage], first, last) for storage, (first, last) in life.spans.items())
    return Memory(name, life.held, life.length, storages, {str(place): size for place, size in life.workspace.items()})
