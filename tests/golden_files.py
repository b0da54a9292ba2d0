"""Reads the golden files: a title and a pass, a program, `# ---`, and what the pass makes of the program."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from zerofx.manager import Pass
from zerofx.program import Program
from zerofx.text import parse

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(GOLDEN.glob("*/*.txt"))


@dataclass(frozen=True)
class Golden:
    """One file; `header` is its first two lines."""

    header: str
    step: Pass
    before: str
    after: str

    @classmethod
    def read(cls, path: Path) -> Golden:
        head, _, after = path.read_text().partition("# ---\n")
        title, named, before = head.split("\n", 2)
        assert title.startswith("# title: ") and named.startswith("# pass: ")
        module = importlib.import_module(f"zerofx.passes.{path.parent.name}")
        step = eval(named.removeprefix("# pass: "), vars(module))
        return cls(f"{title}\n{named}\n", step, before, after)

    def program(self) -> Program:
        """The program that the pass gets, with just the invariants that it requires."""
        program = parse(self.before)
        program.level = self.step.level
        program.holds = set(self.step.requires)
        return program

    def at(self, world: int) -> Golden:
        """The same case over another number of ranks, for a program of whole parameters."""
        return replace(self, before=re.sub(r"mesh\(dp=\d+\)", f"mesh(dp={world})", self.before), after="")
