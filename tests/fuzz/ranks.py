"""Real ranks: a model is sharded and trained, and what it has learnt is that of plain PyTorch in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import zerofx
from tests.fuzz.drawn import Setting, Training
from tests.fuzz.models import Spec, batch, built
from tests.fuzz.simulated import CPU, config_of, has_kind, tolerance
from tests.pool import Pool
from tests.training import State, compare, full
from zerofx.engine import autocast

STEPS = 2
MOST = 3
"""A rank's batch has rows for as many micro-batches."""


class Result(NamedTuple):
    """Whole parameters by name, this rank's buffers, and its losses or, of a whole step, the mean over ranks."""

    state: State
    losses: list[float]


def optimizer_of(params: Iterable[nn.Parameter], training: Training) -> optim.Optimizer:
    trained = [param for param in params if param.requires_grad]
    if training.optimizer == "adamw":
        return optim.AdamW(trained, lr=1e-2, eps=1e-1, weight_decay=0.01)
    return optim.SGD(trained, lr=0.05)


def parts_of(spec: Spec, training: Training, rank: int, step: int) -> list[dict[str, Tensor]]:
    """A rank's micro-batches of one step, of equal rows."""
    return [batch(spec, rank, step * MOST + micro) for micro in range(training.microbatches)]


def loss_of(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    return model(x, ids).mean()


def reference(spec: Spec, setting: Setting, training: Training) -> list[Result]:
    """What each rank should have."""
    model = built(spec)
    optimizer = optimizer_of(model.parameters(), training)
    buffers = [{name: value.clone() for name, value in model.named_buffers()} for _ in range(setting.world)]
    losses: list[list[float]] = [[] for _ in range(setting.world)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(setting.world):
            model.load_state_dict(buffers[rank], strict=False)
            losses[rank].append(0.0)
            for part in parts_of(spec, training, rank, step):
                with autocast(setting.precision, CPU):
                    out = model(**part)
                loss = out.mean() / training.microbatches
                (loss / setting.world).backward()
                losses[rank][-1] += loss.item()
            buffers[rank] = {name: value.clone() for name, value in model.named_buffers()}
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
    if training.whole_step:
        losses = [[sum(each) / setting.world for each in zip(*losses, strict=True)]] * setting.world
    named = {name: full(param) for name, param in model.named_parameters()}
    return [Result(named | buffers[rank], losses[rank]) for rank in range(setting.world)]


def train(spec: Spec, setting: Setting, training: Training) -> Result:
    """One rank's training of the sharded model."""
    model: Any = built(spec)
    config = config_of(setting)
    options: dict[str, Any] = {
        name: getattr(config, name) for name in ("stage", "persist_below", "bucket_mb", "prefetch")
    }
    options |= {"precision": config.precision, "reduce_dtype": config.reduce_dtype, "recompute": setting.recompute}
    options["memory"] = "1GiB" if setting.keep else None  # which keeps all that it can
    zerofx.compile(model, backend="interpreter", dynamic=False, **options)
    optimizer = optimizer_of(model.parameters(), training)
    run = _whole_step if training.whole_step else _loop
    losses = run(model, optimizer, spec, training)
    named = {name: full(param) for name, param in model.named_parameters()}
    return Result(named | {name: value.clone() for name, value in model.named_buffers()}, losses)


def _loop(model: Any, optimizer: optim.Optimizer, spec: Spec, training: Training) -> list[float]:
    losses = list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        parts = parts_of(spec, training, dist.get_rank(), step)
        for place, part in enumerate(parts):
            model.set_requires_gradient_sync(training.accumulate != "defer" or place == len(parts) - 1)
            loss = loss_of(model, **part) / len(parts)
            loss.backward()
            losses[-1] += loss.item()
        if training.clip is not None:
            zerofx.clip_grad_norm_(model, training.clip)
        optimizer.step()
    return losses


def _whole_step(model: Any, optimizer: optim.Optimizer, spec: Spec, training: Training) -> list[float]:
    step = zerofx.train_step(
        model,
        loss_of,
        optimizer,
        microbatches=training.microbatches,
        accumulate=training.accumulate,
        clip=training.clip,
        fuse_optimizer=training.fuse_optimizer,
    )
    return [step(iter(parts_of(spec, training, dist.get_rank(), number))).loss.item() for number in range(STEPS)]


def check(pool: Callable[[int], Pool], spec: Spec, setting: Setting, training: Training) -> None:
    """Every rank ends as it should."""
    assert not has_kind(spec.ops, "dropout")
    expected = reference(spec, setting, training)
    found = pool(setting.world).run(train, spec, setting, training)
    limit = 2 * tolerance(spec, setting)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        worst = compare(one.state, other.state, limit)
        assert not worst, f"rank {rank} differs in {worst}"
        losses = compare({"loss": torch.tensor(one.losses)}, {"loss": torch.tensor(other.losses)}, limit)
        assert not losses, f"the losses of rank {rank} are {one.losses} and not {other.losses}"
