"""Where parameters are cut, how many rows each rank holds, and what that costs in padding."""

from __future__ import annotations

import pickle

import pytest
import torch

from zerofx.layout import Layout, ParamLayout, PerRank, chunk_rows, rows_at
from zerofx.passes.choose_layout import choose_dim, choose_layout

SIZES = [0, 1, 2, 3, 5, 8, 13, 64, 100, 101]
WORLDS = [1, 2, 3, 4, 7, 8, 16]


def chunks(size: int, parts: int) -> list[int]:
    """The rows of each of `parts` ranks: `torch.chunk` gives fewer chunks where the last ones would be empty."""
    held = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
    return held + [0] * (parts - len(held))


@pytest.mark.parametrize("parts", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_those_of_torch_chunk(size: int, parts: int) -> None:
    assert [rows_at(size, parts, rank) for rank in range(parts)] == chunks(size, parts)
    assert chunk_rows(size, parts) == max(chunks(size, parts))


@pytest.mark.parametrize("parts", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_per_rank_int_has_the_value_of_each_rank(size: int, parts: int) -> None:
    rows, pad = PerRank("rows", size, parts), PerRank("pad", size, parts)
    held = chunks(size, parts)
    assert (rows, pad) == (held[0], 0)
    assert [rows.at(rank) for rank in range(parts)] == held
    assert [rows.at(rank) + pad.at(rank) for rank in range(parts)] == [max(held)] * parts


def test_a_per_rank_int_prints_and_pickles_as_what_it_is() -> None:
    pad = pickle.loads(pickle.dumps(PerRank("pad", 13, 4)))
    assert (repr(pad), pad.at(3)) == ("pad(13, 4)", 3)
    assert [PerRank("pad", 13, 5).at(rank) for rank in range(5)] == [0, 0, 0, 0, 2]


@pytest.mark.parametrize(
    ("size", "world", "dim"),
    [
        ((), 2, None),
        ((1,), 2, None),
        ((1, 1), 2, None),
        ((0,), 2, None),
        ((4, 0), 2, None),
        ((8, 3), 2, 0),
        ((13, 7), 2, 0),
        ((8, 8), 3, 0),
        ((101, 32), 2, 0),
        ((9, 8), 2, 0),
        ((7, 8), 2, 1),
        ((3, 1000), 4, 1),
        ((3, 5), 2, 1),
        ((5, 3), 2, 0),
        ((3, 3), 2, 0),
        ((1, 64, 32), 2, 1),
        ((1, 3, 32), 2, 2),
        ((3, 3, 7), 4, 2),
        ((50257, 768), 8, 0),
        ((7, 13), 1, 0),
        ((1, 13), 1, 1),
        ((2, 3), 16, 1),
    ],
)
def test_the_first_dim_is_cut_unless_another_pads_much_less(size: tuple[int, ...], world: int, dim: int | None) -> None:
    assert choose_dim(size, world) == dim


def test_a_dim_that_tensor_parallel_ranks_cut_is_left_alone() -> None:
    assert choose_dim((8, 6), 2, taken=0) == 1
    assert choose_dim((8, 6), 2, taken=1) == 0
    assert choose_dim((8,), 2, taken=0) is None
    params = [ParamLayout(name, (8, 6), torch.float32, None) for name in ("a", "b", "c")]
    assert [p.dim for p in choose_layout(params, 2, 3, 0, {"a": 0, "b": None})] == [1, 0, 0]


def test_an_eighth_of_padding_is_borne_on_the_first_dim() -> None:
    assert [choose_dim((rows, 64), 8) for rows in (56, 50, 49, 15, 9)] == [0, 0, 1, 0, 1]


def param(*size: int, dim: int | None = None, dtype: torch.dtype = torch.float32) -> ParamLayout:
    return ParamLayout("w", size, dtype, dim)


@pytest.mark.parametrize(
    ("size", "stage", "persist_below", "dim"),
    [
        ((4, 5), 3, 20, 0),
        ((4, 5), 3, 21, None),
        ((4, 5), 3, 0, 0),
        ((4, 5), 0, 0, None),
        ((), 3, 0, None),
        ((0, 5), 3, 0, None),
    ],
)
def test_small_parameters_and_all_of_stage_0_stay_replicated(
    size: tuple[int, ...], stage: int, persist_below: int, dim: int | None
) -> None:
    (chosen,) = choose_layout([param(*size)], world=2, stage=stage, persist_below=persist_below)
    assert chosen == param(*size, dim=dim)


def test_what_else_is_known_of_a_parameter_stays() -> None:
    tied = ParamLayout("w", (4,), torch.bfloat16, None, requires_grad=False, tied=("head",))
    assert choose_layout([tied], 2, 3, 0)["w"] == ParamLayout("w", (4,), torch.bfloat16, 0, False, ("head",))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_stores_the_chunk_that_torch_cuts(world: int, dim: int) -> None:
    whole = torch.empty(13, 7)
    stored = [param(13, 7, dim=dim).local_size(world, rank) for rank in range(world)]
    parts = [tuple(chunk.shape) for chunk in whole.chunk(world, dim)]
    assert stored[: len(parts)] == parts
    assert all(size[dim] == 0 for size in stored[len(parts) :])


def test_a_replicated_parameter_is_stored_whole() -> None:
    assert param(13, 7).local_size(4, 3) == (13, 7)


@pytest.mark.parametrize(
    ("layout", "whole", "padded"),
    [
        (param(13, 7, dim=0), 364, 392),
        (param(13, 7, dim=1), 364, 416),
        (param(13, 7), 364, 364),
        (param(13, 7, dim=0, dtype=torch.bfloat16), 182, 196),
        (param(), 4, 4),
        (param(0, 7, dim=0), 0, 0),
    ],
)
def test_bytes_of_the_gathered_parameter_count_its_padding(layout: ParamLayout, whole: int, padded: int) -> None:
    assert (layout.whole_bytes, layout.padded_bytes(2)) == (whole, padded)


def test_a_parameter_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="the layout has no parameter 'v'"):
        Layout((param(2),))["v"]
