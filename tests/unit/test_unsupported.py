"""What other libraries have is refused in one sentence: by the argument, the mesh dimension or the wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

import zerofx
from zerofx.api import TAKEN
from zerofx.config import ConfigError
from zerofx.unsupported import (
    ARGUMENTS,
    STEP_ARGUMENTS,
    refuse_arguments,
    refuse_dimensions,
    refuse_stages,
    wrapper_of,
)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_other_libraries_are_named_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^zerofx\.compile\({name}=\.\.\.\) is [^\n]+: [^\n]+$"):
        refuse_arguments("zerofx.compile", [name], TAKEN, ARGUMENTS)
    assert name not in TAKEN


@pytest.mark.parametrize("name", STEP_ARGUMENTS)
def test_arguments_of_steps_elsewhere_are_named_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^zerofx\.train_step\({name}=\.\.\.\) is [^\n]+: pass [^\n]+$"):
        refuse_arguments("zerofx.train_step", [name], TAKEN, STEP_ARGUMENTS)
    assert name not in inspect.signature(zerofx.train_step).parameters


@pytest.mark.parametrize("function", [fully_shard, FullyShardedDataParallel.__init__])
def test_all_arguments_of_fsdp_are_known(function: Callable[..., object]) -> None:
    known = {"self", "module", *TAKEN, *ARGUMENTS}
    assert set(inspect.signature(function).parameters) <= known


@pytest.mark.parametrize(("given", "close"), [("bucket_size", "bucket_mb"), ("stge", "stage"), ("zzz", "")])
def test_an_unknown_argument_is_answered_with_the_closest(given: str, close: str) -> None:
    with pytest.raises(ConfigError, match=f"takes no argument '{given}', only stage, .*: the closest one is '{close}"):
        refuse_arguments("zerofx.compile", [given], TAKEN, ARGUMENTS)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp_replicate": 2, "dp_shard": 2}, "'dp_replicate', 'dp_shard' for hybrid sharding"),
        ({"dp": 2, "dp_shard": 2}, "'dp', 'dp_shard' for hybrid sharding"),
        ({"dp": 2, "cp": 2}, "'cp' for context parallelism"),
        ({"ep": 2, "dp": 2}, "'ep' for expert parallelism"),
    ],
)
def test_dimensions_of_a_mesh_ask_for_features(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_dimensions(list(sizes), list(sizes.values()))


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 4, "cp": 1}, {"dp_replicate": 1, "dp": 4}])
def test_dimensions_of_one_rank_ask_for_nothing(sizes: dict[str, int]) -> None:
    refuse_dimensions(list(sizes), list(sizes.values()))


def test_one_stage_is_no_stages_per_module() -> None:
    for stage in (3, "3", None):
        refuse_stages(stage)
    with pytest.raises(ConfigError, match="given a dict, as for stages per module"):
        refuse_stages({"layers": 2})


def test_wrappers_are_known_by_class_and_library() -> None:
    assert wrapper_of(FullyShardedDataParallel) == "FullyShardedDataParallel"
    assert wrapper_of(type("FSDPLinear", (FSDPModule, nn.Linear), {})) == "FSDPModule"
    assert wrapper_of(type("DeepSpeedEngine", (nn.Module,), {})) is None
