"""The kit for tests of passes finds what is wrong, and says where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from zerofx.passes.insert_all_gather import InsertAllGather
from zerofx.passes.insert_reduce_scatter import InsertReduceScatter
from zerofx.program import Invariant, Level, Program
from zerofx.testing import (
    Golden,
    apply,
    assert_collectives,
    assert_same_meaning,
    chain,
    linear,
    tied,
    traced,
)
from zerofx.testing.programs import LINEAR

TEXT = LINEAR.format(ranks=2, rows=5, columns=3, dtype="f32")
FILE = """\
# title: A product.
# pass: Scale({factor})
mesh(dp=2)

def inference(x: f32[3]):
    y: f32[3] = aten.mul.Tensor(x, 2.0)
    return [y @ out]
"""


@dataclass(frozen=True)
class Scale:
    """Scales the factor of every product."""

    name: ClassVar[str] = "scale"
    level: ClassVar[Level] = Level.PHYSICAL
    requires: ClassVar[frozenset[Invariant]] = frozenset()
    ensures: ClassVar[frozenset[Invariant]] = frozenset()
    breaks: ClassVar[frozenset[Invariant]] = frozenset()
    numerics: ClassVar[str] = "changes"

    by: float

    def __call__(self, program: Program) -> None:
        for graph in program.graphs.values():
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
                node.args = (node.args[0], node.args[1] * self.by)


@pytest.mark.parametrize("make", [linear, chain, tied])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_small_programs_mean_the_same_whole_and_cut(make: object, ranks: int) -> None:
    assert_same_meaning(lambda n: make(n, whole=True), make, ranks=ranks, exact=make is tied)


def test_a_lost_mean_is_found() -> None:
    def broken(ranks: int) -> Program:
        program = apply(linear(ranks), InsertAllGather(), InsertReduceScatter())
        (scatter,) = program.graphs["joint"].find_nodes(
            op="call_function", target=torch.ops._c10d_functional.reduce_scatter_tensor.default
        )
        scatter.args = (scatter.args[0], "sum", *scatter.args[2:])
        return program

    with pytest.raises(AssertionError, match="output 1 of rank 0"):
        assert_same_meaning(linear, broken)
    with pytest.raises(AssertionError, match="output 1 of rank 0"):
        assert_same_meaning(linear, broken, atol=1e-3)


def test_texts_of_whole_parameters_are_compared_over_any_number_of_ranks() -> None:
    assert_same_meaning(TEXT, TEXT, ranks=3)
    with pytest.raises(AssertionError, match="output 2"):
        assert_same_meaning(TEXT, TEXT.replace("mm.default(tangent, w)", "mm.default(y, w)"), ranks=3)
    with pytest.raises(ValueError, match="one of 2 ranks, whose parameters are cut, and not of 3"):
        assert_same_meaning(linear(2), linear(2), ranks=3)


def test_collectives_are_compared_by_graph_and_in_bytes() -> None:
    program = apply(linear(2), InsertAllGather(), InsertReduceScatter())
    assert_collectives(program, joint=["all-gather w: f32 196", "reduce-scatter w: f32 196"], sent=392)
    with pytest.raises(AssertionError, match="joint"):
        assert_collectives(program, joint=["reduce-scatter w: f32 196", "all-gather w: f32 196"])
    with pytest.raises(AssertionError, match="392 bytes, not 393"):
        assert_collectives(program, sent=393)
    with pytest.raises(ValueError, match="the graphs joint, and not 'forward'"):
        assert_collectives(program, forward=[])


def test_a_traced_model_runs_the_recipe_or_other_passes() -> None:
    x = torch.empty(4, 7, device="meta")

    def make(**options: object) -> object:
        return lambda ranks: traced(lambda: nn.Linear(7, 5), [x], ranks, **options)

    assert_same_meaning(make(bucket_mb=1e-6), make(), ranks=3)
    assert_same_meaning(make(stage=1), make(stage=3), ranks=2)


def test_a_pass_that_lacks_what_it_requires_is_refused() -> None:
    with pytest.raises(ValueError, match=r"insert-all-gather requires MARKED.*apply what ensures it"):
        apply(linear(whole=True), InsertAllGather())


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "case.txt").write_text("mesh(dp=2)\n")
    with pytest.raises(ValueError, match=r"case.txt must begin with the lines '# title: ...'"):
        Golden.read(tmp_path / "case.txt", {})


def test_golden_files_are_written_compared_and_found_to_differ(pytester: pytest.Pytester) -> None:
    (pytester.path / "case.txt").write_text(FILE.format(factor=3.0))
    pytester.makepyfile(
        """
        from pathlib import Path
        from tests.unit import test_testing
        def test_it(golden):
            golden(Path("case.txt"), test_testing)
        """
    )
    plugin = ("-p", "zerofx.testing", "-p", "no:cacheprovider", "--import-mode=importlib")
    pytester.runpytest_inprocess(*plugin).assert_outcomes(failed=1)
    pytester.runpytest_inprocess(*plugin, "--update-goldens").assert_outcomes(passed=1)
    written = (pytester.path / "case.txt").read_text()
    assert written.startswith(FILE.format(factor=3.0)) and "aten.mul.Tensor(x, 6.0)" in written.partition("# ---")[2]
    pytester.runpytest_inprocess(*plugin).assert_outcomes(passed=1)
    (pytester.path / "case.txt").write_text(written.replace("Scale(3.0)", "Scale(4.0)"))
    pytester.runpytest_inprocess(*plugin).assert_outcomes(failed=1)
