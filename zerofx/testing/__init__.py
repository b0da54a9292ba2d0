"""What tests of graph passes need: golden files, small programs, and comparisons over all ranks in one process.

Put `pytest_plugins = ["zerofx.testing"]` into a `conftest.py` for the fixture `golden` and the option
`--update-goldens`. Nothing here needs a process group.
"""

from zerofx.testing.cases import Golden, golden, golden_files, golden_id, pytest_addoption
from zerofx.testing.meaning import assert_same_bits, assert_same_meaning
from zerofx.testing.programs import apply, chain, linear, tied, traced
from zerofx.testing.sent import assert_collectives, collectives

__all__ = [
    "Golden",
    "apply",
    "assert_collectives",
    "assert_same_bits",
    "assert_same_meaning",
    "chain",
    "collectives",
    "golden",
    "golden_files",
    "golden_id",
    "linear",
    "pytest_addoption",
    "tied",
    "traced",
]
