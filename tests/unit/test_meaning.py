"""What the passes make of a program has the bits of the program's results, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx import Graph, Node

from tests.goldens import CASES, GOLDEN
from zerofx.config import STAGES, Config
from zerofx.manager import run
from zerofx.passes.bucket_all_gathers import BucketAllGathers
from zerofx.passes.bucket_reductions import BucketReductions
from zerofx.passes.cast_gradients import CastGradients
from zerofx.passes.insert_all_gather import InsertAllGather
from zerofx.passes.insert_reduce_scatter import InsertReduceScatter
from zerofx.passes.merge_reads import MergeReads
from zerofx.passes.release_after_use import ReleaseAfterUse
from zerofx.program import Program, output_tags
from zerofx.recipe import recipe
from zerofx.testing import Golden, apply, golden_id
from zerofx.testing.meaning import assert_same_bits, random_inputs, results, sharded

aten, zerofx = torch.ops.aten, torch.ops.zerofx
WORLDS = (2, 3, 4)
WHOLE = [path for path in CASES if path.parent.name == "choose_layout"]
TIED = [path for path in WHOLE if path.stem in ("two_uses", "three_uses")]
SEVERAL = GOLDEN / "choose_layout" / "several_parameters.txt"
SIZES = (1, 64, 2**10, 2**30)  # of a bucket: less than any tensor, two or three of them, about all, all
PHYSICAL = (InsertAllGather(), BucketAllGathers(), InsertReduceScatter(), BucketReductions())
LATER = [path for path in CASES if path.parent.name not in ("choose_layout", "fuse_optimizer")]


def sharded_program(path: Path, world: int) -> Program:
    """What choose_layout makes of its case over that many ranks."""
    golden = Golden.read(path).at(world)
    program = golden.program()
    apply(program, golden.step)
    return program


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("path", WHOLE, ids=golden_id)
def test_each_rank_gets_its_part_of_the_mean_of_whole_gradients(path: Path, world: int) -> None:
    whole, program = Golden.read(path).at(world).program(), sharded_program(path, world)
    inputs = random_inputs(whole)
    assert_same_bits(results(program, *inputs), sharded(results(whole, *inputs), program))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("path", WHOLE, ids=golden_id)
def test_later_passes_change_no_bit(path: Path, world: int) -> None:
    program = sharded_program(path, world)
    inputs = random_inputs(program)
    expected = results(program, *inputs)
    for step in (MergeReads(), ReleaseAfterUse(), *PHYSICAL):
        apply(program, step)
        assert_same_bits(results(program, *inputs), expected)


@pytest.mark.parametrize("bucket_bytes", SIZES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_recipe_of_a_stage_changes_no_bit_whatever_the_buckets_hold(
    stage: int, world: int, bucket_bytes: int
) -> None:
    first, *later = recipe(Config(stage=stage, persist_below=6, bucket_mb=bucket_bytes / 2**20))
    program = Golden.read(SEVERAL).at(world).program()
    apply(program, first)
    inputs = random_inputs(program)
    expected = results(program, *inputs)
    for step in later:
        apply(program, step)
        assert_same_bits(results(program, *inputs), expected)
    assert (collectives(program) < alone(program)) == (bucket_bytes > 1)


def collectives(program: Program) -> int:
    """Gathers and reductions that the program issues, a bucket counted once."""
    targets = [str(node.target) for node in program.graphs["joint"].nodes]
    return sum(("c10d" in target or "p2p" in target) and "wait" not in target for target in targets)


def alone(program: Program) -> int:
    """How many they would be without buckets."""
    return sum("wait_tensor" in str(node.target) for node in program.graphs["joint"].nodes)


@pytest.mark.parametrize("path", LATER, ids=golden_id)
def test_the_golden_program_has_the_results_of_the_one_above_it(path: Path) -> None:
    golden = Golden.read(path)
    program = golden.program()
    # Merging adds before it averages, which rounds otherwise, as does another dtype: compared where nothing is rounded.
    inputs = random_inputs(program, exact=isinstance(golden.step, (MergeReads, CastGradients)))
    expected = results(program, *inputs)
    run(program, [golden.step])
    assert_same_bits(results(program, *inputs), expected)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("path", TIED, ids=golden_id)
def test_merged_reads_round_as_one_rank_that_adds_its_gradients(path: Path, world: int) -> None:
    program = sharded_program(path, world)
    inputs = random_inputs(program)
    expected = results(program, *inputs)
    graph = program.graphs["joint"]
    reads = separate_reads(graph)
    assert markers(graph) == (reads, reads)
    apply(program, MergeReads())
    assert markers(graph) == (1, 1)
    assert_same_bits(results(program, *inputs), expected)


@pytest.mark.parametrize("world", WORLDS)
def test_a_cast_gradient_is_the_mean_of_what_each_rank_casts(world: int) -> None:
    whole, program = Golden.read(SEVERAL).at(world).program(), sharded_program(SEVERAL, world)
    inputs = random_inputs(whole)
    found = results(whole, *inputs)
    dtypes = {place: value.dtype for place, value in enumerate(found[0]) if _is_gradient(whole, place)}
    low = [[value.bfloat16() if place in dtypes else value for place, value in enumerate(rank)] for rank in found]
    expected = [
        [value.to(dtypes[place]) if place in dtypes else value for place, value in enumerate(rank)]
        for rank in sharded(low, program)
    ]
    for step in (MergeReads(), CastGradients("bf16"), *PHYSICAL):
        apply(program, step)
        if step.name != "merge-reads":
            assert_same_bits(results(program, *inputs), expected)


def _is_gradient(program: Program, place: int) -> bool:
    known = output_tags(program.graphs["joint"])[place]
    return known is not None and known.role == "grad"


def markers(graph: Graph) -> tuple[int, int]:
    reads, reductions = (
        graph.find_nodes(op="call_function", target=op.default) for op in (zerofx.unshard, zerofx.reduce_grad)
    )
    return len(reads), len(reductions)


def separate_reads(graph: Graph) -> int:
    """Gives each term of a gradient's sum its own reduce_grad, and as many users of the parameter their own unshard."""
    (read,) = graph.find_nodes(op="call_function", target=zerofx.unshard.default)
    (reduction,) = graph.find_nodes(op="call_function", target=zerofx.reduce_grad.default)
    terms = reduce_terms(reduction)
    for user in list(read.users)[1:terms]:
        with graph.inserting_before(user):
            user.replace_input_with(read, graph.node_copy(read, lambda node: node))
    return terms


def reduce_terms(reduction: Node) -> int:
    total = reduction.args[0]
    if total.target is not aten.add.Tensor:
        return 1
    with reduction.graph.inserting_before(reduction):
        left, right = (
            reduction.graph.node_copy(reduction, lambda node, t=t: t if node is total else node) for t in total.args
        )
        add = reduction.graph.call_function(aten.add.Tensor, (left, right))
    add.meta = {key: value for key, value in reduction.meta.items() if key != "zerofx"}
    reduction.replace_all_uses_with(add)
    for dead in (reduction, total):
        reduction.graph.erase_node(dead)
    return reduce_terms(left) + reduce_terms(right)
