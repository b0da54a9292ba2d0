"""Each tests/golden/<pass file>/<case>.txt: one pass turns the program above `# ---` into the one below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.goldens import CASES
from zerofx.testing import Golden, golden_id


@pytest.mark.parametrize("path", CASES, ids=golden_id)
def test_the_pass_makes_the_program_that_the_file_holds(path: Path, golden: Callable[..., Golden]) -> None:
    golden(path)
