"""The golden files of zerofx's own passes: tests/golden/<pass file>/<case>.txt."""

from __future__ import annotations

from pathlib import Path

from zerofx.testing import golden_files

GOLDEN = Path(__file__).parent / "golden"
CASES = golden_files(GOLDEN)
