"""What the mpus of all ranks say is one grid of data-parallel and model-parallel groups, or one sentence about it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from zerofx.mesh import Axis, ModelParallel
from zerofx.mpu import DATA, MODEL, PIPELINE, TENSOR, Said, disagreement

Groups = Mapping[str, list[tuple[int, ...]]]

GRID: Groups = {DATA: [(0, 2), (1, 3)], MODEL: [(0, 1), (2, 3)]}
CUBE: Groups = {
    DATA: [(0, 2), (1, 3), (4, 6), (5, 7)],
    TENSOR: [(0, 1), (2, 3), (4, 5), (6, 7)],
    PIPELINE: [(0, 4), (1, 5), (2, 6), (3, 7)],
    MODEL: [(0, 1, 4, 5), (2, 3, 6, 7)],
}


def told(groups: Groups, **changes: tuple[int, str, tuple[int, ...]]) -> list[Said]:
    """What each rank says when groups are these, but for single changes: the rank, the kind, the ranks it names."""
    world = 1 + max(rank for group in groups[DATA] for rank in group)
    said = [{kind: next(g for g in of if rank in g) for kind, of in groups.items()} for rank in range(world)]
    for rank, kind, ranks in changes.values():
        said[rank][kind] = ranks
    return said


def without(kind: str) -> Groups:
    return {each: groups for each, groups in CUBE.items() if each != kind}


@pytest.mark.parametrize(
    "groups",
    [
        GRID,
        CUBE,
        without(MODEL),
        {DATA: [(0,), (1,)], MODEL: [(0, 1)]},
        GRID | {PIPELINE: GRID[MODEL]},
        GRID | {PIPELINE: [(0,), (1,), (2,), (3,)]},
    ],
)
def test_a_grid_is_right(groups: Groups) -> None:
    assert disagreement(told(groups)) is None


@pytest.mark.parametrize(
    ("groups", "changes", "words"),
    [
        (GRID, {"a": (1, MODEL, (1, 2))}, "the group of ranks [0, 1] on rank 0, and of ranks [1, 2] on"),
        ({DATA: [(0, 1), (2, 3)], MODEL: [(0, 1), (2, 3)]}, {}, "model_parallel_group() holds ranks 0 and 1"),
        ({DATA: [(0, 3), (1, 2)], MODEL: [(0, 1), (2, 3)]}, {}, "data_parallel_group() holds ranks 0 and 3"),
        (CUBE | {PIPELINE: [(r,) for r in range(8)]}, {}, "pipeline_model_parallel_group() of ranks [0] do"),
        (without(PIPELINE), {}, "get_tensor_model_parallel_group() of ranks [0, 1] do not make up"),
        ({DATA: [(0, 1), (2, 3)], MODEL: [(r,) for r in range(4)]}, {}, "2 ranks and mpu.get_model_parallel_group()"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_named(
    groups: Groups, changes: dict[str, tuple[int, str, tuple[int, ...]]], words: str
) -> None:
    assert words in (disagreement(told(groups, **changes)) or "nothing")


def test_a_function_on_some_ranks_only_is_named() -> None:
    said = told(CUBE)
    del said[3][PIPELINE]
    found = disagreement(said)
    assert found == (
        "mpu.get_pipeline_model_parallel_group() is there on some ranks and not on rank 3: give every rank the same mpu"
    )


def test_axes_of_one_rank_need_no_group() -> None:
    assert ModelParallel().axes == ()
    tensor, pipeline = Axis("tp", 2, "3"), Axis("pp", 2, "5")
    assert ModelParallel(tensor).axes == (tensor,)
    assert ModelParallel(tensor, pipeline).axes == (tensor, pipeline)
