"""Predicted steps against measured ones, with the constants that are committed: see tests/bench/fit_vtrain.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench import fit_vtrain, zero_speedup
from tests.published import rows
from zerofx.planning.shapes import FULL, SCHEDULES, Layouts, Shape
from zerofx.planning.software import MEGATRON
from zerofx.planning.transformer import foresee


def test_vtrains_steps() -> None:
    found = np.abs(fit_vtrain.errors(fit_vtrain.read()))
    assert len(found) == 103
    assert np.median(found) <= 0.035
    assert found.mean() <= 0.08


def test_steps_that_were_not_fitted() -> None:
    """Constants are fitted on models of up to 39e9 parameters; these have 175e9."""
    held_out = [steps for steps in fit_vtrain.read() if steps.parameters > fit_vtrain.HELD_OUT]
    found = np.abs(fit_vtrain.errors(held_out))
    assert len(found) == 21
    assert found.max() <= 0.055
    assert found.mean() <= 0.02


@pytest.mark.parametrize("left_out", [3.6e9, 18.4e9, 39.1e9])
def test_fitting_again_gives_the_constants_also_without_one_size(left_out: float) -> None:
    pytest.importorskip("scipy")
    seen = [steps for steps in fit_vtrain.read() if steps.parameters < fit_vtrain.HELD_OUT]
    traffic, call = fit_vtrain.fit(seen)
    assert (traffic, call) == pytest.approx((MEGATRON.traffic, MEGATRON.call), rel=0.01)
    without = fit_vtrain.fit([steps for steps in seen if steps.parameters != left_out])
    predicted = fit_vtrain.errors(
        [steps for steps in seen if steps.parameters == left_out], fit_vtrain.with_constants(without)
    )
    assert np.median(np.abs(predicted)) <= 0.06


def megatron_tflops(row: dict[str, str]) -> float:
    """Of a rank, as the table counts; the fastest of the micro-batches and interleavings that it does not print."""
    layers, hidden, heads, tp, pp, ranks, batch = (
        int(row[name]) for name in ("layers", "hidden", "heads", "tp", "pp", "gpus", "batch")
    )
    dp = ranks // (tp * pp)
    tried = [
        (micro, chunks)
        for micro in (1, 2, 4, 8, 16)
        for chunks in range(1, 9)
        if batch % (dp * micro) == 0 and (chunks == 1 or (pp > 1 and layers % (pp * chunks) == 0))
    ]
    micro, chunks = np.array(tried).T
    schedule = np.where(chunks > 1, SCHEDULES.index("interleaved-1f1b"), 0)
    layouts = Layouts(dp, tp, pp, 0, micro, batch // (dp * micro), FULL, schedule, chunks)
    found = foresee(Shape(layers, hidden, heads, 51_200, 2048), layouts, "a100-8x200g", MEGATRON, "fp16")
    measured = float(row["derived_iter_time_s"]) * float(row["tflops_per_gpu"])
    return measured / float(np.min(np.where(found.fits, found.step, np.inf)))


def test_megatrons_table_1() -> None:
    """Nothing is fitted to it, and its cluster has another network than the one that the constants come from."""
    errors = [megatron_tflops(row) / float(row["tflops_per_gpu"]) - 1 for row in rows("megatron2021_table1.csv")]
    assert len(errors) == 10
    assert np.mean(np.abs(errors)) <= 0.08
    assert max(map(abs, errors)) <= 0.16


def test_zero_is_three_to_five_times_as_fast_as_slicing_over_nodes() -> None:
    """The announcement's factor, for the four sizes of ZeRO's figure 2 between 40e9 and 100e9 parameters."""
    factors = [zero_speedup.zero(name).flops / zero_speedup.baseline(name).flops for name in zero_speedup.SHAPES]
    assert all(2.8 <= factor <= 5 for factor in factors)
    assert all(zero_speedup.baseline(name).tensor > 16 for name in zero_speedup.SHAPES)
    assert all(zero_speedup.zero(name).tensor <= 16 for name in zero_speedup.SHAPES)
    assert all(zero_speedup.zero(name).flops >= 30e12 for name in zero_speedup.SHAPES)


def test_a_ring_through_one_card_gives_the_five_tflops_that_zero_measured() -> None:
    """ZeRO, section 1: "about 5 Tflops per V100" for 40e9 parameters that are sliced over two DGX-2."""
    found = zero_speedup.baseline("40B", zero_speedup.ONE_CARD)
    assert found.tensor == 32
    assert found.flops == pytest.approx(5e12, rel=0.2)
