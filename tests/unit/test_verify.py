"""The verifier refuses programs that break an invariant, and says which node, what was found and what mends it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests import broken_buckets, broken_updates, broken_waits
from tests.broken import (
    ALLOWED,
    GATHER_AGAIN,
    GATHERED,
    KEEP,
    KEEP_COPY,
    KEPT,
    LOGICAL,
    MARKED,
    MERGED,
    PHYSICAL,
    REDUCED,
    RELEASED,
    WAITED,
    Edit,
)
from tests.goldens import GOLDEN
from zerofx.manager import run
from zerofx.passes.cast_gradients import CastGradients
from zerofx.passes.insert_reduce_scatter import InsertReduceScatter
from zerofx.passes.use_point_to_point import UsePointToPoint
from zerofx.program import Invariant, Program
from zerofx.testing import Golden
from zerofx.text import parse, show
from zerofx.verify import InvariantError, check


def edited(text: str, edits: Iterable[Edit], holds: Iterable[Invariant]) -> Program:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    program = parse(text)
    program.holds = set(holds)
    return program


def refused(invariant: Invariant, text: str, *edits: Edit) -> str:
    """What the verifier says of the edited text, without the sentence that is the invariant's own."""
    with pytest.raises(InvariantError) as raised:
        check(edited(text, edits, {invariant}))
    said, near = str(raised.value).split("\n", 1)
    start = f"{invariant.name} does not hold ({invariant.value}): "
    assert said.startswith(start)
    said = said.removeprefix(start)
    assert said.split()[0] in near
    return said


BROKEN = [
    pytest.param(invariant, text, edits, said, id=f"{invariant.name}-{name.replace(' ', '_')}")
    for invariant, text, cases in (
        (Invariant.MARKED, LOGICAL, MARKED),
        (Invariant.MERGED, LOGICAL, MERGED),
        (Invariant.GATHERED, PHYSICAL, GATHERED),
        (Invariant.REDUCED, PHYSICAL, REDUCED),
        (Invariant.WAITED, PHYSICAL, WAITED),
        (Invariant.GATHERED, broken_buckets.BUCKETS, broken_buckets.GATHERED),
        (Invariant.REDUCED, broken_buckets.BUCKETS, broken_buckets.REDUCED),
        (Invariant.WAITED, broken_buckets.BUCKETS, broken_buckets.WAITED),
        (Invariant.MARKED, broken_waits.WAITS, broken_waits.MARKED),
        (Invariant.REDUCED, broken_waits.LEFT, broken_waits.REDUCED),
        (Invariant.MARKED, broken_waits.REDUCE, broken_waits.SUMS),
        (Invariant.UPDATED, broken_updates.UPDATES, broken_updates.UPDATED),
        (Invariant.REDUCED, broken_updates.UPDATES, broken_updates.REDUCED),
    )
    for name, (edits, said) in cases.items()
]
BROKEN += [
    pytest.param(Invariant.KEPT, text, edits, said, id=f"KEPT-{name.replace(' ', '_')}")
    for name, (text, edits, said) in KEPT.items()
]


@pytest.mark.parametrize(("invariant", "text", "edits", "said"), BROKEN)
def test_what_breaks_an_invariant_is_named(invariant: Invariant, text: str, edits: list[Edit], said: str) -> None:
    assert refused(invariant, text, *edits) == said


@pytest.mark.parametrize("name", RELEASED)
def test_a_gathered_parameter_is_not_saved_in_any_form(name: str) -> None:
    saved = ("w @ saved", f"{name} @ saved")
    assert refused(Invariant.RELEASED, PHYSICAL, *RELEASED[name], saved) == f"{name} in forward: {GATHER_AGAIN}"


@pytest.mark.parametrize("name", broken_buckets.RELEASED)
def test_what_a_bucket_gathers_is_not_saved_in_any_form(name: str) -> None:
    said = refused(Invariant.RELEASED, broken_buckets.BUCKETS, ("x @ saved", f"{name} @ saved"))
    assert said == f"{name} in forward: {broken_buckets.GATHER_AGAIN}"


def test_gradients_that_wait_and_parameters_that_are_kept_are_not_refused() -> None:
    check(edited(broken_waits.WAITS, [], {Invariant.MARKED, Invariant.MERGED}))
    check(edited(broken_waits.REDUCE, [], {Invariant.MARKED, Invariant.MERGED}))
    check(edited(broken_waits.LEFT, [], set(Invariant) - {Invariant.MARKED}))


def test_gradients_that_are_handed_over_are_not_refused() -> None:
    check(edited(broken_updates.UPDATES, [], set(Invariant) - {Invariant.MARKED, Invariant.KEPT}))


def test_a_gathered_parameter_is_not_left_to_the_partition() -> None:
    said = refused(Invariant.RELEASED, LOGICAL, (", recompute=True", ""))
    assert said == "read in joint: it may be saved; tag it MUST_RECOMPUTE"


KEPT_ONE = Golden.read(GOLDEN / "release_after_use" / "one_of_two_is_kept.txt").after


@pytest.mark.parametrize(
    ("kept", "edit", "said"),
    [
        ("v", (", keep=True", ""), "unshard_1 in joint: it may be computed again; tag it MUST_SAVE"),
        ("w", (", keep=True", ""), "unshard in joint: it may be computed again; tag it MUST_SAVE"),
        ("v", (", recompute=True", ", keep=True"), "unshard in joint: it may be saved; tag it MUST_RECOMPUTE"),
    ],
)
def test_only_what_is_chosen_to_be_kept_may_be_saved(kept: str, edit: Edit, said: str) -> None:
    program = edited(KEPT_ONE, [], {Invariant.RELEASED})
    program.kept = frozenset({"v"})
    check(program)
    program = edited(KEPT_ONE, [edit], {Invariant.RELEASED})
    program.kept = frozenset({kept})
    with pytest.raises(InvariantError) as raised:
        check(program)
    assert said in str(raised.value)


AGAIN = {name: case for name, case in KEPT.items() if case[0] is PHYSICAL}


@pytest.mark.parametrize("name", AGAIN)
def test_what_is_kept_is_not_gathered_again(name: str) -> None:
    text, edits, said = AGAIN[name]
    program = edited(text, edits, {Invariant.RELEASED})
    check(program)
    program.kept = frozenset(param.name for param in program.layout)
    with pytest.raises(InvariantError) as raised:
        check(program)
    assert said in str(raised.value)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_keeps_the_invariants_is_not_refused(name: str) -> None:
    text, edits = ALLOWED[name]
    logical = {Invariant.MARKED, Invariant.MERGED, Invariant.RELEASED}
    check(edited(text, edits, logical if text is LOGICAL else set(Invariant) - {Invariant.MARKED}))


def test_buckets_keep_the_invariants() -> None:
    check(edited(broken_buckets.BUCKETS, [], set(Invariant) - {Invariant.MARKED}))


def test_kept_parameters_keep_the_invariants() -> None:
    check(edited(LOGICAL, [KEEP, KEEP_COPY], {Invariant.MARKED, Invariant.MERGED, Invariant.KEPT}))


def test_reads_are_merged_when_each_half_has_its_own() -> None:
    read = "read: f32[5] @ unshard('w') = zerofx.unshard.default(w, [5], 0, rows(5, 2), 'dp')"
    halves = "".join(
        f"def {name}(w: f32[3] @ shard('w')):\n    {read}\n    return []\n" for name in ("forward", "backward")
    )
    check(edited(f"mesh(dp=2)\nparam('w', f32[5], dim=0)\n{halves}", [], {Invariant.MARKED, Invariant.MERGED}))


def test_only_what_holds_is_checked() -> None:
    check(edited(LOGICAL, [("mine @ grad", "mm @ grad")], {Invariant.MERGED, Invariant.RELEASED}))


SCHEDULED = Golden.read(GOLDEN / "prefetch_all_gathers" / "two_ahead.txt").after
DELAYED = Golden.read(GOLDEN / "delay_waits" / "over_the_cap.txt").after


@pytest.mark.parametrize(
    ("text", "role", "last"),
    [(SCHEDULED, "unshard", "e_gather in inference"), (DELAYED, "reduce_grad", "{bucket}_1 in backward")],
)
def test_more_collectives_under_way_than_the_schedule_allows_are_refused(text: str, role: str, last: str) -> None:
    program = edited(text, [], {Invariant.BOUNDED})
    most = {"unshard": 3, "reduce_grad": 2}[role]
    program.under_way[role] = most
    check(program)
    program.under_way[role] = most - 1
    with pytest.raises(InvariantError) as raised:
        check(program)
    name = last.format(bucket="reduce_scatter_tensor_coalesced_default")
    said = f"{name}: with it {most} collectives of {role} are under way; wait for others first: {most - 1} may be"
    assert said in str(raised.value)


def exchanged() -> str:
    """The program with buckets, by point-to-point messages."""
    program = parse(broken_buckets.BUCKETS)
    UsePointToPoint(1024)(program)
    return show(program)


@pytest.mark.parametrize(
    ("invariant", "edit", "said"),
    [
        (Invariant.REDUCED, ("1024, 'avg'", "1024, 'sum'"), "it is reduce_scatter_tensor('sum', 2, 'dp'); a needs"),
        (Invariant.REDUCED, ("([a_sent, b_sent],", "([b_sent, a_sent],"), "it reduces b_sent, of b"),
        (Invariant.GATHERED, ("([a_pad, b_pad],", "([b_pad, a_pad],"), "it gathers b_pad; gather the stored part of a"),
        (
            Invariant.GATHERED,
            ("all_gather_p2p_default, 1)", "all_gather_p2p_default, 0)"),
            "it takes place 0, which is",
        ),
    ],
)
def test_point_to_point_messages_are_checked_as_the_collectives_they_replace(
    invariant: Invariant, edit: Edit, said: str
) -> None:
    check(edited(exchanged(), [], {invariant, Invariant.WAITED}))
    assert said in refused(invariant, exchanged(), edit)


CAST = Golden.read(GOLDEN / "sink_casts" / "matmul_under_autocast.txt").after


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            ("_to_copy_default: bf16[3, 4] @ unshard('w')", "_to_copy_default: bf16[3, 4]"),
            "is read by _to_copy_default",
        ),
        (("[y @ out,", "[_to_copy_default @ out,"), "the stored part is read by _to_copy_default"),
    ],
)
def test_a_cast_stored_part_is_only_for_its_marker(edit: Edit, said: str) -> None:
    check(edited(CAST, [], {Invariant.MARKED, Invariant.MERGED}))
    assert said in refused(Invariant.MARKED, CAST, edit)


def test_a_gradient_that_was_reduced_in_another_dtype_is_cast_back() -> None:
    program = Golden.read(GOLDEN / "cast_gradients" / "after_autocast.txt").program()
    run(program, [CastGradients("bf16"), InsertReduceScatter()])
    back = "convert_element_type_default @ grad('w')"
    text = show(program)
    check(edited(text, [], {Invariant.REDUCED}))
    (clone,) = [line.split(":")[0].strip() for line in text.splitlines() if "prims.convert" in line]
    low = text.split(f"{clone}: f32[3, 4] @ reduce_grad('w') = prims.convert_element_type.default(")[1].split(",")[0]
    said = refused(Invariant.REDUCED, text, (back, f"{low} @ grad('w')"))
    assert "the gradient of w is bf16; cast it back to f32, as the parameter is" in said
