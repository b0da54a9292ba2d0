"""Golden files: a title and a pass, a program, `# ---`, and what the pass makes of the program."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from zerofx.manager import Pass, run
from zerofx.program import Program
from zerofx.text import parse, show
from zerofx.verify import check

OPTION = "--update-goldens"
Names = ModuleType | Mapping[str, object]


@dataclass(frozen=True)
class Golden:
    """One file; `header` is its first two lines, `# title: ...` and `# pass: ...`."""

    header: str
    step: Pass
    before: str
    after: str

    @classmethod
    def read(cls, path: Path, names: Names | None = None) -> Golden:
        """The `# pass:` line is evaluated with `names`, by default those of the zerofx pass that names the folder.

        Raises ValueError for a file of another form.
        """
        head, _, after = path.read_text().partition("# ---\n")
        found = re.fullmatch(r"(# title: [^\n]+\n# pass: ([^\n]+)\n)(.+)", head, re.DOTALL)
        if found is None:
            raise ValueError(f"{path} must begin with the lines '# title: ...' and '# pass: ...', and then a program")
        if names is None:
            names = importlib.import_module(f"zerofx.passes.{path.parent.name}")
        step = eval(found[2], dict(vars(names) if isinstance(names, ModuleType) else names))
        return cls(found[1], step, found[3], after)

    def program(self) -> Program:
        """The program that the pass gets, with just the invariants that it requires."""
        program = parse(self.before)
        program.level = self.step.level
        program.holds = set(self.step.requires)
        return program

    def result(self) -> Program:
        """What the pass makes of it."""
        program = self.program()
        run(program, [self.step])
        return program

    def at(self, world: int) -> Golden:
        """The same case over another number of ranks, for a program of whole parameters."""
        return replace(self, before=re.sub(r"mesh\(dp=\d+\)", f"mesh(dp={world})", self.before), after="")


def golden_files(folder: Path) -> list[Path]:
    """The golden files in a folder and those below it, in order."""
    return sorted(folder.glob("**/*.txt"))


def golden_id(path: Path) -> str:
    """A test's name for a golden file: its folder and its own name."""
    return f"{path.parent.name}-{path.stem}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="write the golden files from what the passes print now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., Golden]:
    """`golden(path, names)` runs the pass of a golden file on its program and compares the text of what it makes.

    `names` is the module in which the file's `# pass:` line is evaluated. The program is checked to keep the invariants
    that the pass requires before it, and those that the pass ensures behind it. With `--update-goldens` the file is
    written anew: the upper program as `show` writes it, the lower one as the pass makes it.
    """

    def compare(path: Path, names: Names | None = None) -> Golden:
        case = Golden.read(path, names)
        program = case.program()
        check(program)
        shown = show(program)
        (step,) = run(program, [case.step])
        assert show(parse(step.text)) == step.text, "the program that the pass makes does not read back as it is"
        if request.config.getoption(OPTION):
            path.write_text(f"{case.header}{shown}# ---\n{step.text}")
            return Golden.read(path, names)
        assert (shown, step.text) == (case.before, case.after), f"{path} differs: look at it, then run with {OPTION}"
        return case

    return compare
