"""The timeline of a step that torch.profiler has recorded, in the form and with the names of a forecast."""

from __future__ import annotations

from typing import Any

from zerofx.naming import NAME, WAITING
from zerofx.timeline import COMPUTE, Span, Timeline

BACKWARD = "CompiledFunctionBackward"
ISSUE = "collectives"


def measured(profile: Any) -> Timeline:
    """What a `torch.profiler.profile` has recorded of steps on the interpreter backend, on the CPU's clock.

        with torch.profiler.profile() as profile:
            step(*batch)
        Path("measured.json").write_text(measured(profile).chrome_trace())

    Kernels and waits are on the stream `compute`. Collectives stand on a stream of their own, from when they are issued
    until they are waited for: what goes on behind the scenes the profiler of the CPU does not see. Raises ValueError
    where there is no range of zerofx's, as with Inductor, whose kernels and collectives carry torch's names.
    """
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    named = [event for event in events if NAME.fullmatch(event.name)]
    if not named:
        raise ValueError(
            "the profile has no collectives of zerofx's: run a step inside it, on two or more ranks, of a model "
            "compiled with backend='interpreter'"
        )
    zero = min(event.time_range.start for event in events)
    backwards = [(event.time_range.start, event.time_range.end) for event in events if BACKWARD in event.name]

    def span(event: Any, kind: str, stream: str, end: float | None = None) -> Span:
        start = event.time_range.start
        part = "backward" if any(first <= start < last for first, last in backwards) else "forward"
        stop = event.time_range.end if end is None else end
        name = event.name.removeprefix("aten::")
        return Span(name, kind, stream, part, (start - zero) / 1e6, (stop - zero) / 1e6)

    spans: list[Span] = []
    for place, event in enumerate(named):
        if event.name.startswith(WAITING):
            spans.append(span(event, "wait", COMPUTE))
            continue
        params = set(event.name.split(" ")[1:])
        waits = (later for later in named[place + 1 :] if later.name.startswith(WAITING))
        ends = (wait.time_range.end for wait in waits if params & set(wait.name.split(" ")[3:]))
        spans.append(span(event, "collective", ISSUE, next(ends, None)))
    spans += [span(event, "kernel", COMPUTE) for event in events if _is_kernel(event)]
    return Timeline(tuple(sorted(spans, key=lambda each: each.start)))


def _is_kernel(event: Any) -> bool:
    """Whether an event is an aten op that no other aten op or range of zerofx's has called."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::") or NAME.fullmatch(parent.name):
            return False
        parent = parent.cpu_parent
    return bool(event.name.startswith("aten::"))
