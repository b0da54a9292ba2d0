"""What is moved lowers the forecast by the bytes that were held beside the peak, and nothing else is moved."""

from __future__ import annotations

import pytest

from tests.goldens import GOLDEN
from tests.unit.test_verify import edited, refused
from zerofx.liveness import forward_life
from zerofx.manager import run
from zerofx.need import need_of
from zerofx.program import Invariant, Program
from zerofx.testing import Golden
from zerofx.text import show
from zerofx.verify import check

LOWERED = Golden.read(GOLDEN / "lower_peak" / "behind_the_loss.txt").after


def peak(program: Program) -> int:
    """Of the forward and the backward, or of the only graph."""
    if len(program.graphs) == 1:
        return max(forward_life(*program.graphs.values()).curve())
    return need_of(program, 0).peak


@pytest.mark.parametrize(
    ("case", "saved"),
    [
        ("behind_the_loss", 64 * 4 * 4),  # the gathered head
        ("read_first", (64 * 32 + 2 * 64) * 4),  # the gathered head, and the tangent
        ("waited_for_earlier", 64 * 32 * 4),  # the gradient
        ("bucket", 2 * 8 * 8 * 4),
        ("beside_a_product", 0),
        ("no_lower_either_way", 0),
        ("random_numbers", 0),
    ],
)
def test_the_peak_falls_by_what_was_held_beside_it(case: str, saved: int) -> None:
    golden = Golden.read(GOLDEN / "lower_peak" / f"{case}.txt")
    program = golden.program()
    before = peak(program)
    run(program, [golden.step])
    assert before - peak(program) == saved
    assert (show(program) == golden.before) is (saved == 0)


@pytest.mark.parametrize(
    ("invariant", "edit", "said"),
    [
        (Invariant.WAITED, ("aten.mm.default(mul, wait)", "aten.mm.default(mul, gather)"), "x_grad reads it before"),
        (Invariant.REDUCED, ("[mean @ grad('head')", "[grad @ grad('head')"), "passes 0 reductions"),
    ],
)
def test_a_move_too_far_is_refused(invariant: Invariant, edit: tuple[str, str], said: str) -> None:
    check(edited(LOWERED, [], {invariant}))
    assert said in refused(invariant, LOWERED, edit)
