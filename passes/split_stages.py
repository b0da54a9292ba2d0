"""Cuts a model's forward into the stages of a pipeline, so that they take equally long and little crosses the cuts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

from torch.fx import Node

from zerofx.kernels import nbytes
from zerofx.pipeline import Pipeline, PipelineError
from zerofx.stage_line import Line
from zerofx.whole_graph import modules_of

WINDOWS = 24
"""In each part of an ideal stage's time, one of that many, the place where least crosses may be cut."""
LIMITS = (1.02, 1.1, 1.3, 2.0, inf)
STORED = 4
"""A parameter, its gradient and AdamW's two moments."""


class Choice(NamedTuple):
    """Stages up to a place: the seconds of the slowest, those of all, and the choice before the last cut."""

    slowest: float
    total: float
    place: int
    before: Choice | None


@dataclass(frozen=True)
class SplitStages:
    """Chooses the cuts of a line, minimising (m - 1) * max T + sum T over the stages' seconds T.

    That is the time of a step of m micro-batches by GPipe's and 1F1B's schedules (Huang et al., 2019). T is what the
    stage computes, forward and backward, and what it sends and receives. The search is exact over the places that it
    looks at: those where less crosses than at the places beside them, and some in between. `cap` bounds the bytes of a
    stage: parameters, gradients and optimizer states, and for each of its `in_flight` micro-batches the results of all
    of its nodes and what it receives. With `owned`, a stage may read the parameters and buffers of its own set only.
    """

    stages: int
    microbatches: int = 1
    cap: int | None = None
    in_flight: tuple[int, ...] = ()
    owned: tuple[frozenset[str], ...] | None = None

    def __call__(self, line: Line) -> list[int]:
        """The places of the cuts, one less than stages.

        Raises PipelineError where the line cannot be cut into that many stages, or none fits.
        """
        places = self._candidates(line)
        if len(places) < self.stages - 1:
            raise PipelineError(
                f"the model cannot be cut into {self.stages} stages: its forward can be cut at {len(places)} places "
                f"only, so take at most {len(places) + 1} stages"
            )
        search = _Search(line, self, [line.first - 1, *places, line.last])
        least = (self.microbatches - 1) * search.ideal + line.compute(line.first - 1, line.last)
        best: Choice | None = None
        for limit in LIMITS:
            found = search.run(limit * search.ideal)
            if found is not None:
                best = min(filter(None, (best, found)), key=self._seconds)
                beyond = least + (self.microbatches - 1) * (limit - 1) * search.ideal
                if self._seconds(best) <= beyond:
                    break
        if best is None:
            raise PipelineError(self._why_not(line))
        return _cuts_of(best)

    def _seconds(self, choice: Choice) -> float:
        return (self.microbatches - 1) * choice.slowest + choice.total

    def _why_not(self, line: Line) -> str:
        if self.owned is not None:
            return (
                "the model reads its parameters in another order in this mode than where it was cut into stages, so "
                "that its stages cannot be kept: give zerofx.Pipeline split_at names of modules that end in all modes"
            )
        return (
            f"the model cannot be cut into {self.stages} stages of at most {self.cap} bytes each: take more stages, "
            "fewer or smaller micro-batches, or more memory"
        )

    def _candidates(self, line: Line) -> list[int]:
        """Places that may be cut, in order, of those with as much computed before them the one where least crosses."""
        legal = [place for place in range(line.first, line.last) if line.legal[place]]
        if self.owned is not None:
            return legal
        least: dict[float, int] = {}
        for place in legal:
            done = line.seconds[place + 1]
            if done not in least or line.crossing_bytes[place] <= line.crossing_bytes[least[done]]:
                least[done] = place
        done_before = sorted(done for done in least if 0 < done < line.seconds[-1])
        places = [least[done] for done in done_before]
        return sorted({*_local_minima(line, places), *self._windows(line, places), *self._spread(places)})

    def _windows(self, line: Line, places: list[int]) -> list[int]:
        width = line.seconds[-1] / self.stages / WINDOWS
        best: dict[int, int] = {}
        for place in places:
            window = int(line.seconds[place + 1] / width)
            if window not in best or line.crossing_bytes[place] < line.crossing_bytes[best[window]]:
                best[window] = place
        return list(best.values())

    def _spread(self, places: list[int]) -> list[int]:
        """All places where there are few."""
        return places if len(places) <= 4 * self.stages else []


def _local_minima(line: Line, places: list[int]) -> list[int]:
    crossing = [line.crossing_bytes[place] for place in places]
    padded = [inf, *crossing, inf]
    return [
        p
        for p, (a, b, c) in zip(places, zip(padded, padded[1:], padded[2:], strict=False), strict=True)
        if b < a and b < c
    ]


@dataclass
class _Search:
    """Dynamic programming over stages and places; of choices for one place those that no other one beats remain."""

    line: Line
    split: SplitStages
    places: list[int]
    ideal: float = field(init=False)
    fits: Callable[[int, int, int], bool] = field(init=False)

    def __post_init__(self) -> None:
        total = self.line.compute(self.places[0], self.places[-1])
        self.ideal = max(total / self.split.stages, 1e-15)
        self.fits = _always
        if self.split.owned is not None:
            self.fits = _Owned(self.line, self.split.owned)
        elif self.split.cap is not None:
            self.fits = _Fits(self.line, self.split)

    def run(self, limit: float) -> Choice | None:
        """The best choice in which no stage takes more seconds than `limit`."""
        stages, places = self.split.stages, self.places
        seconds = [self.line.seconds[place + 1] for place in places]
        send = [self.line.send(place) for place in places]
        fronts: dict[int, list[Choice]] = {0: [Choice(0.0, 0.0, places[0], None)]}
        for stage in range(stages):
            reached: dict[int, list[Choice]] = {}
            left = stages - stage - 1
            earliest = 0 if limit == inf else bisect_left(seconds, seconds[-1] - left * limit)
            for start, choices in fronts.items():
                last = len(places) - 1
                for end in range(max(start + 1, earliest), last + 1 if left == 0 else last):
                    compute = seconds[end] - seconds[start]
                    if compute > limit:
                        break
                    takes = compute + send[start] + send[end]
                    if (left == 0 and end != last) or takes > limit:
                        continue
                    if not self.fits(stage, places[start], places[end]):
                        continue
                    for before in choices:
                        made = Choice(max(before.slowest, takes), before.total + takes, places[end], before)
                        reached.setdefault(end, []).append(made)
            fronts = {end: _front(choices) for end, choices in reached.items()}
        final = fronts.get(len(places) - 1)
        return min(final, key=self.split._seconds) if final else None


def _always(stage: int, start: int, end: int) -> bool:
    return True


def _front(choices: list[Choice]) -> list[Choice]:
    """Those of which no other one has both a faster slowest stage and a smaller sum."""
    kept = list[Choice]()
    for choice in sorted(choices, key=lambda each: (each.slowest, each.total)):
        if not kept or choice.total < kept[-1].total:
            kept.append(choice)
    return kept


def _cuts_of(choice: Choice) -> list[int]:
    cuts, before = list[int](), choice.before
    while before is not None and before.before is not None:
        cuts.append(before.place)
        before = before.before
    return cuts[::-1]


class _Owned:
    """Whether a stage reads only what it owns."""

    def __init__(self, line: Line, owned: Sequence[frozenset[str]]) -> None:
        self.foreign = list[list[int]]()
        for names in owned:
            count = [0]
            for node in line.nodes:
                inputs = (
                    [line.whole.inputs[s] for s in node.all_input_nodes if s.op == "placeholder"]
                    if line.is_own(node)
                    else []
                )
                count.append(count[-1] + any(i.kind in ("param", "buffer") and i.name not in names for i in inputs))
            self.foreign.append(count)

    def __call__(self, stage: int, start: int, end: int) -> bool:
        return self.foreign[stage][end + 1] == self.foreign[stage][start + 1]


class _Fits:
    """Whether a stage's bytes are within the cap."""

    def __init__(self, line: Line, split: SplitStages) -> None:
        self.line, self.split = line, split
        self.known: dict[tuple[int, int], int] = {}

    def __call__(self, stage: int, start: int, end: int) -> bool:
        if (start, end) not in self.known:
            self.known[start, end] = sum(map(nbytes_of(self.line), self.line.inputs_of(start, end)))
        stored = self.known[start, end]
        return stage_bytes(self.line, stored, start, end, self.split.in_flight[stage]) <= (self.split.cap or 0)


def nbytes_of(line: Line) -> Callable[[Node], int]:
    """The bytes of an input if it is a parameter."""
    return lambda node: nbytes(line.facts[node].value) if line.whole.inputs[node].kind == "param" else 0


def stage_bytes(line: Line, params: int, start: int, end: int, in_flight: int) -> int:
    """Bytes that a stage holds: parameters of `params` bytes, and the activations of the micro-batches in flight."""
    received = line.crossing_bytes[start] if start >= line.first else 0
    return STORED * params + in_flight * (line.activations[end + 1] - line.activations[start + 1] + received)


def cuts_at(line: Line, names: Sequence[str]) -> list[int]:
    """The places before the first nodes of the modules with these names.

    Raises PipelineError for a name that no node has, one out of order, and where the forward cannot be cut.
    """
    cuts = list[int]()
    for name in names:
        inside = [p for p, n in enumerate(line.nodes) if p >= line.first and line.is_own(n) and name in modules_of(n)]
        if not inside:
            known = dict.fromkeys(module for n in line.nodes if line.is_own(n) for module in modules_of(n) if module)
            raise PipelineError(
                f"zerofx.Pipeline(split_at=[... {name!r}]) names no module that computes something in the forward: "
                f"those that do are {', '.join(list(known)[:12])}"
            )
        before = [p for p in range(line.first, inside[0]) if line.legal[p] and line.compute(p, inside[0] - 1) == 0]
        if not before:
            raise PipelineError(
                f"zerofx.Pipeline(split_at=[... {name!r}]) is not possible: nothing can be cut before that module, "
                "because it is the first one, or what reaches into it is no tensor or is written to in place"
            )
        cuts.append(min(before, key=lambda p: (line.crossing_bytes[p], -p)))
    if any(b <= a for a, b in pairwise(cuts)):
        raise PipelineError(
            f"zerofx.Pipeline(split_at={list(names)!r}) is not possible: name the modules in the order of the forward"
        )
    return cuts


def choose_cuts(line: Line, pipeline: Pipeline, in_flight: Sequence[int], cap: int | None = None) -> list[int]:
    """The places of a pipeline's cuts: those that it names, or those that balance."""
    if pipeline.split_at is not None:
        return cuts_at(line, pipeline.split_at)
    return SplitStages(pipeline.stages, pipeline.microbatches, cap, tuple(in_flight))(line)
