"""Each tests/golden/<pass file>/<case>.txt: one pass turns the program above `# ---` into the one below it.

`pytest --bless` writes the files anew: the upper program as `show` would, the lower one as the pass makes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_files import CASES, Golden
from zerofx.manager import run
from zerofx.text import parse, show
from zerofx.verify import check


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_pass_makes_the_program_that_the_file_holds(path: Path, request: pytest.FixtureRequest) -> None:
    golden = Golden.read(path)
    program = golden.program()
    check(program)
    shown = show(program)
    (step,) = run(program, [golden.step])
    if request.config.getoption("--bless"):
        path.write_text(f"{golden.header}{shown}# ---\n{step.text}")
    else:
        assert (shown, step.text) == (golden.before, golden.after)
    assert show(parse(step.text)) == step.text
