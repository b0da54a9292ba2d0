"""Architectures of transformers train on several ranks as in one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.architectures import ARCHITECTURES
from tests.pool import Pool
from tests.training import MakeOptimizer, Trained, adamw, compare, difference, reference, sgd, train

STEPS = 3
RTOL = 1e-5
OPTIMIZERS = (sgd, adamw)
QUICK = {
    "gpt2": 3,
    "llama": 3,
    "lora_llama": 2,
    "mistral": 1,
    "qwen3": 2,
    "gpt_neox": 1,
    "opt": 3,
    "bert": 2,
    "t5": 3,
    "vit": 1,
    "resnet": 3,
    "convnext": 2,
}
"""The stage at which each is tested when not all are."""


def train_rank(name: str, stage: int, backend: str) -> dict[str, Trained]:
    """Trains with each optimizer in turn on one compiled model."""
    case = ARCHITECTURES[name]()
    start = {name: value.clone() for name, value in case.model.state_dict().items()}
    zerofx.compile(case.model, stage=stage, persist_below=0, backend=backend)
    trained: dict[str, Trained] = {}
    for make in OPTIMIZERS:
        case.model.load_state_dict(start)
        trained[make.__name__] = train(case, make, STEPS, dist.get_rank())
    return trained


@functools.cache
def expected_of(name: str, make: MakeOptimizer, world: int, backend: str) -> Trained:
    """In eager, or as torch.compile alone has it: on Inductor a rounding opens or shuts a ReLU at another element."""
    if backend == "inductor":
        return reference(ARCHITECTURES[name], make, STEPS, world, wrap=torch.compile)
    return reference(ARCHITECTURES[name], make, STEPS, world)


def without_gradient(expected: Trained) -> set[str]:
    """Parameters whose gradients are zero in theory, such as a key's bias: Inductor rounds them in its own way."""
    sizes = {name: grad.abs().max().item() for name, grad in expected.grads.items()}
    return {name for name, size in sizes.items() if size < 1e-6 * max(sizes.values())}


def check(pool: Pool, name: str, stage: int, backend: str) -> None:
    """Compares every rank's parameters, buffers of the first rank, and the losses with those of one process."""
    ranks = pool.run(train_rank, name, stage, backend, timeout=500)
    for make in OPTIMIZERS:
        expected = expected_of(name, make, pool.world, backend)
        results = [rank[make.__name__] for rank in ranks]
        worst = compare(results[0].state, expected.state, RTOL)
        if backend == "inductor":
            worst = {name: value for name, value in worst.items() if name not in without_gradient(expected)}
        assert not worst, (make.__name__, worst)
        parameters = expected.grads.keys()
        assert results[0].grads.keys() == parameters
        for other in results[1:]:
            assert all(torch.equal(other.state[key], results[0].state[key]) for key in parameters)
        losses = torch.tensor([rank.losses for rank in results]).mean(0)
        assert difference(losses, torch.tensor(expected.losses)) < RTOL


QUICK_PRECISIONS = {("gpt2", "bf16"), ("t5", "bf16"), ("lora_llama", "bf16"), ("resnet", "bf16"), ("vit", "fp16")}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocasting(dtype: torch.dtype, model: nn.Module) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return model(*args, **kwargs)

    return call


def gradients(name: str, precision: str) -> dict[str, torch.Tensor]:
    """Those of a step at the architecture's quick stage."""
    case = ARCHITECTURES[name]()
    zerofx.compile(case.model, stage=QUICK[name], persist_below=0, backend="interpreter", precision=precision)
    return train(case, sgd, 1, dist.get_rank()).grads


def settings() -> list[object]:
    """Each architecture once at two ranks; with --full at every stage and also at three ranks."""
    return [
        pytest.param(name, stage, world, marks=[] if (stage, world) == (QUICK[name], 2) else [pytest.mark.full])
        for name in ARCHITECTURES
        for world in (2, 3)
        for stage in (1, 2, 3)
    ]


@pytest.mark.parametrize(("name", "stage", "world"), settings())
def test_interpreted_architectures_train_as_in_one_process(
    pool: Callable[[int], Pool], name: str, stage: int, world: int
) -> None:
    check(pool(world), name, stage, "interpreter")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if (name, precision) in QUICK_PRECISIONS else [pytest.mark.full])
        for name in ARCHITECTURES
        for precision in PRECISIONS
    ],
)
def test_gradients_are_within_the_rounding_of_eager_autocast(
    pool: Callable[[int], Pool], name: str, precision: str
) -> None:
    found, *_ = pool(2).run(gradients, name, precision)
    exact = reference(ARCHITECTURES[name], sgd, 1, 2).grads
    wrap = functools.partial(autocasting, PRECISIONS[precision])
    low = reference(ARCHITECTURES[name], sgd, 1, 2, wrap=wrap).grads
    assert found.keys() == low.keys() == exact.keys()
    for key, grad in found.items():
        error = difference(low[key], exact[key])
        assert math.isfinite(error)
        assert difference(grad, low[key]) <= max(2 * error, RTOL), key


@pytest.mark.full
@pytest.mark.inductor
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_inductor_compiled_architectures_train_as_in_one_process(pool: Callable[[int], Pool], name: str) -> None:
    check(pool(2), name, 3, "inductor")
