"""A record of a compiled model: what one rank was asked for, and what the passes made of each of its graphs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from zerofx.manager import Step
from zerofx.origins import Origins, origins_of
from zerofx.planning.hardware import machine_of
from zerofx.records import read_json, write_json
from zerofx.reporting.lines import Lines, text_of
from zerofx.reporting.measures import Measures, measures_from, measures_of_text, measures_told

FORMAT = 1
HEAD = "rank.json.gz"


class RecordError(ValueError):
    """A folder holds no record, or one that cannot be read."""


@dataclass
class Head:
    """What a rank was asked for. `facts` are what ranks compare, `place` is the rank's on each axis of the mesh.

    `problem` is what zerofx.compile raised, if it did.
    """

    rank: int = 0
    world: int = 1
    model: str = ""
    written: float = field(default_factory=time.time)
    place: dict[str, int] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    params: list[dict[str, Any]] = field(default_factory=list)
    pipeline: dict[str, Any] | None = None
    problem: str = ""


@dataclass(frozen=True)
class GraphRecord:
    """One captured graph: its steps, where nodes come from, and the numbers of the program behind the last pass.

    `name` tells it apart from others of its kind. `blocks` has, for each block that shares the graph, its parameters'
    names by those in the graph.
    """

    index: int
    kind: str
    steps: tuple[Step, ...]
    origins: Origins = field(default_factory=dict)
    blocks: tuple[Mapping[str, str], ...] = ({},)
    measures: Measures = field(default_factory=Measures)
    name: str = ""


@dataclass(frozen=True)
class RankRecord:
    """All that one rank has recorded."""

    head: Head
    graphs: tuple[GraphRecord, ...] = ()


def graph_record(index: int, capture: Any, device: str) -> GraphRecord:
    """The record of a `Capture` whose passes have run, for a run on devices of that type."""
    measures = measures_of_text(capture.steps[-1].text, machine_of(device))
    blocks = tuple(map(dict, capture.blocks))
    return GraphRecord(index, capture.kind, tuple(capture.steps), capture.origins, blocks, measures, capture.name)


T = TypeVar("T", bound=Any)


def model_first(graphs: Iterable[T]) -> list[T]:
    """Graphs of the model before the programs that gather and reduce beside them."""
    return sorted(graphs, key=lambda each: each.kind not in ("train", "inference"))


def write_head(folder: Path, head: Head) -> None:
    write_json(rank_folder(folder, head.rank) / HEAD, {"format": FORMAT, **asdict(head)})


def write_graph(folder: Path, rank: int, graph: GraphRecord) -> None:
    """One file for each graph; of its texts, each line once."""
    lines = Lines()
    steps = [{"name": s.name, "seconds": s.seconds, "runs": lines.runs(s.text.splitlines())} for s in graph.steps]
    told = {"index": graph.index, "kind": graph.kind, "name": graph.name, "blocks": list(graph.blocks)}
    told |= {"lines": lines.all, "steps": steps, "origins": graph.origins, "measures": measures_told(graph.measures)}
    write_json(rank_folder(folder, rank) / f"graph-{graph.index:03}.json.gz", told)


def write_rank(folder: Path, record: RankRecord) -> Path:
    """Writes all of it, in place of what an earlier run has recorded of the rank; returns the folder."""
    clear(folder, record.head.rank)
    write_head(folder, record.head)
    for graph in record.graphs:
        write_graph(folder, record.head.rank, graph)
    return folder


def clear(folder: Path, rank: int) -> None:
    """Removes what an earlier run has recorded of the rank."""
    for file in rank_folder(folder, rank).glob("*.json.gz"):
        file.unlink()


def clear_beyond(folder: Path, world: int) -> None:
    """Removes what an earlier run of more ranks has recorded."""
    for ranks in folder.glob("rank-*"):
        number = ranks.name.removeprefix("rank-")
        if number.isdigit() and int(number) >= world:
            clear(folder, int(number))


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}"


def read_ranks(folder: Path) -> list[RankRecord]:
    """The records of all ranks of a run. Raises RecordError."""
    heads = sorted(folder.glob(f"rank-*/{HEAD}"))
    if not heads:
        raise RecordError(
            f"{folder} holds no record of zerofx: give the folder that was given as zerofx.compile(model, record=...)"
        )
    ranks = [_read_rank(head) for head in heads]
    world = max(ranks, key=lambda each: each.head.written).head.world
    return [each for each in ranks if each.head.rank < world]


def _read_rank(path: Path) -> RankRecord:
    file = path
    try:
        told = read_json(path)
        written = told.pop("format")
        head, graphs = Head(**told) if written == FORMAT else Head(), []
        for file in sorted(path.parent.glob("graph-*.json.gz")) if written == FORMAT else ():
            graphs.append(_graph_from(read_json(file)))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{file} cannot be read ({type(error).__name__}: {error}): record the run again") from error
    if written != FORMAT:
        raise RecordError(f"{path} was written by another version of zerofx: record the run again")
    return RankRecord(head, tuple(replace(each, index=place) for place, each in enumerate(model_first(graphs))))


def _graph_from(told: Mapping[str, Any]) -> GraphRecord:
    lines: Sequence[str] = told["lines"]
    steps = tuple(Step(step["name"], text_of(lines, step["runs"]), step["seconds"]) for step in told["steps"])
    origins, measures = origins_of(told["origins"]), measures_from(told["measures"])
    return GraphRecord(told["index"], told["kind"], steps, origins, tuple(told["blocks"]), measures, told["name"])
