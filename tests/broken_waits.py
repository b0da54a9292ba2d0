"""Programs of gradients that wait and parameters that are kept, the edits that break them, and what is said of it."""

from __future__ import annotations

from tests.broken import Edit

WAITS = """\
mesh(dp=2)
param('w', f32[5, 4], dim=0)
param('bias', f32[5], dim=None)
param('other', f32[5, 4], dim=0)

def joint(w_kept: f32[5, 4] @ whole('w'), other_kept: f32[5, 4] @ whole('other'), bias: f32[5] @ replica('bias'), \
x: f32[2, 4], tangent: f32[2, 5] @ tangent):
    read: f32[5, 4] @ unshard('w') = zerofx.unshard.default(w_kept, [5, 4], -1, 0, 'dp')
    copy: f32[5] @ unshard('bias') = zerofx.unshard.default(bias, [5], -1, 0, 'dp')
    t: f32[4, 5](1, 4) = aten.t.default(read)
    addmm: f32[2, 5] = aten.addmm.default(copy, x, t)
    t_1: f32[5, 2](1, 5) = aten.t.default(tangent)
    mm: f32[5, 4] = aten.mm.default(t_1, x)
    sum_1: f32[5] = aten.sum.dim_IntList(tangent, [0])
    return [addmm @ out, mm @ partial('w'), None, sum_1 @ partial('bias'), None]
"""

REDUCE = """\
mesh(dp=2)
param('w', f32[5, 4], dim=0)
param('other', f32[5, 4], dim=0)

def reduce(w_sum: f32[5, 4] @ whole('w'), other_sum: f32[5, 4] @ whole('other')):
    mine: f32[3, 4] @ reduce_grad('w') = zerofx.reduce_grad.default(w_sum, 0, rows(5, 2), 'dp')
    theirs: f32[3, 4] @ reduce_grad('other') = zerofx.reduce_grad.default(other_sum, 0, rows(5, 2), 'dp')
    return [mine @ grad('w'), theirs @ grad('other')]
"""

LAST = "    return [addmm"
MARKED: dict[str, tuple[list[Edit], str]] = {
    "reduced before it waits": (
        [
            (LAST, f"    early: f32[5] @ reduce_grad('bias') = zerofx.reduce_grad.default(sum_1, -1, 0, 'dp')\n{LAST}"),
            ("sum_1 @ partial", "early @ partial"),
        ],
        "early in joint: the gradient of bias is reduced, but is to wait for that; return it as this rank has it",
    ),
    "reduced, then added to": (
        [
            (
                LAST,
                (
                    "    early: f32[5] @ reduce_grad('bias') = zerofx.reduce_grad.default(sum_1, -1, 0, 'dp')\n"
                    f"    added: f32[5] = aten.add.Tensor(early, sum_1)\n{LAST}"
                ),
            ),
            ("sum_1 @ partial", "added @ partial"),
        ],
        "early in joint: the gradient of bias is reduced, but is to wait for that; return it as this rank has it",
    ),
    "of another shape": (
        [("mm @ partial('w')", "t_1 @ partial('w')")],
        "t_1 in joint: the gradient of w that waits is f32[5, 2]; give it as f32[5, 4]",
    ),
    "of another dtype": (
        [
            (LAST, f"    low: bf16[5] = aten._to_copy.default(sum_1, dtype=bf16)\n{LAST}"),
            ("sum_1 @ partial", "low @ partial"),
        ],
        "low in joint: the gradient of bias that waits is bf16[5]; give it as f32[5]",
    ),
    "another parameter's": (
        [("(w_kept, [5, 4]", "(other_kept, [5, 4]")],
        "read in joint: it unshards other_kept; unshard the stored part of w",
    ),
    "read as a part": (
        [("-1, 0, 'dp')\n    copy", "0, rows(5, 2), 'dp')\n    copy")],
        (
            "read in joint: its size, dim, rows and group are [(5, 4), 0, rows(5, 2), 'dp']; "
            "the layout says [(5, 4), -1, 0, 'dp']"
        ),
    ),
    "given as it waits": (
        [("mm @ partial('w')", "mm @ grad('w')")],
        "mm in joint: the gradient of w is not reduced; pass it through zerofx::reduce_grad",
    ),
}

SUMS: dict[str, tuple[list[Edit], str]] = {
    "another parameter's sum": (
        [("(other_sum,", "(w_sum,")],
        "theirs in reduce: w_sum is of w; reduce the gradient of other",
    ),
}

LEFT = """\
mesh(dp=2)
param('w', f32[5, 4], dim=0)
param('bias', f32[5], dim=None)

def backward(x: f32[2, 4], tangent: f32[2, 5] @ tangent):
    t: f32[5, 2](1, 5) = aten.t.default(tangent)
    mm: f32[5, 4] = aten.mm.default(t, x)
    sum_1: f32[5] = aten.sum.dim_IntList(tangent, [0])
    total: f32[5] @ reduce_grad('bias') = c10d.all_reduce.default(sum_1, 'avg', 'dp')
    mean: f32[5] @ reduce_grad('bias') = c10d.wait_tensor.default(total)
    return [mm @ partial('w'), mean @ grad('bias')]
"""

REDUCED: dict[str, tuple[list[Edit], str]] = {
    "reduced all the same": (
        [("mean @ grad", "mean @ partial")],
        "mean in backward: the gradient of bias is reduced, but is to wait for that; return it as this rank has it",
    ),
    "taken for reduced": (
        [("mm @ partial", "mm @ grad")],
        "mm in backward: the gradient of w passes 0 reductions; reduce it exactly once",
    ),
    "of another shape": (
        [("mm @ partial", "t @ partial")],
        "t in backward: the gradient of w that waits is f32[5, 2]; give it as f32[5, 4]",
    ),
}
