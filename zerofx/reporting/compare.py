"""Finds in what the ranks of a run differ that should be alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from zerofx.manager import Step
from zerofx.reporting.canonical import Row, canonical
from zerofx.reporting.recording import GraphRecord, RankRecord
from zerofx.textgraph import read

STALE_SECONDS = 600.0
ENDED = Row("", "(the program has ended)")


@dataclass(frozen=True)
class Difference:
    """`what` differs: `groups` has the ranks that agree with each other, and what they have."""

    what: str
    groups: tuple[tuple[tuple[int, ...], str], ...]


def differences(ranks: Sequence[RankRecord]) -> list[Difference]:
    """Of all ranks what they were asked for, and of those that hold the same stage and slice also their programs."""
    found = [*_problems(ranks), *_missing(ranks), *_settings(ranks)]
    alike: dict[Hashable, list[RankRecord]] = defaultdict(list)
    for rank in ranks:
        alike[_part(rank)].append(rank)
    for group in alike.values():
        found += _mapped("", [(each.head.rank, each.head.facts) for each in group])
        found += _graphs(group)
    return found


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0 and 2` or `ranks 0-7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _part(rank: RankRecord) -> Hashable:
    return tuple(sorted((axis, at) for axis, at in rank.head.place.items() if axis != "dp"))


def _problems(ranks: Sequence[RankRecord]) -> Iterator[Difference]:
    for rank in ranks:
        if rank.head.problem:
            yield Difference("zerofx.compile ended with an error", (((rank.head.rank,), rank.head.problem),))


def _missing(ranks: Sequence[RankRecord]) -> Iterator[Difference]:
    newest = max(rank.head.written for rank in ranks)
    known = {rank.head.rank for rank in ranks}
    if missing := tuple(sorted(set(range(ranks[0].head.world)) - known)):
        yield Difference("the record is not whole", ((missing, "wrote nothing here"),))
    if old := tuple(each.head.rank for each in ranks if newest - each.head.written > STALE_SECONDS):
        yield Difference("the record is not of one run", ((old, "wrote long before the others"),))


def _settings(ranks: Sequence[RankRecord]) -> Iterator[Difference]:
    yield from _mapped("the argument or version ", [(rank.head.rank, rank.head.config) for rank in ranks])


def _mapped(prefix: str, told: Sequence[tuple[int, Mapping[str, str]]]) -> Iterator[Difference]:
    """The keys under which ranks have other values, or none."""
    told = [(rank, values) for rank, values in told if values]
    for key in dict.fromkeys(key for _, values in told for key in values):
        yield from _grouped(prefix + key, [(rank, values.get(key, "nothing")) for rank, values in told])


def _graphs(ranks: Sequence[RankRecord]) -> Iterator[Difference]:
    yield from _grouped("the number of captured graphs", [(rank.head.rank, str(len(rank.graphs))) for rank in ranks])
    for place in range(max(len(rank.graphs) for rank in ranks)):
        having = [(rank.head.rank, rank.graphs[place]) for rank in ranks if place < len(rank.graphs)]
        if len(having) > 1:
            yield from _programs(place, having)


def _programs(place: int, having: Sequence[tuple[int, GraphRecord]]) -> Iterator[Difference]:
    """The first step at which the programs of a graph differ, by the first row that does."""
    for steps in zip_longest(*(graph.steps for _, graph in having)):
        names = [(rank, step.name if step else "no step") for (rank, _), step in zip(having, steps, strict=True)]
        if found := list(_grouped(f"the next pass over graph {place}", names)):
            yield from found
            return
        if len({step.text for step in steps}) == 1:
            continue
        for rows in zip_longest(*(canonical(step.text) for step in steps), fillvalue=ENDED):
            groups: dict[str, list[int]] = defaultdict(list)
            for (rank, _), row in zip(having, rows, strict=True):
                groups[row.compared].append(rank)
            if len(groups) > 1:
                written = {row.compared: row.written for row in reversed(rows)}
                yield Difference(
                    _where(place, steps[0], rows[0].written, having),
                    tuple((tuple(members), written[each]) for each, members in groups.items()),
                )
                return


def _where(place: int, step: Step, written: str, having: Sequence[tuple[int, GraphRecord]]) -> str:
    """The line of the first rank's text, and whether collectives are the same, so that ranks do not wait for others."""
    line = next((n for n, each in enumerate(step.text.splitlines(), 1) if written.rstrip(",") in each), 0)
    same = len({_sent(graph.steps[-1]) for _, graph in having}) == 1
    told = (
        " (all issue the same collectives, so that no rank waits for another)"
        if same
        else " (collectives differ, so that ranks would hang or exchange wrong values)"
    )
    return f"graph {place} after {step.name}, first in line {line}{told}"


def _sent(step: Step) -> tuple[Hashable, ...]:
    """The collectives that a program issues."""
    return tuple(
        (graph.name, line.target, line.type, line.role, line.params, line.args[-1])
        for graph in read(step.text).graphs
        for line in graph.sent
    )


def _grouped(what: str, values: Sequence[tuple[int, str]]) -> Iterator[Difference]:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in values:
        groups[value].append(rank)
    if len(groups) > 1:
        yield Difference(what, tuple((tuple(members), value) for value, members in groups.items()))


def told(found: Sequence[Difference]) -> list[dict[str, Any]]:
    """As JSON."""
    return [
        {"what": each.what, "groups": [{"ranks": named(ranks), "value": value} for ranks, value in each.groups]}
        for each in found
    ]
