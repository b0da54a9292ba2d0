"""A program whose collectives are in buckets, the edits that break each invariant, and what the verifier says of it.

The parameters of a bucket have one shape, so that one taken for another shows in no type.
"""

from __future__ import annotations

from tests.broken import CUT, REDUCE, SCATTER, Edit

BUCKETS = """\
mesh(dp=2, tp=2)
param('a', f32[5], dim=0)
param('b', f32[5], dim=0)
param('c', f32[5], dim=None)
param('d', f32[5], dim=None)

def forward(a: f32[3] @ shard('a'), b: f32[3] @ shard('b'), x: f32[5]):
    a_pad: f32[3] @ unshard('a') = aten.constant_pad_nd.default(a, [0, pad(5, 2)])
    b_pad: f32[3] @ unshard('b') = aten.constant_pad_nd.default(b, [0, pad(5, 2)])
    got: (f32[6], f32[6]) @ unshard('a', 'b') = c10d.all_gather_into_tensor_coalesced.default([a_pad, b_pad], 2, 'dp')
    of_a: f32[6] @ unshard('a') = operator.getitem(got, 0)
    of_b: f32[6] @ unshard('b') = operator.getitem(got, 1)
    a_wait: f32[6] @ unshard('a') = c10d.wait_tensor.default(of_a)
    a_rows: f32[5] @ unshard('a') = aten.slice.Tensor(a_wait, 0, 0, 5)
    b_wait: f32[6] @ unshard('b') = c10d.wait_tensor.default(of_b)
    b_rows: f32[5] @ unshard('b') = aten.slice.Tensor(b_wait, 0, 0, 5)
    scaled: f32[5] = aten.mul.Tensor(x, a_rows)
    y: f32[5] = aten.add.Tensor(scaled, b_rows)
    return [y @ out, x @ saved]

def backward(x: f32[5], tangent: f32[5] @ tangent):
    mul: f32[5] = aten.mul.Tensor(tangent, x)
    a_sent: f32[6] @ reduce_grad('a') = aten.constant_pad_nd.default(mul, [0, 1])
    b_sent: f32[6] @ reduce_grad('b') = aten.constant_pad_nd.default(tangent, [0, 1])
    sent: (f32[3], f32[3]) @ reduce_grad('a', 'b') = \\
        c10d.reduce_scatter_tensor_coalesced.default([a_sent, b_sent], 'avg', 2, 'dp')
    for_a: f32[3] @ reduce_grad('a') = operator.getitem(sent, 0)
    a_mean: f32[3] @ reduce_grad('a') = c10d.wait_tensor.default(for_a)
    a_part: f32[3] @ reduce_grad('a') = aten.slice.Tensor(a_mean, 0, 0, rows(5, 2))
    for_b: f32[3] @ reduce_grad('b') = operator.getitem(sent, 1)
    b_mean: f32[3] @ reduce_grad('b') = c10d.wait_tensor.default(for_b)
    b_part: f32[3] @ reduce_grad('b') = aten.slice.Tensor(b_mean, 0, 0, rows(5, 2))
    total: (f32[5], f32[5]) @ reduce_grad('c', 'd') = c10d.all_reduce_coalesced.default([mul, tangent], 'avg', 'dp')
    for_c: f32[5] @ reduce_grad('c') = operator.getitem(total, 0)
    c_mean: f32[5] @ reduce_grad('c') = c10d.wait_tensor.default(for_c)
    for_d: f32[5] @ reduce_grad('d') = operator.getitem(total, 1)
    d_mean: f32[5] @ reduce_grad('d') = c10d.wait_tensor.default(for_d)
    return [a_part @ grad('a'), b_part @ grad('b'), c_mean @ grad('c'), d_mean @ grad('d'), None]
"""


def last_line(text: str) -> Edit:
    """One more line at the end of the backward graph."""
    return "    return [a_part", f"    {text}\n    return [a_part"


OTHERS = "tag it as that, or take the place of its own parameter"
GATHERED: dict[str, tuple[list[Edit], str]] = {
    "a place of another parameter": (
        [("getitem(got, 1)", "getitem(got, 0)")],
        f"of_b in forward: it takes place 0, which is that of a; {OTHERS}",
    ),
    "a result without a tag": (
        [("of_b: f32[6] @ unshard('b')", "of_b: f32[6]")],
        f"of_b in forward: it takes place 1, which is that of b; {OTHERS}",
    ),
    "tensors in another order than the tag": (
        [("[a_pad, b_pad]", "[b_pad, a_pad]")],
        "of_a in forward: it gathers b_pad; gather the stored part of a",
    ),
    "a tag of too few parameters": (
        [("[a_pad, b_pad]", "[a_pad, b_pad, b_pad]"), ("got: (f32[6], f32[6])", "got: (f32[6], f32[6], f32[6])")],
        "got in forward: its tag names a, b for 3 tensors; name the parameter of each place",
    ),
    "a bucket without a tag": (
        [(" @ unshard('a', 'b')", "")],
        "a_pad in forward: the shard is read by got; read the gathered parameter",
    ),
    "something else than the stored part": (
        [
            ("[a_pad, b_pad]", "[a_pad, x_cut]"),
            ("    got:", "    x_cut: f32[3] = aten.slice.Tensor(x, 0, 0, 3)\n    got:"),
        ],
        "of_b in forward: it gathers x_cut; gather the stored part of b",
    ),
    "a bucket over another axis": (
        [("[a_pad, b_pad], 2, 'dp'", "[a_pad, b_pad], 2, 'tp'")],
        "of_a in forward: it gathers from 2 ranks over tp; the axis dp has 2 ranks, over dp",
    ),
    "a bucket over another number of ranks": (
        [
            ("[a_pad, b_pad], 2, 'dp'", "[a_pad, b_pad], 3, 'dp'"),
            ("got: (f32[6], f32[6])", "got: (f32[9], f32[9])"),
            *((f"{name}: f32[6]", f"{name}: f32[9]") for name in ("of_a", "of_b", "a_wait", "b_wait")),
        ],
        "of_a in forward: it gathers from 3 ranks over dp; the axis dp has 2 ranks, over dp",
    ),
    "a chunk that isn't padded": (
        [("[a_pad, b_pad]", "[a_pad, b]")],
        "of_b in forward: it gathers chunks that differ by rank; pad them by pad(5, 2)",
    ),
    "padding that is read": (
        [("[y @ out,", "[y @ out, b_wait @ out,")],
        "b_wait in forward: it is read with the shape [6]; cut it to [5] behind the all-gather",
    ),
    "tensors of two dtypes": (
        [
            ("b: f32[3] @ shard", "b: f64[3] @ shard"),
            ("param('b', f32", "param('b', f64"),
            ("got: (f32[6], f32[6])", "got: (f32[6], f64[6])"),
            *((f"    {name}: f32[", f"    {name}: f64[") for name in ("b_pad", "of_b", "b_wait", "b_rows", "y")),
        ],
        "got in forward: its tensors are float32, float64; give each dtype a bucket of its own",
    ),
}

REDUCED: dict[str, tuple[list[Edit], str]] = {
    "a place of another parameter": (
        [("getitem(total, 1)", "getitem(total, 0)")],
        f"for_d in backward: it takes place 0, which is that of c; {OTHERS}",
    ),
    "a result without a tag": (
        [("for_b: f32[3] @ reduce_grad('b')", "for_b: f32[3]")],
        f"for_b in backward: it takes place 1, which is that of b; {OTHERS}",
    ),
    "tensors in another order than the tag": (
        [("[a_sent, b_sent]", "[b_sent, a_sent]")],
        "for_a in backward: it reduces b_sent, of b; reduce the gradient of a",
    ),
    "a tag of too few parameters": (
        [("[mul, tangent]", "[mul, tangent, mul]"), ("total: (f32[5], f32[5])", "total: (f32[5], f32[5], f32[5])")],
        "total in backward: its tag names c, d for 3 tensors; name the parameter of each place",
    ),
    "a bucket without a tag": (
        [("for_a: f32[3] @ reduce_grad('a')", "for_a: f32[3]"), (" @ reduce_grad('a', 'b')", "")],
        "a_part in backward: the gradient of a passes 0 reductions; reduce it exactly once",
    ),
    "a sum for a mean": (
        [("[mul, tangent], 'avg'", "[mul, tangent], 'sum'")],
        f"for_c in backward: it is all_reduce('sum', 'dp'); c needs {REDUCE}",
    ),
    "a bucket over another axis": (
        [("[a_sent, b_sent], 'avg', 2, 'dp'", "[a_sent, b_sent], 'avg', 2, 'tp'")],
        f"for_a in backward: it is reduce_scatter_tensor('avg', 2, 'tp'); a needs {SCATTER}",
    ),
    "a bucket over another number of ranks": (
        [
            ("[a_sent, b_sent], 'avg', 2,", "[a_sent, b_sent], 'avg', 3,"),
            ("sent: (f32[3], f32[3])", "sent: (f32[2], f32[2])"),
            *((f"    {name}: f32[3]", f"    {name}: f32[2]") for name in ("for_a", "a_mean", "a_part")),
            *((f"    {name}: f32[3]", f"    {name}: f32[2]") for name in ("for_b", "b_mean", "b_part")),
        ],
        f"for_a in backward: it is reduce_scatter_tensor('avg', 3, 'dp'); a needs {SCATTER}",
    ),
    "an all-reduce of sharded parameters' gradients": (
        [
            (
                "reduce_scatter_tensor_coalesced.default([a_sent, b_sent], 'avg', 2,",
                "all_reduce_coalesced.default([a_sent, b_sent], 'avg',",
            ),
            ("sent: (f32[3], f32[3])", "sent: (f32[6], f32[6])"),
            *((f"    {name}: f32[3]", f"    {name}: f32[6]") for name in ("for_a", "a_mean", "for_b", "b_mean")),
        ],
        f"for_a in backward: it is {REDUCE}; a needs {SCATTER}",
    ),
    "a gradient that isn't padded": (
        [
            ("[a_sent, b_sent]", "[a_sent, tangent]"),
            ("sent: (f32[3], f32[3])", "sent: (f32[3], f32[2])"),
            *((f"    {name}: f32[3]", f"    {name}: f32[2]") for name in ("for_b", "b_mean", "b_part")),
        ],
        "for_b in backward: it scatters 5 rows over 2 ranks; pad them to 6",
    ),
    "the padding of the last rank": (
        [("a_mean, 0, 0, rows(5, 2)", "a_mean, 0, 0, 3")],
        f"a_part in backward: the gradient of a has the shape [3] on every rank; {CUT}",
    ),
    "a gradient reduced twice": (
        [
            last_line("again: f32[5] @ reduce_grad('c') = c10d.all_reduce.default(c_mean, 'avg', 'dp')"),
            last_line("twice: f32[5] @ reduce_grad('c') = c10d.wait_tensor.default(again)"),
            ("c_mean @ grad", "twice @ grad"),
        ],
        "twice in backward: the gradient of c passes 2 reductions; reduce it exactly once",
    ),
    "tensors of two dtypes": (
        [
            ("[mul, tangent]", "[mul, low]"),
            ("    total:", "    low: bf16[5] = aten._to_copy.default(tangent, dtype=bf16)\n    total:"),
            ("total: (f32[5], f32[5])", "total: (f32[5], bf16[5])"),
            *((f"    {name}: f32[5]", f"    {name}: bf16[5]") for name in ("for_d", "d_mean")),
        ],
        "total in backward: its tensors are bfloat16, float32; give each dtype a bucket of its own",
    ),
}

WAIT = "read the result of wait_tensor"
WAITED: dict[str, tuple[list[Edit], str]] = {
    "a gathered parameter that is read": (
        [("slice.Tensor(b_wait,", "slice.Tensor(of_b,")],
        f"of_b in forward: b_rows reads it before it is complete; {WAIT}",
    ),
    "a gradient that is returned": (
        [("d_mean @ grad", "for_d @ grad")],
        f"for_d in backward: output reads it before it is complete; {WAIT}",
    ),
    "a bucket that is returned": (
        [("[a_part @", "[total, a_part @")],
        f"total in backward: output reads it before it is complete; {WAIT}",
    ),
}

GATHER_AGAIN = "it holds the gathered b until the backward; save the shard and gather again"
RELEASED = ("of_b", "b_wait", "b_rows")
