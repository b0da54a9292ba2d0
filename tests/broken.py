"""Programs that keep their invariants, the edits that break each, and what the verifier says of it."""

from __future__ import annotations

LOGICAL = """\
mesh(dp=2, tp=3)
param('w', f32[5, 4], dim=0)
param('bias', f32[5], dim=None)

def joint(w: f32[3, 4] @ shard('w'), bias: f32[5] @ replica('bias'), x: f32[2, 4], tangent: f32[2, 5] @ tangent):
    read: f32[5, 4] @ unshard('w', recompute=True) = zerofx.unshard.default(w, [5, 4], 0, rows(5, 2), 'dp')
    copy: f32[5] @ unshard('bias') = zerofx.unshard.default(bias, [5], -1, 0, 'dp')
    t: f32[4, 5](1, 4) = aten.t.default(read)
    addmm: f32[2, 5] = aten.addmm.default(copy, x, t)
    t_1: f32[5, 2](1, 5) = aten.t.default(tangent)
    mm: f32[5, 4] = aten.mm.default(t_1, x)
    sum_1: f32[5] = aten.sum.dim_IntList(tangent, [0])
    mine: f32[3, 4] @ reduce_grad('w') = zerofx.reduce_grad.default(mm, 0, rows(5, 2), 'dp')
    mean: f32[5] @ reduce_grad('bias') = zerofx.reduce_grad.default(sum_1, -1, 0, 'dp')
    return [addmm @ out, mine @ grad('w'), mean @ grad('bias'), None]
"""

PHYSICAL = """\
mesh(dp=2, tp=3)
param('w', f32[5, 4], dim=0)
param('bias', f32[5], dim=None)

def forward(w: f32[3, 4] @ shard('w'), bias: f32[5] @ replica('bias'), x: f32[2, 4]):
    padded: f32[3, 4] @ unshard('w') = aten.constant_pad_nd.default(w, [0, 0, 0, pad(5, 2)])
    gather: f32[6, 4] @ unshard('w') = c10d.all_gather_into_tensor.default(padded, 2, 'dp')
    wait: f32[6, 4] @ unshard('w') = c10d.wait_tensor.default(gather)
    read: f32[5, 4] @ unshard('w') = aten.slice.Tensor(wait, 0, 0, 5)
    t: f32[4, 5](1, 4) = aten.t.default(read)
    addmm: f32[2, 5] = aten.addmm.default(bias, x, t)
    return [addmm @ out, w @ saved, x @ saved]

def backward(w: f32[3, 4] @ shard('w'), x: f32[2, 4], tangent: f32[2, 5] @ tangent):
    t: f32[5, 2](1, 5) = aten.t.default(tangent)
    mm: f32[5, 4] = aten.mm.default(t, x)
    padding: f32[6, 4] @ reduce_grad('w') = aten.constant_pad_nd.default(mm, [0, 0, 0, 1])
    scatter: f32[3, 4] @ reduce_grad('w') = c10d.reduce_scatter_tensor.default(padding, 'avg', 2, 'dp')
    chunk: f32[3, 4] @ reduce_grad('w') = c10d.wait_tensor.default(scatter)
    mine: f32[3, 4] @ reduce_grad('w') = aten.slice.Tensor(chunk, 0, 0, rows(5, 2))
    sum_1: f32[5] = aten.sum.dim_IntList(tangent, [0])
    total: f32[5] @ reduce_grad('bias') = c10d.all_reduce.default(sum_1, 'avg', 'dp')
    mean: f32[5] @ reduce_grad('bias') = c10d.wait_tensor.default(total)
    return [mine @ grad('w'), mean @ grad('bias'), None]
"""


Edit = tuple[str, str]


def line(text: str) -> Edit:
    """One more line at the end of the joint or forward graph."""
    return "    return [addmm", f"    {text}\n    return [addmm"


def backward_line(text: str) -> Edit:
    return "    return [mine", f"    {text}\n    return [mine"


WANTED = "the layout says [(5, 4), 0, rows(5, 2), 'dp']"
REPLICATED = "the layout says [(5,), -1, 0, 'dp']"
READ = "read it through zerofx::unshard"
MARKED: dict[str, tuple[list[Edit], str]] = {
    "a whole parameter": (
        [("@ shard('w')", "@ param('w')")],
        "w in joint: it is a whole parameter; run choose-layout first",
    ),
    "a shard that is read": (
        [line("neg: f32[3, 4] = aten.neg.default(w)")],
        f"w in joint: the stored part is read by neg; {READ}",
    ),
    "a replica that is read": (
        [("default(copy, x, t)", "default(bias, x, t)")],
        f"bias in joint: the stored part is read by addmm; {READ}",
    ),
    "a shard that the user sees": (
        [("[addmm @ out,", "[addmm @ out, w @ out,")],
        f"w in joint: the stored part is read by output; {READ}",
    ),
    "a read of another size": (
        [("copy: f32[5]", "copy: f32[1]"), ("bias, [5], -1", "bias, [1], -1")],
        f"copy in joint: its size, dim, rows and group are [(1,), -1, 0, 'dp']; {REPLICATED}",
    ),
    "a read on another dim": (
        [("w, [5, 4], 0, rows(5, 2)", "w, [5, 4], 1, rows(4, 2)")],
        f"read in joint: its size, dim, rows and group are [(5, 4), 1, rows(4, 2), 'dp']; {WANTED}",
    ),
    "rank 0's rows on every rank": (
        [("w, [5, 4], 0, rows(5, 2)", "w, [5, 4], 0, 3")],
        f"read in joint: its size, dim, rows and group are [(5, 4), 0, 3, 'dp']; {WANTED}",
    ),
    "a read over another axis": (
        [("w, [5, 4], 0, rows(5, 2), 'dp'", "w, [5, 4], 0, rows(5, 2), 'tp'")],
        f"read in joint: its size, dim, rows and group are [(5, 4), 0, rows(5, 2), 'tp']; {WANTED}",
    ),
    "an unshard of what isn't stored": (
        [("unshard.default(w,", "unshard.default(x,")],
        "read in joint: it unshards x; unshard the stored part of w",
    ),
    "an unshard of another parameter": (
        [("unshard.default(bias,", "unshard.default(w,")],
        "copy in joint: it unshards w; unshard the stored part of bias",
    ),
    "a marker without a tag": (
        [(" @ reduce_grad('w')", "")],
        "mine in joint: it has no tag; stamp it with the parameter that it stands for",
    ),
    "an unreduced gradient": (
        [("mine @ grad", "mm @ grad")],
        "mm in joint: the gradient of w is not reduced; pass it through zerofx::reduce_grad",
    ),
    "a sum of which one term isn't reduced": (
        [line("both: f32[5] = aten.add.Tensor(mean, sum_1)"), ("mean @ grad", "both @ grad")],
        "both in joint: the gradient of bias is not reduced; pass it through zerofx::reduce_grad",
    ),
    "the reduced gradient of another parameter": (
        [("mine @ grad", "mean @ grad")],
        "mean in joint: the gradient of w is not reduced; pass it through zerofx::reduce_grad",
    ),
    "a gradient reduced twice": (
        [
            line("twice: f32[5] @ reduce_grad('bias') = zerofx.reduce_grad.default(mean, -1, 0, 'dp')"),
            ("mean @ grad", "twice @ grad"),
        ],
        "twice in joint: mean is reduced already; reduce each gradient once",
    ),
    "a gradient cut on another dim": (
        [("mine: f32[3, 4]", "mine: f32[5, 2]"), ("mm, 0, rows(5, 2)", "mm, 1, rows(4, 2)")],
        f"mine in joint: its size, dim, rows and group are [(5, 4), 1, rows(4, 2), 'dp']; {WANTED}",
    ),
    "the whole gradient of a sharded parameter": (
        [("mine: f32[3, 4]", "mine: f32[5, 4]"), ("mm, 0, rows(5, 2)", "mm, -1, 0")],
        f"mine in joint: its size, dim, rows and group are [(5, 4), -1, 0, 'dp']; {WANTED}",
    ),
    "a gradient of another size": (
        [("mean: f32[5]", "mean: f32[2, 5]"), ("default(sum_1, -1", "default(tangent, -1")],
        f"mean in joint: its size, dim, rows and group are [(2, 5), -1, 0, 'dp']; {REPLICATED}",
    ),
    "a gradient reduced over another axis": (
        [("sum_1, -1, 0, 'dp'", "sum_1, -1, 0, 'tp'")],
        f"mean in joint: its size, dim, rows and group are [(5,), -1, 0, 'tp']; {REPLICATED}",
    ),
}

MERGED: dict[str, tuple[list[Edit], str]] = {
    "a second read": (
        [line("again: f32[5] @ unshard('bias') = zerofx.unshard.default(bias, [5], -1, 0, 'dp')")],
        "again in joint: the second zerofx.unshard.default of bias; merge the reads",
    ),
    "a second reduction": (
        [line("again: f32[5] @ reduce_grad('bias') = zerofx.reduce_grad.default(sum_1, -1, 0, 'dp')")],
        "again in joint: the second zerofx.reduce_grad.default of bias; add the gradients before they are reduced",
    ),
    "a marker without a tag": (
        [(" @ unshard('w', recompute=True)", "")],
        "read in joint: it has no tag; stamp it with the parameter that it stands for",
    ),
}

KEEP = ("recompute=True", "keep=True")
KEEP_COPY = ("copy: f32[5] @ unshard('bias')", "copy: f32[5] @ unshard('bias', keep=True)")
KEPT: dict[str, tuple[str, list[Edit], str]] = {
    "a read that is left to the partition": (
        LOGICAL,
        [(", recompute=True", ""), KEEP_COPY],
        "read in joint: it may be computed again; tag it MUST_SAVE",
    ),
    "a read that must be recomputed": (
        LOGICAL,
        [KEEP_COPY],
        "read in joint: it may be computed again; tag it MUST_SAVE",
    ),
    "a read of a replica that is left to the partition": (
        LOGICAL,
        [KEEP],
        "copy in joint: it may be computed again; tag it MUST_SAVE",
    ),
    "a read in the backward": (
        PHYSICAL,
        [backward_line("again: f32[5, 4] @ unshard('w') = zerofx.unshard.default(w, [5, 4], 0, rows(5, 2), 'dp')")],
        "again in backward: it is gathered in the backward; save it in the forward",
    ),
    "an all-gather in the backward": (
        PHYSICAL,
        [backward_line("again: f32[6, 4] @ unshard('w') = c10d.all_gather_into_tensor.default(w, 2, 'dp')")],
        "again in backward: it is gathered in the backward; save it in the forward",
    ),
    "a bucket in the backward": (
        PHYSICAL,
        [
            backward_line(
                "also: (f32[6, 4],) @ unshard('w') = c10d.all_gather_into_tensor_coalesced.default([w], 2, 'dp')"
            ),
            backward_line("again: f32[6, 4] @ unshard('w') = operator.getitem(also, 0)"),
        ],
        "again in backward: it is gathered in the backward; save it in the forward",
    ),
}

GATHER_AGAIN = "it holds the gathered w until the backward; save the shard and gather again"
RELEASED: dict[str, list[Edit]] = {
    "read": [],
    "wait": [],
    "t": [],
    "low": [line("low: bf16[5, 4] = aten._to_copy.default(read, dtype=bf16)")],
    "again": [line("again: f32[20] = aten.view.default(read, [20])")],
    "rows_1": [
        line("parts: (f32[4, 4], f32[1, 4]) = aten.split.Tensor(read, 4)"),
        line("rows_1: f32[4, 4] = operator.getitem(parts, 0)"),
    ],
}

GATHERED: dict[str, tuple[list[Edit], str]] = {
    "a marker that is left": (
        [line("again: f32[5, 4] @ unshard('w') = zerofx.unshard.default(w, [5, 4], 0, rows(5, 2), 'dp')")],
        "again in forward: a marker is left; replace it by an all-gather",
    ),
    "a shard that is read": (
        [line("neg: f32[3, 4] = aten.neg.default(w)")],
        "w in forward: the shard is read by neg; read the gathered parameter",
    ),
    "a shard that the user sees": (
        [("[addmm @ out,", "[addmm @ out, w @ out,")],
        "w in forward: the shard is read by output; read the gathered parameter",
    ),
    "a shard that is read on its way to the gather": (
        [line("neg: f32[3, 4] = aten.neg.default(padded)")],
        "padded in forward: the shard is read by neg; read the gathered parameter",
    ),
    "a gather without a tag": (
        [("gather: f32[6, 4] @ unshard('w')", "gather: f32[6, 4]")],
        "padded in forward: the shard is read by gather; read the gathered parameter",
    ),
    "a gather from another number of ranks": (
        [("gather: f32[6", "gather: f32[9"), ("padded, 2, 'dp'", "padded, 3, 'dp'"), ("wait: f32[6", "wait: f32[9")],
        "gather in forward: it gathers from 3 ranks over dp; the axis dp has 2 ranks, over dp",
    ),
    "a gather of something else": (
        [
            ("tensor.default(padded, 2", "tensor.default(other, 2"),
            ("    padded:", "    other: f32[3, 4] = aten.new_zeros.default(x, [3, 4])\n    padded:"),
        ],
        "gather in forward: it gathers other; gather the stored part of w",
    ),
    "a gather over another axis": (
        [("padded, 2, 'dp'", "padded, 2, 'tp'")],
        "gather in forward: it gathers from 2 ranks over tp; the axis dp has 2 ranks, over dp",
    ),
    "chunks of rank 0's size on every rank": (
        [("pad(5, 2)", "0")],
        "gather in forward: it gathers chunks that differ by rank; pad them by pad(5, 2)",
    ),
    "padding that is read": (
        [("[addmm @ out,", "[addmm @ out, wait @ out,")],
        "wait in forward: it is read with the shape [6, 4]; cut it to [5, 4] behind the all-gather",
    ),
}

SCATTER, REDUCE = "reduce_scatter_tensor('avg', 2, 'dp')", "all_reduce('avg', 'dp')"
CUT = "cut it to the rows that each rank stores"
REDUCED: dict[str, tuple[list[Edit], str]] = {
    "a marker that is left": (
        [backward_line("again: f32[5] @ reduce_grad('bias') = zerofx.reduce_grad.default(sum_1, -1, 0, 'dp')")],
        "again in backward: a marker is left; replace it by a reduction",
    ),
    "an unreduced gradient": (
        [("mine @ grad", "mm @ grad")],
        "mm in backward: the gradient of w passes 0 reductions; reduce it exactly once",
    ),
    "the reduced gradient of another parameter": (
        [("mine @ grad", "mean @ grad")],
        "mean in backward: the gradient of w passes 0 reductions; reduce it exactly once",
    ),
    "a gradient reduced twice": (
        [
            backward_line("more: f32[5] @ reduce_grad('bias') = c10d.all_reduce.default(mean, 'avg', 'dp')"),
            backward_line("twice: f32[5] @ reduce_grad('bias') = c10d.wait_tensor.default(more)"),
            ("mean @ grad", "twice @ grad"),
        ],
        "twice in backward: the gradient of bias passes 2 reductions; reduce it exactly once",
    ),
    "a sum for a mean": (
        [("sum_1, 'avg'", "sum_1, 'sum'")],
        f"total in backward: it is all_reduce('sum', 'dp'); bias needs {REDUCE}",
    ),
    "a reduction over another axis": (
        [("sum_1, 'avg', 'dp'", "sum_1, 'avg', 'tp'")],
        f"total in backward: it is all_reduce('avg', 'tp'); bias needs {REDUCE}",
    ),
    "a reduction over another number of ranks": (
        [
            ("'avg', 2, 'dp'", "'avg', 3, 'dp'"),
            *(
                (f"{name}: f32[3, 4] @ reduce_grad", f"{name}: f32[2, 4] @ reduce_grad")
                for name in ("scatter", "chunk")
            ),
            ("mine: f32[3, 4]", "mine: f32[2, 4]"),
        ],
        f"scatter in backward: it is reduce_scatter_tensor('avg', 3, 'dp'); w needs {SCATTER}",
    ),
    "an all-reduce of a sharded parameter's gradient": (
        [
            ("scatter: f32[3", "scatter: f32[6"),
            ("chunk: f32[3", "chunk: f32[6"),
            ("reduce_scatter_tensor.default(padding, 'avg', 2,", "all_reduce.default(padding, 'avg',"),
        ],
        f"scatter in backward: it is {REDUCE}; w needs {SCATTER}",
    ),
    "the padding of the last rank": (
        [("rows(5, 2)", "3")],
        f"mine in backward: the gradient of w has the shape [3, 4] on every rank; {CUT}",
    ),
    "a gradient that isn't padded": (
        [
            ("default(padding, 'avg'", "default(mm, 'avg'"),
            *(
                (f"{name}: f32[3, 4] @ reduce_grad", f"{name}: f32[2, 4] @ reduce_grad")
                for name in ("scatter", "chunk")
            ),
            ("mine: f32[3, 4]", "mine: f32[2, 4]"),
        ],
        "scatter in backward: it scatters 5 rows over 2 ranks; pad them to 6",
    ),
    "a gradient with too few rows": (
        [("mine: f32[3", "mine: f32[2"), ("0, 0, rows(5, 2)", "0, 1, rows(5, 2)")],
        f"mine in backward: the gradient of w has the shape [2, 4] on every rank; {CUT}",
    ),
}

WAITED: dict[str, tuple[list[Edit], str]] = {
    "a gather that is read": (
        [("slice.Tensor(wait, 0", "slice.Tensor(gather, 0")],
        "gather in forward: read reads it before it is complete; read the result of wait_tensor",
    ),
    "a reduction that is returned": (
        [("mean @ grad", "total @ grad")],
        "total in backward: output reads it before it is complete; read the result of wait_tensor",
    ),
}

ALLOWED: dict[str, tuple[str, list[Edit]]] = {
    "a program": (LOGICAL, []),
    "a pair": (PHYSICAL, []),
    "a cast of a reduced gradient": (
        LOGICAL,
        [line("low: bf16[5] = aten._to_copy.default(mean, dtype=bf16)"), ("mean @ grad", "low @ grad")],
    ),
    "a saved replica": (PHYSICAL, [("w @ saved", "bias @ saved")]),
    "a saved activation": (PHYSICAL, [("w @ saved", "addmm @ saved")]),
    "a gathered parameter that the user sees": (PHYSICAL, [("[addmm @ out,", "[addmm @ out, read @ out,")]),
    "an all-gather of the model's own in the backward": (
        PHYSICAL,
        [
            backward_line("all_mm: f32[10, 4] = c10d.all_gather_into_tensor.default(mm, 2, 'dp')"),
            backward_line("all_done: f32[10, 4] = c10d.wait_tensor.default(all_mm)"),
        ],
    ),
    "no gradient": (PHYSICAL, [("mine @ grad('w')", "None")]),
}
