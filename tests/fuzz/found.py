"""Models and configurations in which the fuzz found a fault, by what it was."""

from __future__ import annotations

from tests.fuzz.drawn import Setting
from tests.fuzz.models import Spec

FOUND: dict[str, tuple[Spec, Setting]] = {}
