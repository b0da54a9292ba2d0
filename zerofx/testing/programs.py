"""Small programs to try a pass on, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zerofx import _torch
from zerofx.config import Config, ModelError, Rewrite
from zerofx.manager import Pass, run
from zerofx.passes.choose_layout import ChooseLayout
from zerofx.passes.merge_reads import MergeReads
from zerofx.program import Program
from zerofx.text import parse
from zerofx.trace import trace
from zerofx.unfit import untraced

DTYPES = ("f64", "f32", "bf16", "f16")
LINEAR = """\
mesh(dp={ranks})
param('w', {dtype}[{rows}, {columns}], dim=None)

def joint(w: {dtype}[{rows}, {columns}] @ param('w'), x: {dtype}[3, {columns}], tangent: {dtype}[3, {rows}] @ tangent):
    t: {dtype}[{columns}, {rows}](1, {columns}) = aten.t.default(w)
    y: {dtype}[3, {rows}] = aten.mm.default(x, t)
    x_grad: {dtype}[3, {columns}] = aten.mm.default(tangent, w)
    t_1: {dtype}[{rows}, 3](1, {rows}) = aten.t.default(tangent)
    w_grad: {dtype}[{rows}, {columns}] = aten.mm.default(t_1, x)
    return [y @ out, w_grad @ grad('w'), x_grad]
"""
CHAIN = """\
mesh(dp={ranks})
param('a', f32[{width}, 5], dim=None)
param('b', f32[5, {width}], dim=None)
param('bias', f32[5], dim=None)

def joint(a: f32[{width}, 5] @ param('a'), b: f32[5, {width}] @ param('b'), bias: f32[5] @ param('bias'), \
x: f32[3, 5], tangent: f32[3, 5] @ tangent):
    a_t: f32[5, {width}](1, 5) = aten.t.default(a)
    h: f32[3, {width}] = aten.mm.default(x, a_t)
    b_t: f32[{width}, 5](1, {width}) = aten.t.default(b)
    y: f32[3, 5] = aten.addmm.default(bias, h, b_t)
    bias_grad: f32[5] = aten.sum.dim_IntList(tangent, [0])
    tangent_t: f32[5, 3](1, 5) = aten.t.default(tangent)
    b_grad: f32[5, {width}] = aten.mm.default(tangent_t, h)
    h_grad: f32[3, {width}] = aten.mm.default(tangent, b)
    h_grad_t: f32[{width}, 3](1, {width}) = aten.t.default(h_grad)
    a_grad: f32[{width}, 5] = aten.mm.default(h_grad_t, x)
    return [y @ out, a_grad @ grad('a'), b_grad @ grad('b'), bias_grad @ grad('bias'), None]
"""
TIED = """\
mesh(dp={ranks})
param('embed', f32[{rows}, 5], dim=None)

def joint(w: f32[{rows}, 5] @ param('embed'), ids: i64[6], tangent: f32[6, {rows}] @ tangent):
    h: f32[6, 5] = aten.embedding.default(w, ids)
    t: f32[5, {rows}](1, 5) = aten.t.default(w)
    y: f32[6, {rows}] = aten.mm.default(h, t)
    tangent_t: f32[{rows}, 6](1, {rows}) = aten.t.default(tangent)
    head_grad: f32[{rows}, 5] = aten.mm.default(tangent_t, h)
    h_grad: f32[6, 5] = aten.mm.default(tangent, w)
    embed_grad: f32[{rows}, 5] = aten.embedding_dense_backward.default(h_grad, ids, {rows}, -1, False)
    total: f32[{rows}, 5] = aten.add.Tensor(head_grad, embed_grad)
    return [y @ out, total @ grad('embed'), None]
"""


def linear(ranks: int = 2, rows: int = 13, columns: int = 7, dtype: str = "f32", *, whole: bool = False) -> Program:
    """`y = x @ w.T` and its backward, at the logical level: `w` is cut on dim 0, or `whole`.

    Neither 13 rows nor 7 columns divide by 2, 3 or 4 ranks, so that passes have padding to take care of. A weight with
    one dim that divides is cut on that, as `choose-layout` does. Raises ValueError for sizes below 1.
    """
    _check(ranks=ranks, rows=rows, columns=columns)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: give one of {', '.join(DTYPES)}")
    return _made(LINEAR.format(ranks=ranks, rows=rows, columns=columns, dtype=dtype), whole)


def chain(ranks: int = 2, width: int = 7, *, whole: bool = False) -> Program:
    """`y = (x @ a.T) @ b.T + bias` and its backward: three parameters, which can share buckets."""
    _check(ranks=ranks, width=width)
    return _made(CHAIN.format(ranks=ranks, width=width), whole)


def tied(ranks: int = 2, rows: int = 7, *, whole: bool = False) -> Program:
    """An embedding and a head that share one weight, whose gradient is a sum."""
    _check(ranks=ranks, rows=rows)
    return _made(TIED.format(ranks=ranks, rows=rows), whole)


def traced(
    model_fn: Callable[[], nn.Module],
    example_inputs: Sequence[Any],
    ranks: int = 2,
    *,
    passes: Rewrite | None = None,
    loss_fn: Callable[..., Any] | None = None,
    backend: str = "nccl",
    **options: Any,
) -> Program:
    """The program that a compiled model runs, forward and backward, behind the default passes or those of `passes`.

    Nothing is allocated and no process group is needed; all parameters are cut unless `persist_below` says otherwise.
    `options` are those of zerofx.compile: `stage`, `bucket_mb`, `prefetch`, `reduce_dtype` and so on. `backend` is that
    of the process group. Raises what a pass or a check raises, TypeError for a model in place of a function that makes
    one, and ModelError where `example_inputs` do not fit the model.
    """
    _check(ranks=ranks)
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        given = type(model_fn).__name__
        raise TypeError(f"traced takes a function that makes the model, not a {given}: pass lambda: Model()")
    if not isinstance(example_inputs, (list, tuple)):
        given = type(example_inputs).__name__
        raise TypeError(f"traced takes a list of the model's inputs, not a {given}: pass [x] for one tensor")
    config = Config(passes=passes, **{"persist_below": 0} | options)
    try:
        with _torch.quiet_tracing():
            return trace(model_fn, example_inputs, config, ranks, backend, loss_fn=loss_fn)
    except Exception as error:
        found = _torch.backend_error(error)
        if not _torch.is_tracing_error(found):
            raise found from None
        remedy = "give example_inputs that the model, or loss_fn, takes, and code that is one graph"
        raise ModelError(f"the model cannot be traced: {untraced(found)}; {remedy}") from None


def apply(program: Program, *steps: Pass) -> Program:
    """Runs passes on a program, each with the checks of the invariants that hold; returns the program."""
    for step in steps:
        if missing := step.requires - program.holds:
            names = ", ".join(sorted(invariant.name for invariant in missing))
            raise ValueError(f"{step.name} requires {names}, which the program does not keep: apply what ensures it")
        program.level = step.level
        run(program, [step])
    return program


def _check(**sizes: object) -> None:
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is {size!r}: give an int, 1 or more")


def _made(text: str, whole: bool) -> Program:
    program = parse(text)
    return program if whole else apply(program, ChooseLayout(stage=3, persist_below=0), MergeReads())
