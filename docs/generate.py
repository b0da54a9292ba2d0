"""Writes the generated parts of the pages: a line `<!-- generate: NAME -->` becomes what the function NAME returns."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from zerofx.__main__ import BACKENDS, pass_table
from zerofx.config import STAGES, Config
from zerofx.deepspeed_keys import IGNORED, READ, REFUSED
from zerofx.manager import Pass
from zerofx.program import Invariant
from zerofx.recipe import recipe
from zerofx.unsupported import ARGUMENTS, MISSING, WRAPPERS, without

MARK = re.compile(r"<!-- generate: (\w+) -->")
GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
EXAMPLES = {
    "choose_layout": "one_weight",
    "merge_reads": "two_reads",
    "sink_casts": "matmul_under_autocast",
    "keep_gathered": "sharded_and_replicated",
    "release_after_use": "sharded_and_replicated",
    "cast_gradients": "f32_and_replicated",
    "insert_all_gather": "uneven_rows",
    "insert_reduce_scatter": "uneven_rows",
    "bucket_all_gathers": "two_weights",
    "bucket_reductions": "two_weights",
    "prefetch_all_gathers": "one_ahead",
    "delay_waits": "two_weights",
    "fuse_optimizer": "saved_replica",
    "use_point_to_point": "two_weights",
}
"""The golden file that stands for each pass."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda found: globals()[found[1]](), markdown)


def passes() -> str:
    return pass_table()


def invariants() -> str:
    return table(("invariant", "what holds"), [(f"`{each.name}`", each.value) for each in Invariant])


def pass_reference() -> str:
    return "\n\n".join(map(_section, all_passes()))


def all_passes() -> list[Pass]:
    """Each default pass once, in order."""
    found: dict[str, Pass] = {}
    for backend in BACKENDS:
        for stage in STAGES:
            for step in recipe(Config(stage=stage, reduce_dtype="bf16"), backend):
                found.setdefault(step.name, step)
    order = [line.split("`")[1] for line in pass_table().splitlines()[2:]]
    return [found[name] for name in order]


def _section(step: Pass) -> str:
    module = importlib.import_module(type(step).__module__)
    name = module.__name__.rpartition(".")[2]
    title, _, golden = (GOLDEN / name / f"{EXAMPLES[name]}.txt").read_text().partition("\n")
    told, _, programs = golden.partition("\n")
    before, _, after = programs.partition("# ---\n")
    facts = [
        ("level", step.level.value),
        ("requires", _names(step.requires)),
        ("ensures", _names(step.ensures)),
        ("breaks", _names(step.breaks)),
        ("results", "the same bits" if step.numerics == "same" else "rounded otherwise"),
        ("defined in", f"`passes/{name}.py`, as `{type(step).__name__}`"),
    ]
    return "\n\n".join(
        [
            f"## {step.name}",
            (inspect.getdoc(module) or "").strip(),
            inspect.getdoc(type(step)) or "",
            table(("", ""), facts),
            f"{title.removeprefix('# title: ')} With `{told.removeprefix('# pass: ')}`:",
            f"```python\n{before}```",
            "becomes",
            f"```python\n{after}```",
        ]
    )


def _names(kinds: frozenset[Invariant]) -> str:
    return ", ".join(f"`{kind.name}`" for kind in sorted(kinds, key=lambda kind: kind.name)) or "-"


def missing() -> str:
    return "".join(f"- {name}: {remedy}\n" for name, remedy in MISSING.items())


def arguments() -> str:
    rows = [(f"`{name}`", without(told) if told in MISSING else told) for name, told in ARGUMENTS.items()]
    return table(("argument", "what it is, and what to do"), rows)


def wrappers() -> str:
    return table(("wrapped in", "instead"), [(f"`{name}`", told) for name, told in WRAPPERS.items()])


def deepspeed_read() -> str:
    return table(("key", "what it becomes"), [(f"`{key}`", told) for key, told in READ.items()])


def deepspeed_ignored() -> str:
    return table(("key", "why it has no effect"), [(f"`{key}`", told) for key, told in IGNORED.items()])


def deepspeed_refused() -> str:
    return table(("key", "instead"), [(f"`{key}`", told.remedy) for key, told in REFUSED.items()])


def table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)
