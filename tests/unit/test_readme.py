"""The README's generated parts are what the code gives now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zerofx.__main__ import pass_table
from zerofx.config import STAGES, Config
from zerofx.manager import run
from zerofx.program import Invariant
from zerofx.recipe import recipe
from zerofx.text import parse, show
from zerofx.unsupported import MISSING

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found
    return found[1]


def test_the_pass_table_is_the_recipe() -> None:
    assert f"<!-- passes -->\n{pass_table()}\n" in README


def test_what_is_missing_is_listed() -> None:
    assert "<!-- missing -->\n" + "".join(f"- {name}: {remedy}\n" for name, remedy in MISSING.items()) in README


@pytest.mark.parametrize("stage", STAGES)
def test_the_pass_table_has_the_order_of_each_stage(stage: int) -> None:
    rows = [row.split(" | ") for row in pass_table().splitlines()[2:]]
    for backend in ("gloo", "nccl"):
        names = [
            name.strip("| `")
            for name, _, stages, where, *_ in rows
            if str(stage) in stages.split(", ") and where in ("all", backend)
        ]
        assert names == [step.name for step in recipe(Config(stage=stage, reduce_dtype="bf16"), backend)]


@pytest.mark.parametrize("invariant", Invariant)
def test_each_invariant_is_listed(invariant: Invariant) -> None:
    assert f"| `{invariant.name}` | {invariant.value} |" in README


def test_the_graph_after_is_what_the_passes_make_of_the_graph_before() -> None:
    program = parse(block("before"))
    program.holds = {Invariant.MARKED, Invariant.MERGED, Invariant.RELEASED}
    run(program, recipe(Config(stage=3), backend="nccl"))
    assert show(program) == block("after")
