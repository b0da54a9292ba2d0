"""Fits two constants to vTrain's measured steps: `python -m tests.bench.fit_vtrain`; seconds, and no GPU.

Fitted are what Megatron's kernels move beside the bytes that are counted, and what each op takes beside its launch, on
the steps of models of up to 39e9 parameters whose tensor-parallel ranks are in one node; those of 175e9 are held
out, and then each size in turn. All else comes from data sheets and others' measurements, as the hardware file says. A
Cauchy loss keeps a few steps from deciding that take up to twice their neighbours' time. What it prints stands in
zerofx/planning/software.py.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerofx.planning.shapes import FULL, Layouts, Shape
from zerofx.planning.software import MEGATRON, Software
from zerofx.planning.transformer import foresee

SOURCE = Path(__file__).parents[1] / "published" / "vtrain_multi_a100.csv"
CLUSTER, VOCABULARY, WIDEST = "a100-4x200g", 51_200, 8
HELD_OUT = 100e9  # parameters
SCALE = 0.02  # of the Cauchy loss: relative errors beyond it count less and less


@dataclass(frozen=True)
class Steps:
    """Measured steps of one shape: layouts, seconds."""

    parameters: float
    shape: Shape
    layouts: Layouts
    seconds: Any


def read(widest: int = WIDEST) -> list[Steps]:
    """The measured steps with at most `widest` tensor-parallel ranks, one entry a shape."""
    with SOURCE.open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["tensor parallelism"]) <= widest]
    sizes = dict.fromkeys(row["Parameters (billion)"] for row in rows)
    return [_steps([row for row in rows if row["Parameters (billion)"] == size]) for size in sizes]


def _steps(rows: list[dict[str, str]]) -> Steps:
    def column(name: str) -> Any:
        return np.array([int(row[name]) for row in rows])

    layers, hidden, heads, sequence = (
        int(rows[0][name]) for name in ("# layers", "hidden size", "attention heads", "sequence length")
    )
    dp, micro = column("data parallelism"), column("micro batch")
    layouts = Layouts(
        dp=dp,
        tp=column("tensor parallelism"),
        pp=column("pipeline parallelism"),
        microbatch=micro,
        microbatches=column("global batch") // (dp * micro),
        recompute=FULL,
    )
    seconds = np.array([float(row["iteration time (ms)"]) / 1e3 for row in rows])
    shape = Shape(layers, hidden, heads, VOCABULARY, sequence)
    return Steps(float(rows[0]["Parameters (billion)"]) * 1e9, shape, layouts, seconds)


def errors(steps: list[Steps], software: Software = MEGATRON) -> Any:
    """Predicted over measured seconds, less 1."""
    found = [foresee(one.shape, one.layouts, CLUSTER, software, "fp16").step / one.seconds - 1 for one in steps]
    return np.concatenate(found)


def with_constants(values: Any) -> Software:
    traffic, call = values
    return replace(MEGATRON, traffic=traffic, call=call)


def fit(steps: list[Steps]) -> Any:
    """Traffic, and seconds of a call."""
    from scipy.optimize import least_squares

    def off(logarithms: Any) -> Any:
        return np.log1p(errors(steps, with_constants(np.exp(logarithms))))

    return np.exp(least_squares(off, np.log([1.3, 10e-6]), loss="cauchy", f_scale=SCALE).x)


def report(name: str, found: Any) -> str:
    size = np.abs(found) * 100
    middle, mean, most = np.median(size), size.mean(), size.max()
    return f"{name}: {len(size)} steps, error median {middle:.2f} %, mean {mean:.2f} %, at most {most:.1f} %"


def main() -> None:
    steps = read()
    seen = [one for one in steps if one.parameters < HELD_OUT]
    values = fit(seen)
    fitted = with_constants(values)
    print(f"traffic {values[0]:.3f}, call {values[1] * 1e6:.1f} us")
    print(report("fitted", errors(seen, fitted)))
    print(report("held out", errors([one for one in steps if one not in seen], fitted)))
    print(report("all, with the committed constants", errors(steps)))
    for one in seen:
        rest = fit([other for other in seen if other is not one])
        print(report(f"fitted without {one.parameters / 1e9:g}e9, on it", errors([one], with_constants(rest))))


if __name__ == "__main__":
    main()
