"""The reference loop equals DistributedDataParallel, and the comparison finds what differs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from tests.models import Case, gpt, gpt2, mlp_odd, resnet
from tests.pool import Pool
from tests.training import MakeOptimizer, Trained, adamw, compare, reference, sgd, train


def train_with_ddp(builder: Callable[[], Case], make_optimizer: MakeOptimizer, steps: int) -> Trained:
    case = builder()
    model = nn.parallel.DistributedDataParallel(case.model, broadcast_buffers=False)
    trained = train(Case(model, case.batch, case.loss), make_optimizer, steps, dist.get_rank())
    strip = len("module.")
    named = ({key[strip:]: value for key, value in part.items()} for part in (trained.state, trained.grads))
    return Trained(*named, trained.losses)


@pytest.mark.parametrize("builder", [mlp_odd, gpt, gpt2, resnet])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_the_reference_is_what_ddp_trains(
    pool: Callable[[int], Pool], builder: Callable[[], Case], make_optimizer: MakeOptimizer
) -> None:
    if builder in (gpt2, resnet):
        pytest.importorskip("transformers")
    got = pool(2).run(train_with_ddp, builder, make_optimizer, 3)
    expected = reference(builder, make_optimizer, 3, world=2)
    assert compare(got[0].state, expected.state, rtol=1e-4) == {}
    assert compare(got[0].grads, expected.grads, rtol=1e-3) == {}
    assert expected.losses == pytest.approx([sum(pair) / 2 for pair in zip(got[0].losses, got[1].losses, strict=True)])


@pytest.mark.parametrize("builder", [mlp_odd, gpt])
def test_a_batch_depends_only_on_rank_and_step(builder: Callable[[], Case]) -> None:
    case = builder()
    assert compare(case.batch(1, 2), builder().batch(1, 2), rtol=0) == {}
    assert compare(case.batch(1, 2), case.batch(0, 2), rtol=0.1) != {}
    assert compare(case.batch(1, 2), case.batch(1, 1), rtol=0.1) != {}


def test_compare_lists_what_differs_worst_first() -> None:
    expected = {"same": torch.ones(2), "near": torch.ones(2), "far": torch.ones(2), "nan": torch.ones(2)}
    state = {"same": torch.ones(2), "near": torch.full((2,), 1.1), "far": torch.full((2,), 3.0)}
    state |= {"nan": torch.full((2,), math.nan), "extra": torch.ones(1)}
    found = compare(state, expected, rtol=1e-3)
    assert list(found) == ["extra", "nan", "far", "near"]
    assert found["near"] == pytest.approx(0.1, rel=1e-4)
    assert found["far"] == pytest.approx(2.0, rel=1e-4)
    assert found["nan"] == found["extra"] == math.inf
