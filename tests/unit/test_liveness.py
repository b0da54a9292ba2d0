"""The forecast of what a program holds, against counts by hand, in units of one row of 16 floats: 64 bytes."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from zerofx import _torch
from zerofx.liveness import forward_life, halves, nbytes
from zerofx.need import Need, largest_first, need_of
from zerofx.text import parse

ROW = 64


def rows(found: list[int]) -> list[float]:
    return [size / ROW for size in found]


def forward(body: str, given: str = "x: f32[2, 16]") -> Graph:
    """A graph of one input of two rows, unless told."""
    return parse(f"mesh(dp=1)\n\ndef inference({given}):\n{body}").graphs["inference"]


def test_a_value_is_held_from_its_call_to_its_last_use_and_results_to_the_end() -> None:
    graph = forward("""\
    a: f32[2, 16] = aten.sin.default(x)
    b: f32[2, 16] = aten.cos.default(a)
    c: f32[2, 16] = aten.exp.default(b)
    return [b @ out, c @ out]
""")
    assert rows(forward_life(graph).curve()) == [2, 4, 6, 6, 6]


def test_a_view_holds_what_it_is_a_view_of_and_no_more() -> None:
    graph = forward("""\
    a: f32[2, 16] = aten.sin.default(x)
    half: f32[1, 16] = aten.slice.Tensor(a, 0, 0, 1)
    flat: f32[16] = aten.view.default(half, [16])
    b: f32[16] = aten.cos.default(flat)
    return [b @ out]
""")
    assert rows(forward_life(graph).curve()) == [2, 4, 4, 4, 5, 3]


def test_each_result_of_a_call_is_held_for_itself() -> None:
    graph = forward("""\
    both: (f32[2, 16], i64[2, 16]) = aten.sort.default(x)
    values: f32[2, 16] = operator.getitem(both, 0)
    a: f32[2, 16] = aten.sin.default(values)
    return [a @ out]
""")
    assert rows(forward_life(graph).curve()) == [2, 8, 8, 6, 4]


def test_what_one_call_cuts_into_views_is_one_storage() -> None:
    graph = forward("""\
    a: f32[2, 16] = aten.sin.default(x)
    both: (f32[1, 16], f32[1, 16]) = aten.split.Tensor(a, 1)
    second: f32[1, 16] = operator.getitem(both, 1)
    b: f32[1, 16] = aten.cos.default(second)
    return [b @ out]
""")
    assert rows(forward_life(graph).curve()) == [2, 4, 4, 4, 5, 3]


def test_a_symbolic_size_counts_with_the_value_that_it_had() -> None:
    fake = _torch.FakeRun()
    size = fake.symbol("s7", 5)
    assert nbytes(fake.empty([2 * size + 1, 16], [16, 1], torch.float32, "cpu")) == 11 * ROW


TWO_LAYERS = """\
mesh(dp=2)
param('w', f32[16, 16], dim=0)

def forward(w: f32[8, 16] @ shard('w'), x: f32[2, 16]):
    sin: f32[2, 16] = aten.sin.default(x)
    gather: f32[16, 16] @ unshard('w') = c10d.all_gather_into_tensor.default(w, 2, 'dp')
    wait: f32[16, 16] @ unshard('w') = c10d.wait_tensor.default(gather)
    mm: f32[2, 16] = aten.mm.default(sin, wait)
    exp: f32[2, 16] = aten.exp.default(mm)
    return [exp @ out, w @ saved, x @ saved, sin @ saved, exp @ saved]

def backward(w: f32[8, 16] @ shard('w'), x: f32[2, 16], sin: f32[2, 16], exp: f32[2, 16], g: f32[2, 16] @ tangent):
    mul: f32[2, 16] = aten.mul.Tensor(g, exp)
    gather: f32[16, 16] @ unshard('w') = c10d.all_gather_into_tensor.default(w, 2, 'dp')
    wait: f32[16, 16] @ unshard('w') = c10d.wait_tensor.default(gather)
    t: f32[16, 16](1, 16) = aten.t.default(wait)
    mm_1: f32[2, 16] = aten.mm.default(mul, t)
    t_1: f32[16, 2](1, 16) = aten.t.default(sin)
    mm_2: f32[16, 16] = aten.mm.default(t_1, mul)
    scatter: f32[8, 16] @ reduce_grad('w') = c10d.reduce_scatter_tensor.default(mm_2, 'avg', 2, 'dp')
    wait_1: f32[8, 16] @ reduce_grad('w') = c10d.wait_tensor.default(scatter)
    cos: f32[2, 16] = aten.cos.default(x)
    mul_1: f32[2, 16] = aten.mul.Tensor(mm_1, cos)
    return [wait_1 @ grad('w'), mul_1]
"""


def test_a_step_holds_inputs_and_results_throughout_and_saved_values_until_their_last_use() -> None:
    graphs = parse(TWO_LAYERS).graphs
    first, second = halves(graphs["forward"], graphs["backward"])
    assert rows(first.curve()) == [2, 2, 4, 20, 20, 22, 8, 6]
    always = 4  # x and exp, which the user holds
    rest = [4, 4, 4, 4, 4, 6, 20, 20, 20, 22, 6, 22, 26, 26, 12, 14, 10]
    found = rows(second.curve())
    assert found[:5] == [always + 4] * 5  # sin and the tangent wait from the beginning
    assert found == [always + held for held in rest]


def test_the_need_of_a_step_says_what_keeping_a_parameter_would_add() -> None:
    need = need_of(parse(TWO_LAYERS), steady=100 * ROW)
    assert rows(list(need.levels)) == [122, 110, 130]
    assert need.waits == {"w": (16 * ROW, 1, 2)}
    assert Need.read(need.written()) == need


NEEDS = [
    Need((100, 60, 50, 100), {"a": (30, 1, 3), "b": (40, 1, 2), "c": (10, 1, 2), "d": (10, 2, 3)}),
    Need((50, 70, 20, 50), {"a": (30, 1, 3), "b": (40, 1, 2), "c": (10, 1, 2), "d": (10, 2, 3)}),
]


@pytest.mark.parametrize(
    ("allowed", "kept"),
    [
        (200, ("a", "b", "c", "d")),
        (119, ("b", "d")),
        (110, ("b", "d")),
        (100, ("a", "d")),
        (90, ("c", "d")),
        (79, ("d",)),
        (50, ()),
    ],
)
def test_the_largest_parameters_that_fit_on_every_rank_are_kept(allowed: int, kept: tuple[str, ...]) -> None:
    assert largest_first(NEEDS, "abcd", allowed) == kept


def test_of_equal_parameters_the_last_is_kept() -> None:
    assert largest_first([Need((0, 0), {"a": (5, 0, 1), "b": (5, 0, 1)})], "ab", 5) == ("b",)
