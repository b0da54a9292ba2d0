"""What a step of training holds at most, and what it would hold if parameters stayed gathered for the backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from torch.fx import Graph

from zerofx.liveness import Life, deferred_life, halves
from zerofx.program import Program, tag


@dataclass(frozen=True)
class Need:
    """The bytes that one rank holds over a forward and its backward.

    `levels` are the most bytes in each stretch of the step, from one place to the next at which a gathered parameter is
    released for the backward or gathered again there. `waits` has, for each such parameter, its bytes and the
    stretches, from the first up to and without the second, that it would be held through if it stayed gathered.
    `deferred` are the most bytes if the backward reduced no gradients and returned them whole.
    """

    levels: tuple[int, ...]
    waits: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    deferred: int = 0

    @property
    def peak(self) -> int:
        return max(self.levels)

    def written(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Need:
        waits = {name: (size, first, last) for name, (size, first, last) in told["waits"].items()}
        return cls(tuple(told["levels"]), waits, told["deferred"])


def need_of(program: Program, steady: int) -> Need:
    """What the forward and the backward of a program hold beside `steady` bytes that are held all the time."""
    graphs = program.graphs["forward"], program.graphs["backward"]
    forward, backward = halves(*graphs)
    curve = [steady + now for life in (forward, backward) for now in life.curve()]
    released, again = _gathered(graphs[0], forward), _gathered(graphs[1], backward)
    both = {
        name: (released[name][0], released[name][2] + 1, forward.length + again[name][1])
        for name in released.keys() & again.keys()
    }
    cuts = sorted({0, len(curve), *(place for _, *ends in both.values() for place in ends)})
    levels = tuple(max(curve[first:last]) for first, last in pairwise(cuts))
    waits = {name: (size, cuts.index(first), cuts.index(last)) for name, (size, first, last) in sorted(both.items())}
    deferred = steady + max(*forward.curve(), *deferred_life(graphs[1], backward).curve())
    return Need(levels, waits, deferred)


def _gathered(graph: Graph, life: Life) -> dict[str, tuple[int, int, int]]:
    """For each parameter that is gathered in the graph: the bytes that are read, and their first and last place."""
    found: dict[str, tuple[int, int, int]] = {}
    for node in graph.nodes:
        known = tag(node)
        if node.op != "call_function" or known is None or known.role != "unshard" or len(known.params) != 1:
            continue
        for storage in life.owners[node.name]:
            if storage in life.spans:
                found[known.params[0]] = life.sizes[storage], *life.spans[storage]
    return found


def largest_first(needs: Sequence[Need], names: Iterable[str], allowed: int) -> tuple[str, ...]:
    """The parameters that can stay gathered on all ranks within the bytes allowed: those that save most bytes first.

    Of equal ones, those that are last in `names` come first: the backward needs them soonest.
    """
    place = {name: i for i, name in enumerate(names)}
    common = set.intersection(*(set(need.waits) for need in needs))
    order = sorted(common & place.keys(), key=lambda name: (-max(need.waits[name][0] for need in needs), -place[name]))
    levels = [list(need.levels) for need in needs]
    kept = list[str]()
    for name in order:
        waits = [need.waits[name] for need in needs]
        if all(
            max(now[first:last], default=0) + size <= allowed
            for now, (size, first, last) in zip(levels, waits, strict=True)
        ):
            kept.append(name)
            for now, (size, first, last) in zip(levels, waits, strict=True):
                now[first:last] = [level + size for level in now[first:last]]
    return tuple(sorted(kept))
