"""Runs passes in order, refuses a bad order, and checks after each pass what must hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from zerofx.program import Invariant, Level, Program
from zerofx.text import show
from zerofx.verify import check

IN_PASS = "in pass"


class Pass(Protocol):
    """A frozen dataclass that edits a program; see `passes/`."""

    name: ClassVar[str]
    level: ClassVar[Level]
    requires: ClassVar[frozenset[Invariant]]
    ensures: ClassVar[frozenset[Invariant]]
    breaks: ClassVar[frozenset[Invariant]]
    numerics: ClassVar[str]

    def __call__(self, program: Program) -> None: ...


@dataclass(frozen=True)
class Step:
    """The program after one pass, as text, and the seconds of CPU time that the pass and its checks took."""

    name: str
    text: str
    seconds: float


class PassOrderError(ValueError):
    """The passes cannot run in the given order."""


def validate(passes: Iterable[Pass]) -> None:
    """Raises PassOrderError where a pass needs what no pass before it ensures, or comes after a later level."""
    holds: frozenset[Invariant] = frozenset()
    level = Level.LOGICAL
    for step in passes:
        if step.level is Level.LOGICAL and level is Level.PHYSICAL:
            raise PassOrderError(f"pass {step.name} is logical but stands after a physical pass: move it before them")
        level = step.level
        if missing := step.requires - holds:
            names = ", ".join(sorted(invariant.name for invariant in missing))
            raise PassOrderError(
                f"pass {step.name} needs {names}, which no pass before it ensures: insert one that does"
            )
        holds = (holds - step.breaks) | step.ensures


def run(program: Program, passes: Sequence[Pass], watch: Callable[[str, Program], None] | None = None) -> list[Step]:
    """Applies the passes of the program's level in order and returns one step for each.

    `watch` is called with the name of each pass that is about to run, and with the program. Raises what a pass or a
    check raises, of the same type, with a note that says where.
    """
    steps: list[Step] = []
    for step in passes:
        if step.level is not program.level:
            continue
        if watch is not None:
            watch(step.name, program)
        start = time.process_time()
        try:
            step(program)
            program.holds = (program.holds - step.breaks) | step.ensures
            check(program)
        except Exception as error:
            before = ", ".join(s.name for s in steps) or "none"
            error.add_note(f"{IN_PASS} {step.name} (passes before it at this level: {before})")
            raise
        steps.append(Step(step.name, show(program), time.process_time() - start))
    return steps


def is_of_pass(error: BaseException) -> bool:
    """Whether a pass or the check after one raised it."""
    return any(note.startswith(IN_PASS) for note in getattr(error, "__notes__", ()))
