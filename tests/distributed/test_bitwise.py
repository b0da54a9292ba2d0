"""Sharding changes no number: every stage is bitwise equal to DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.runs import DEFAULT, NONE, SOME, Builder, interpreted, run, run_ddp
from tests.models import gpt, gpt2, mlp_odd, resnet
from tests.pool import Pool

BUILDERS = (mlp_odd, gpt, gpt2, resnet)
QUICK = {
    *((builder, 3, NONE) for builder in BUILDERS),
    (mlp_odd, 0, NONE),
    (gpt, 0, NONE),
    (gpt2, 3, SOME),
    (resnet, 3, DEFAULT),
}
CASES = [
    pytest.param(
        *case,
        id=f"{case[0].__name__}-stage{case[1]}-persist{case[2]}",
        marks=() if case in QUICK else pytest.mark.full,
    )
    for case in ((b, s, p) for b in BUILDERS for s in (0, 3) for p in (NONE, SOME, DEFAULT))
]


@pytest.mark.parametrize(("builder", "stage", "persist_below"), CASES)
def test_parameters_and_gradients_equal_those_of_ddp(
    pool: Callable[[int], Pool], builder: Builder, stage: int, persist_below: int
) -> None:
    if builder in (gpt2, resnet):
        pytest.importorskip("transformers")
    setting = interpreted(builder, 2, stage, persist_below)
    ddp = run_ddp(pool, builder, setting.makers)
    for rank, ours in enumerate(run(pool, setting)):
        for optimizer, theirs in ddp[rank].items():
            mine = ours.trained[optimizer]
            assert mine.losses == theirs.losses
            for got, wanted in ((mine.state, theirs.state), (mine.grads, theirs.grads)):
                assert got.keys() == wanted.keys()
                assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
