"""Figures from papers: README.md says which."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


def read(name: str) -> Any:
    return json.loads((HERE / name).read_text())
