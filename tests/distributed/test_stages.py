"""All stages train to the same bits whatever the buckets hold, and issue as few collectives as the bytes need."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import ceil
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.fx import Interpreter, Node

import zerofx
from tests.architectures import llama, t5
from tests.models import Case, gpt, gpt2, mlp_odd, resnet
from tests.pool import Pool
from tests.training import Trained, adamw_default, sgd, train
from zerofx.inspection import Collective
from zerofx.textgraph import kind_of

WORLD, STEPS = 2, 3
STAGES = (0, 1, 2, 3)
SMALL, LARGE = 0.001, 25.0  # values of bucket_mb
MAKERS = (sgd, adamw_default)
Builder = Callable[[], Case]
BUILDERS = (mlp_odd, gpt, gpt2, resnet, llama, t5)
QUICK = {(gpt, 2), (gpt2, 3), (resnet, 3)}
QUICK_LARGE = {(t5, 3, LARGE)}


class Run(NamedTuple):
    """What one rank has after training.

    Results by optimizer; what its graphs say of collectives; how many it issued in all steps, by kind; and the bytes of
    its whole parameters.
    """

    trained: dict[str, Trained]
    rows: tuple[Collective, ...]
    issued: Counter[str]
    nbytes: int


class Counting(Interpreter):
    """Counts the collectives that graphs issue when they run."""

    issued: Counter[str]

    def run_node(self, node: Node) -> Any:
        if kind := kind_of(str(node.target).replace("_c10d_functional.", "c10d.")):
            self.issued[kind] += 1
        return super().run_node(node)


def train_rank(builder: Builder, stage: int, bucket_mb: float) -> Run:
    case = builder()
    start = {name: value.clone() for name, value in case.model.state_dict().items()}
    nbytes = sum(param.nbytes for param in case.model.parameters())
    issued: Counter[str] = Counter()
    trained: dict[str, Trained] = {}
    with (
        mock.patch("zerofx.backends.Interpreter", Counting),
        mock.patch.object(Counting, "issued", issued, create=True),
    ):
        zerofx.compile(case.model, stage=stage, persist_below=0, bucket_mb=bucket_mb, backend="interpreter")
        for make in MAKERS:
            case.model.load_state_dict(start)
            issued.clear()
            trained[make.__name__] = train(case, make, STEPS, dist.get_rank())
    return Run(trained, zerofx.inspect(case.model).collectives().rows, issued, nbytes)


@functools.cache
def runs(pool: Callable[[int], Pool], builder: Builder, stage: int, bucket_mb: float) -> list[Run]:
    """Every rank's run, made once."""
    if builder not in (mlp_odd, gpt):
        pytest.importorskip("transformers")
    return pool(WORLD).run(train_rank, builder, stage, bucket_mb, timeout=300)


def kinds(rows: tuple[Collective, ...]) -> Counter[tuple[str, str, str]]:
    """How many collectives there are of each kind and dtype in each half."""
    return Counter((row.part, row.kind, row.dtype) for row in rows)


def each(*sizes: float) -> pytest.MarkDecorator:
    """Every model, stage and size of bucket; some only with --full, for each is a training of its own."""
    cases = product(BUILDERS, STAGES, *([sizes] if sizes else []))
    names = ("builder", "stage", "bucket_mb") if sizes else ("builder", "stage")
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *case,
                id="-".join([case[0].__name__, *map(str, case[1:])]),
                marks=() if case[0] is mlp_odd or case[:2] in QUICK or case in QUICK_LARGE else pytest.mark.full,
            )
            for case in cases
        ],
    )


@each(SMALL, LARGE)
def test_stages_and_sizes_of_buckets_train_to_the_same_bits(
    pool: Callable[[int], Pool], builder: Builder, stage: int, bucket_mb: float
) -> None:
    first = runs(pool, builder, 0, LARGE)
    for ours, theirs in zip(runs(pool, builder, stage, bucket_mb), first, strict=True):
        for make in MAKERS:
            mine, wanted = ours.trained[make.__name__], theirs.trained[make.__name__]
            assert mine.losses == wanted.losses
            for got, expected in ((mine.state, wanted.state), (mine.grads, wanted.grads)):
                assert got.keys() == expected.keys()
                assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


@each(SMALL, LARGE)
def test_only_stage_3_gathers_in_the_backward(
    pool: Callable[[int], Pool], builder: Builder, stage: int, bucket_mb: float
) -> None:
    for run in runs(pool, builder, stage, bucket_mb):
        gathers = {row.part for row in run.rows if row.kind == "all_gather_into_tensor"}
        assert gathers == {0: set(), 1: {"forward"}, 2: {"forward"}, 3: {"forward", "backward"}}[stage]


@each(SMALL, LARGE)
def test_a_step_issues_what_the_graphs_say(
    pool: Callable[[int], Pool], builder: Builder, stage: int, bucket_mb: float
) -> None:
    for run in runs(pool, builder, stage, bucket_mb):
        said = Counter(row.kind for row in run.rows)
        assert run.issued == {kind: STEPS * count for kind, count in said.items()}


@each()
def test_a_bucket_larger_than_the_model_takes_one_collective_for_each_kind(
    pool: Callable[[int], Pool], builder: Builder, stage: int
) -> None:
    for run in runs(pool, builder, stage, LARGE):
        counts = kinds(run.rows)
        assert set(counts.values()) == {1}
        assert len(run.rows) <= ceil(run.nbytes / (LARGE * 2**20)) + len(counts)


@each()
def test_small_buckets_take_more_collectives_of_the_same_kinds_and_bytes(
    pool: Callable[[int], Pool], builder: Builder, stage: int
) -> None:
    for small, large in zip(runs(pool, builder, stage, SMALL), runs(pool, builder, stage, LARGE), strict=True):
        few, many = kinds(large.rows), kinds(small.rows)
        assert few.keys() == many.keys()
        assert sum(many.values()) > sum(few.values()) or builder is mlp_odd
        for key, count in many.items():  # the sum of two buckets that follow one another is larger than the cap
            sent = sum(row.bytes_sent for row in small.rows if (row.part, row.kind, row.dtype) == key)
            whole = sent if "all_reduce" in key[1] else sent * WORLD / (WORLD - 1)
            assert count <= 2 * whole / (SMALL * 2**20) + 1
        assert sum(row.bytes_sent for row in small.rows) == sum(row.bytes_sent for row in large.rows)
