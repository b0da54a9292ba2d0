"""A program whose backward hands gradients over, the edits that break it, and what is said of it."""

from __future__ import annotations

from tests.broken import Edit

UPDATES = """\
mesh(dp=2)
param('w', f32[4, 3], dim=0)
param('v', f32[4, 4], dim=0)

def backward(w: f32[2, 3] @ shard('w'), v: f32[2, 4] @ shard('v'), x: f32[2, 3], tangent: f32[2, 4] @ tangent):
    v_gather: f32[4, 4] @ unshard('v') = c10d.all_gather_into_tensor.default(v, 2, 'dp')
    v_whole: f32[4, 4] @ unshard('v') = c10d.wait_tensor.default(v_gather)
    t: f32[4, 2](1, 4) = aten.t.default(tangent)
    v_grad: f32[4, 4] = aten.mm.default(t, tangent)
    w_grad: f32[4, 3] = aten.mm.default(t, x)
    v_part: f32[2, 4] @ reduce_grad('v') = c10d.reduce_scatter_tensor.default(v_grad, 'avg', 2, 'dp')
    w_part: f32[2, 3] @ reduce_grad('w') = c10d.reduce_scatter_tensor.default(w_grad, 'avg', 2, 'dp')
    v_mean: f32[2, 4] @ reduce_grad('v') = c10d.wait_tensor.default(v_part)
    first: none @ update('v') = zerofx.update.default([v_mean], [v], ['v'])
    w_mean: f32[2, 3] @ reduce_grad('w') = c10d.wait_tensor.default(w_part)
    second: none @ update('w') = zerofx.update.default([w_mean], [w], ['w'])
    x_grad: f32[2, 4] = aten.mm.default(tangent, v_whole)
    return [None, None, x_grad]
"""

FIRST = "first: none @ update('v') = zerofx.update.default([v_mean], [v], ['v'])"
GATHER = """\
    v_gather: f32[4, 4] @ unshard('v') = c10d.all_gather_into_tensor.default(v, 2, 'dp')
    v_whole: f32[4, 4] @ unshard('v') = c10d.wait_tensor.default(v_gather)
"""

UPDATED: dict[str, tuple[list[Edit], str]] = {
    "another parameter's gradient": (
        [(FIRST, "first: none @ update('w') = zerofx.update.default([v_mean], [w], ['w'])")],
        "first in backward: it takes v_mean, of v, for w; take the gradient of w",
    ),
    "a gradient without a name": (
        [(FIRST, FIRST.replace("[v_mean]", "[v_mean, w_part]"))],
        "first in backward: it takes 2 gradients of v; name the parameter of each, in its tag too",
    ),
    "another tag": (
        [(FIRST, FIRST.replace("update('v')", "update('w')"))],
        "first in backward: it takes 1 gradients of v; name the parameter of each, in its tag too",
    ),
    "updated twice": (
        [(FIRST, f"{FIRST}\n    {FIRST.replace('first', 'again')}")],
        "again in backward: it is not the only gradient of v; hand over the sum",
    ),
    "returned too": (
        [("return [None, None,", "return [w_mean @ grad('w'), None,")],
        "second in backward: it is not the only gradient of w; hand over the sum",
    ),
    "an input left out": (
        [(FIRST, FIRST.replace("[v]", "[]"))],
        "first in backward: it writes to nothing; list all inputs that have its parameters' storage: v",
    ),
    "another parameter's input": (
        [(FIRST, FIRST.replace("[v]", "[v, w]"))],
        "first in backward: it writes to v, w; list all inputs that have its parameters' storage: v",
    ),
    "gathered behind it": (
        [(GATHER, ""), ("    x_grad", f"{GATHER}    x_grad")],
        "first in backward: v_whole reads v behind it; update behind the last read",
    ),
    "waited for behind it": (
        [(GATHER.splitlines(keepends=True)[1], ""), ("    x_grad", f"{GATHER.splitlines(keepends=True)[1]}    x_grad")],
        "first in backward: v_whole reads v behind it; update behind the last read",
    ),
    "read as a view behind it": (
        [
            ("    x_grad", "    late: f32[4, 2](1, 4) = aten.t.default(v)\n    x_grad"),
            ("return [None, None, x_grad]", "return [None, None, x_grad, late]"),
        ],
        "first in backward: late reads v behind it; update behind the last read",
    ),
}

REDUCED: dict[str, tuple[list[Edit], str]] = {
    "handed over as it is": (
        [("[w_mean], [w]", "[w_grad], [w]")],
        "w_grad in backward: the gradient of w passes 0 reductions; reduce it exactly once",
    ),
}
