"""The search finds what trying everything finds, and says what does not fit."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

import zerofx
from tests.planned_models import MODELS
from zerofx.planning.hardware import H100
from zerofx.planning.presets import preset
from zerofx.planning.search import layouts_of, pareto, search
from zerofx.planning.shapes import RECOMPUTE, Layouts, Shape
from zerofx.planning.transformer import foresee

LLAMA, GPT = preset("llama-3-8b").shape, preset("gpt-100b").shape


def test_ten_thousand_layouts_take_less_than_ten_seconds() -> None:
    began = time.perf_counter()
    shape = replace(preset("gpt-1t").shape, layers=120, heads=192, head_width=None, hidden=24_576)
    found = search(shape, 3072, 12_288, "h100-8x400g")
    assert len(found.forecast.layouts) >= 10_000
    assert time.perf_counter() - began <= 10


@pytest.mark.parametrize(("shape", "world", "batch"), [(LLAMA, 8, 64), (GPT, 64, 512), (GPT, 1000, 2000)])
def test_the_front_is_what_comparing_all_pairs_leaves(shape: Shape, world: int, batch: int) -> None:
    found = search(shape, world, batch, "h100-8x400g")
    step, peak, fits = found.forecast.step, found.forecast.peak, found.forecast.fits
    beaten = (
        (step[:, None] >= step) & (peak[:, None] >= peak) & ((step[:, None] > step) | (peak[:, None] > peak)) & fits
    ).any(1)
    expected = {(step[i], peak[i]) for i in np.flatnonzero(fits & ~beaten)}
    assert {(step[i], peak[i]) for i in found.front} == expected
    assert list(step[list(found.front)]) == sorted(step[list(found.front)])
    assert found.best == found.front[0] and step[found.best] == step[fits].min()


def test_layouts_use_all_ranks_and_sequences_once() -> None:
    layouts = layouts_of(GPT, 64, 512, H100)
    assert set(layouts.world) == {64}
    assert set(layouts.dp * layouts.microbatch * layouts.microbatches) == {512}
    assert set(GPT.heads % layouts.tp) == {0} == set(GPT.layers % layouts.pp)
    assert layouts.tp.max() == 8
    assert len({tuple(row.items()) for row in layouts.rows()}) == len(layouts)


def test_many_layouts_at_once_are_as_each_alone() -> None:
    layouts = layouts_of(GPT, 64, 64, H100)
    together = foresee(GPT, layouts, H100)
    for place in range(0, len(layouts), 97):
        alone = foresee(GPT, layouts[[place]], H100)
        assert alone.step[0] == pytest.approx(together.step[place], rel=1e-12)
        assert alone.peak[0] == pytest.approx(together.peak[place], rel=1e-12)


def test_more_recomputation_takes_time_and_less_memory_and_higher_stages_less_memory() -> None:
    by_recompute = foresee(GPT, Layouts(64, recompute=range(3)), H100)
    assert list(by_recompute.peak) == sorted(by_recompute.peak, reverse=True)
    assert list(by_recompute.step) == sorted(by_recompute.step)
    by_stage = foresee(GPT, Layouts(64, stage=range(4)), H100)
    assert list(by_stage.peak) == sorted(by_stage.peak, reverse=True)
    assert len(RECOMPUTE) == 3


def test_what_does_not_fit_is_said_with_what_is_missing() -> None:
    small = replace(H100, memory_bytes=2_000_000_000)
    found = search(GPT, 8, 8, small)
    assert not found.front and found.rows() == []
    least = found.forecast.peak.min() / 1e9
    with pytest.raises(
        ValueError, match=rf"fits into 2.0 GB a rank: the least takes {least:.1f} GB, {least - 2:.1f} GB too"
    ):
        _ = found.best


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="no layout divides 7 ranks and 5 sequences"):
        search(GPT, 7, 5, H100)
    with pytest.raises(ValueError, match="world=8 and batch=0 are not possible: give numbers of 1 or more"):
        search(GPT, 8, 0, H100)
    with pytest.raises(
        ValueError, match=r"recompute=.*some.* is not possible: give some of 'none', 'selective', 'full'"
    ):
        search(GPT, 8, 8, H100, recompute=("some",))
    with pytest.raises(ValueError, match=r"stages=.*4.* is not possible: give some of 0, 1, 2, 3"):
        search(GPT, 8, 8, H100, stages=(4,))


def test_rows_name_what_they_say() -> None:
    found = pareto(foresee(LLAMA, Layouts(8, stage=3, microbatch=[1, 2]), H100))
    first = found.rows()[0]
    assert first["stage"] == 3 and first["recompute"] == "none" and first["schedule"] == "1f1b"
    assert first["seconds"] == found.forecast.step[found.best]
    assert 0 < first["mfu"] < 1


@pytest.mark.parametrize(("name", "cut"), [pytest.param("mlp", True, marks=pytest.mark.full), ("images", False)])
def test_any_model_is_searched_and_its_layouts_are_as_a_plan_of_each(name: str, cut: bool) -> None:
    model, batch = MODELS[name].model, MODELS[name].batch()
    found = zerofx.plan(model, batch, world=4, search=True, precision="fp32", hardware="cpu")
    layouts = found.forecast.layouts
    assert bool(layouts.recompute.any()) is cut  # the images' forward needs all of its layers
    for stage, count in ((1, 2), (3, 4)):
        (place, *_) = np.flatnonzero(
            (layouts.dp == 4) & (layouts.stage == stage) & (layouts.microbatches == count) & (layouts.recompute == 0)
        )
        told = zerofx.plan(
            model, batch, world=4, stage=stage, microbatches=count, precision="fp32", hardware="cpu", persist_below=0
        )
        assert found.forecast.step[place] == pytest.approx(told.seconds, rel=0.25)
        assert found.forecast.peak[place] == pytest.approx(told.peak, rel=0.25)
    assert found.front
