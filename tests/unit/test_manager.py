"""The manager refuses a bad order, names the pass that failed, and records what each one made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from zerofx.manager import PassOrderError, run, validate
from zerofx.passes.choose_layout import ChooseLayout
from zerofx.passes.insert_all_gather import InsertAllGather
from zerofx.passes.insert_reduce_scatter import InsertReduceScatter
from zerofx.passes.merge_reads import MergeReads
from zerofx.passes.release_after_use import ReleaseAfterUse
from zerofx.program import Invariant, Level, Program, outputs
from zerofx.text import parse, show
from zerofx.verify import InvariantError

TEXT = """\
mesh(dp=2)
param('w', f32[4], dim=None)

def joint(w: f32[4] @ param('w'), tangent: f32[4] @ tangent):
    neg: f32[4] = aten.neg.default(w)
    neg_1: f32[4] = aten.neg.default(tangent)
    return [neg @ out, neg_1 @ grad('w')]
"""
LAYOUT = ChooseLayout(persist_below=0)


@dataclass(frozen=True)
class Custom:
    """A logical pass that needs nothing and breaks nothing it knows of."""

    edit: Callable[[Program], None]

    name: ClassVar[str] = "custom"
    level: ClassVar[Level] = Level.LOGICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset()
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "same"

    def __call__(self, program: Program) -> None:
        self.edit(program)


def drop_reduction(program: Program) -> None:
    (marker,) = [node for node in program.graphs["joint"].nodes if node.name == "reduce_grad_default"]
    marker.replace_all_uses_with(marker.args[0])


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([MergeReads()], "pass merge-reads needs MARKED, which no pass before it ensures: insert one that does"),
        ([LAYOUT, ReleaseAfterUse()], "pass release-after-use needs MERGED, which no pass before it ensures"),
        ([InsertAllGather()], "pass insert-all-gather needs MARKED, MERGED, which no pass before it ensures"),
        (
            [LAYOUT, MergeReads(), InsertReduceScatter(), InsertAllGather()],
            "pass insert-all-gather needs MARKED, which no pass before it ensures",
        ),
        (
            [LAYOUT, MergeReads(), InsertAllGather(), ReleaseAfterUse()],
            "pass release-after-use is logical but stands after a physical pass: move it before them",
        ),
    ],
)
def test_a_bad_order_is_refused(passes: list[object], message: str) -> None:
    with pytest.raises(PassOrderError, match=message):
        validate(passes)


def test_a_good_order_is_accepted() -> None:
    validate([LAYOUT, MergeReads(), ReleaseAfterUse(), InsertAllGather(), InsertReduceScatter()])


def test_each_pass_of_the_level_leaves_a_step() -> None:
    program = parse(TEXT)
    steps = run(program, [LAYOUT, InsertAllGather(), MergeReads()])
    assert [step.name for step in steps] == ["choose-layout", "merge-reads"]
    assert steps[-1].text == show(program)
    assert all(step.seconds > 0 for step in steps)
    assert program.holds == {Invariant.MARKED, Invariant.MERGED}


def test_what_a_pass_breaks_no_longer_holds() -> None:
    program = parse(TEXT)
    run(program, [LAYOUT, MergeReads()])
    program.level = Level.PHYSICAL
    run(program, [InsertAllGather()])
    assert program.holds == {Invariant.MERGED, Invariant.GATHERED, Invariant.WAITED}


def test_a_pass_that_breaks_what_holds_is_named() -> None:
    with pytest.raises(InvariantError, match=r"MARKED does not hold .* neg_1 in joint: the gradient of w") as raised:
        run(parse(TEXT), [LAYOUT, Custom(drop_reduction), MergeReads()])
    assert raised.value.__notes__ == ["in pass custom (passes before it at this level: choose-layout)"]


def test_a_graph_that_is_not_well_formed_is_refused() -> None:
    def read_before_defined(program: Program) -> None:
        last = outputs(program.graphs["joint"])[0]
        program.graphs["joint"].find_nodes(op="placeholder")[0].append(last)
        last.args = (outputs(program.graphs["joint"])[1],)

    with pytest.raises(RuntimeError, match="was used before it has been defined") as raised:
        run(parse(TEXT), [Custom(read_before_defined)])
    assert raised.value.__notes__ == ["in pass custom (passes before it at this level: none)"]


def test_an_error_in_a_pass_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run(parse(TEXT), [Custom(lambda program: 1 / 0)])
    assert raised.value.__notes__ == ["in pass custom (passes before it at this level: none)"]
