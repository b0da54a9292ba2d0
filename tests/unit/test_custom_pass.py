"""The example's pass, tested as its author would: texts, bits, bytes, and the order in which it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import custom_pass
from examples.custom_pass import QuantizeAllGathers, error_bound, quantized
from zerofx.manager import PassOrderError
from zerofx.passes.bucket_all_gathers import BucketAllGathers
from zerofx.passes.insert_all_gather import InsertAllGather
from zerofx.passes.insert_reduce_scatter import InsertReduceScatter
from zerofx.passes.prefetch_all_gathers import PrefetchAllGathers
from zerofx.program import Invariant, Program
from zerofx.testing import (
    Golden,
    apply,
    assert_collectives,
    assert_same_meaning,
    chain,
    golden_files,
    golden_id,
    linear,
    traced,
)
from zerofx.testing.meaning import results
from zerofx.text import parse

FILES = golden_files(Path(__file__).parents[1] / "golden_custom")
ROWS, COLUMNS = 13, 17
X = torch.empty(4, 32, device="meta")


def physical(ranks: int, *more: object) -> Program:
    return apply(linear(ranks, ROWS, COLUMNS), InsertAllGather(), InsertReduceScatter(), *more)


@pytest.mark.parametrize("path", FILES, ids=golden_id)
def test_its_golden_files(path: Path, golden: Callable[..., Golden]) -> None:
    golden(path, custom_pass)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_reads_every_element_within_the_bound(ranks: int) -> None:
    text = f"""\
mesh(dp={ranks})
param('w', f32[{ROWS}, {COLUMNS}], dim=0)

def inference(w: f32[{-(-ROWS // ranks)}, {COLUMNS}] @ shard('w')):
    read: f32[{ROWS}, {COLUMNS}] @ unshard('w') = zerofx.unshard.default(w, [{ROWS}, {COLUMNS}], 0, rows(13, {ranks}), 'dp')
    y: f32[{ROWS}, {COLUMNS}] = aten.neg.default(read)
    return [y @ out]
"""  # noqa: E501
    program = parse(text)
    program.holds = {Invariant.MARKED, Invariant.MERGED}
    apply(program, InsertAllGather(), QuantizeAllGathers())
    weight = torch.randn(ROWS, COLUMNS) * torch.logspace(-20, 20, ROWS).unsqueeze(1)
    weight[5] = 0
    found = results(program, {"w": weight}, [])
    for (read,) in found:
        apart = (-read - weight).abs()
        assert bool((apart <= error_bound(weight) * (1 + 1e-5)).all()) and bool(apart.any())


def test_gradients_and_outputs_stay_near_those_of_exact_gathers() -> None:
    assert_same_meaning(physical, lambda ranks: physical(ranks, QuantizeAllGathers(columns=8)), ranks=4, atol=0.2)
    with pytest.raises(AssertionError, match="output 0 of rank 0"):
        assert_same_meaning(physical, lambda ranks: physical(ranks, QuantizeAllGathers(columns=8)), ranks=4)


def test_a_quarter_of_the_bytes_travels() -> None:
    assert_collectives(physical(2), joint=["all-gather w: f32 476", "reduce-scatter w: f32 476"], sent=952)
    packed = physical(2, QuantizeAllGathers(columns=8))
    assert_collectives(packed, joint=["all-gather w: i8 147", "reduce-scatter w: f32 476"])


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_buckets_and_prefetch_behind_it_change_no_bit(ahead: int) -> None:
    def before(ranks: int) -> Program:
        return apply(chain(ranks), InsertAllGather(), QuantizeAllGathers(columns=5), InsertReduceScatter())

    def after(ranks: int) -> Program:
        return apply(before(ranks), BucketAllGathers(), PrefetchAllGathers(ahead))

    assert_same_meaning(before, after)
    assert_collectives(after(2), joint=["all-gather a, b: i8 72", "all-gather bias: f32 12", *REDUCED])


REDUCED = ["reduce-scatter bias: f32 12", "reduce-scatter b: f32 80", "reduce-scatter a: f32 80"]


@pytest.mark.parametrize("stage", [1, 3])
def test_it_stands_in_the_recipe_of_a_model(stage: int) -> None:
    def make(passes: object) -> Callable[[int], Program]:
        return lambda ranks: traced(lambda: nn.Linear(32, 24), [X], ranks, passes=passes, stage=stage)

    assert_same_meaning(make(None), make(quantized), ranks=3, atol=0.2)
    gathers = ["all-gather weight: i8 576", "all-gather bias: f32 64"]
    assert_collectives(make(quantized)(3), forward=sorted(gathers)[::-1])


def test_its_order_is_refused_where_nothing_is_gathered_yet() -> None:
    with pytest.raises(PassOrderError, match="quantize-all-gathers needs GATHERED"):
        traced(lambda: nn.Linear(32, 24), [X], passes=lambda order: (order[0], QuantizeAllGathers(), *order[1:]))
