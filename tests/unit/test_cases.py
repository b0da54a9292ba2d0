"""Every case that a sharding library is known to have got wrong has a test here that fails with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.test_situations import SITUATIONS
from tests.situations.ranks import RANKS

TESTS = Path(__file__).parents[1]
CASES = {
    "an embedding tied to the head, of more rows than ranks divide": "TiedEmbeddingWithUnevenRows",
    "one layer used several times, each under checkpointing": "SharedLayerUnderCheckpoint",
    "a parameter that nothing uses, with accumulation": "UnusedParameter",
    "an output that the loss ignores": "OutputThatTheLossIgnores",
    "a tower that only some ranks run": "ImageOnSomeRanksOnly",
    "experts that see no token on some rank": "IdleExperts",
    "adapters beside frozen weights": "FrozenBaseWithAdapters",
    "frozen norms under checkpointing": "FrozenNormUnderCheckpoint",
    "a parameter without elements": "ParameterWithoutElements",
    "a parameter without dims": "ScalarParameter",
    "sizes that the ranks do not divide": "FewerRowsThanRanks",
    "a gradient larger than a bucket": "ParameterLargerThanABucket",
    "complex parameters": "ComplexParameter",
    "sparse gradients": "SparseGradient",
    "a codebook that the forward updates": "CodebookUpdatedInForward",
    "a buffer of frequencies that stays in fp32": "RotaryBuffer",
    "a float input that bf16 cannot tell apart": "FloatInputUnderAutocast",
    "a loss scale that falls after overflows and rises again": (
        "unit/test_scaling.py::test_every_sequence_of_seven_steps_is_the_rules",
        "distributed/test_loss_scaling.py::test_fp16_trains_to_the_loss_of_bf16",
        "distributed/test_loss_scaling.py::test_a_scheduler_waits_for_a_step_that_is_not_skipped",
    ),
    "the norm that gradients are clipped by": "ClippedGlobalNorm",
    "weight decay by parameter groups": "ParameterGroups",
    "the gradients of all micro-batches": (
        "AccumulatedMicroBatches",
        "distributed/test_autocast.py::test_reducing_in_bf16_halves_the_bytes",
    ),
    "the scale of gradients that micro-batches of a pipeline add up": (
        "distributed/test_pipelines.py::test_every_schedule_trains_as_one_process"
    ),
    "weights tied across stages of a pipeline, and in their checkpoint": (
        "distributed/test_pipelines.py::test_models_are_cut_without_naming_a_module",
        "distributed/test_checkpoints_parallel.py::test_a_pipeline_goes_on_in_other_stages_and_as_a_plain_model",
    ),
    "a tensor that a later stage than the next one reads": (
        "distributed/test_pipelines.py::test_four_ranks_train_as_one_process"
    ),
    "outputs in a dataclass": "DataclassOutput",
    "a gradient penalty": "GradientPenalty",
    "two backwards of one forward": "TwoBackwardsOfOneForward",
    "hooks of the user": "UserHooks",
    "a graph without a backward": "GraphWithoutBackward",
    "the masks of dropout": "Dropout",
    "names that look like those of wrappers": "NamesLikeWrappers",
    "frozen weights and buffers in a checkpoint that is loaded into another start": (
        "distributed/test_checkpoints.py::test_a_training_goes_on_over_other_ranks_stages_and_libraries",
        "distributed/test_checkpoints.py::test_each_rank_has_its_own_buffers_and_ignored_parameters_again",
    ),
    "parameters that the user writes to between steps": "ParametersClampedAfterStep",
    "steps, rate and loss scale of a training that goes on in new processes": (
        "distributed/test_resume.py::test_a_training_whose_ranks_are_killed_ends_as_if_nothing_had_been",
        "distributed/test_checkpoints.py::test_on_as_many_ranks_a_training_goes_on_to_the_bit",
        "distributed/test_loss_scaling.py::test_a_saved_training_goes_on_bit_for_bit",
    ),
    "gradients that the user reads": "GradientsReadByTheUser",
    "None, numbers and nested arguments": "NoneAndKeywordArguments",
    "a view of the output that is changed in place": "OutputViewChangedInPlace",
    "a region without autocast inside autocast": "FullPrecisionInsideAutocast",
}
"""The case, and its situation or tests."""


def named(found: str | tuple[str, ...]) -> Iterator[str]:
    yield from (found,) if isinstance(found, str) else found


@pytest.mark.parametrize("case", CASES)
def test_the_case_has_its_tests(case: str) -> None:
    situations = {kind.__name__ for kind in (*SITUATIONS, *RANKS)}
    for name in named(CASES[case]):
        if "::" not in name:
            assert name in situations
            continue
        file, _, test = name.partition("::")
        functions = [node for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert test in {function.name for function in functions}


def test_no_situation_is_without_a_case() -> None:
    known = {name for found in CASES.values() for name in named(found)}
    assert {kind.__name__ for kind in (*SITUATIONS, *RANKS)} <= known
    assert len(CASES) == 38
