"""The recipe is a valid order of passes that each have one file, one name and one golden directory."""

from __future__ import annotations

import importlib
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import CASES, GOLDEN
from zerofx import passes
from zerofx.config import STAGES, Config, ConfigError
from zerofx.manager import validate
from zerofx.passes.release_after_use import ReleaseAfterUse
from zerofx.program import Level
from zerofx.recipe import passes_of, recipe

BEFORE_SHARDING = "split_stages"
"""What cuts a whole forward, of which no program has been made yet; see tests/unit/test_split_stages.py."""
FILES = sorted(
    path.stem for path in Path(passes.__file__).parent.glob("*.py") if path.stem not in ("__init__", BEFORE_SHARDING)
)


def names(stage: int, backend: str = "gloo") -> list[str]:
    return [step.name for step in recipe(Config(stage=stage), backend)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_recipe_of_each_stage_is_a_valid_order(stage: int) -> None:
    validate(recipe(Config(stage=stage), "gloo"))
    validate(recipe(Config(stage=stage), "nccl"))


def test_options_reach_the_passes() -> None:
    first = recipe(Config(stage=3, persist_below=7))[0]
    assert (first.name, first.stage, first.persist_below) == ("choose-layout", 3, 7)


def test_the_size_of_a_bucket_reaches_both_passes() -> None:
    steps = recipe(Config(stage=3, bucket_mb=0.5))
    assert [step.bucket_bytes for step in steps if step.name.startswith("bucket-")] == [2**19, 2**19]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_cast_where_asked(stage: int) -> None:
    steps = recipe(Config(stage=stage, reduce_dtype="fp16"))
    validate(steps)
    (cast,) = [step for step in steps if step.name == "cast-gradients"]
    assert cast.dtype == "f16" and "cast-gradients" not in names(stage)


def test_only_gloo_has_point_to_point_messages() -> None:
    assert names(3) == [*names(3, "nccl"), "use-point-to-point"]
    assert names(3)[-1] == "use-point-to-point"


def test_stage_3_releases_and_stages_1_and_2_keep() -> None:
    own = {3: {"release-after-use"}, 2: {"keep-gathered"}, 1: {"keep-gathered"}, 0: set()}
    assert {stage: set(names(stage)) - set(names(0)) for stage in STAGES} == own
    assert all([name for name in names(stage) if name not in own[stage]] == names(0) for stage in STAGES)


def test_every_file_is_a_pass_of_some_recipe() -> None:
    used = {name for stage in STAGES for backend in ("gloo", "nccl") for name in names(stage, backend)}
    used |= {step.name for step in recipe(Config(reduce_dtype="bf16"))}
    assert used == {file.replace("_", "-") for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_a_pass_has_the_name_of_its_file(file: str) -> None:
    module = importlib.import_module(f"zerofx.passes.{file}")
    (kind,) = [value for value in vars(module).values() if hasattr(value, "requires") and isinstance(value, type)]
    assert kind.name == file.replace("_", "-")
    assert kind.__name__ == "".join(word.title() for word in file.split("_"))
    assert isinstance(kind.level, Level) and kind.numerics in ("same", "changes")
    assert is_dataclass(kind) and kind() == kind() and hash(kind()) == hash(kind())
    assert module.__doc__.count("\n") == 0 and kind.__doc__


def test_every_pass_has_golden_cases_under_its_name() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == FILES
    assert {path.parent.name for path in CASES} == set(FILES)


@pytest.mark.parametrize("made", [None, (ReleaseAfterUse,), (3,)])
def test_what_is_no_tuple_of_passes_is_refused(made: Any) -> None:
    with pytest.raises(ConfigError, match="passes"):
        passes_of(Config(passes=lambda order: made), "gloo")
