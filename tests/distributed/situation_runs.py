"""The training loop of a situation, for all ranks in one process or for one rank of a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import zerofx
from tests.situations.situation import Situation
from tests.training import MakeOptimizer, State, compare, difference, full

STEPS = 3
RTOL = 1e-5


class Result(NamedTuple):
    """What one rank has after training: whole parameters and its own buffers, gradients, losses, what it has seen."""

    state: State
    grads: State
    losses: list[float]
    seen: list[float]


def train_rank(kind: type[Situation], stage: int, options: dict[str, Any]) -> dict[str, Result]:
    """Shards and trains one model for each optimizer."""
    results: dict[str, Result] = {}
    for make in kind.optimizers:
        torch.manual_seed(0)
        situation = kind()
        settings = {"persist_below": 0, "backend": "interpreter"} | options
        model = zerofx.compile(situation.model(), stage=stage, **settings)
        (results[make.__name__],), optimizer = _train(situation, model, make, [dist.get_rank()])
        situation.check(model, optimizer)
    return results


@functools.cache
def expected(kind: type[Situation], make: MakeOptimizer, world: int) -> list[Result]:
    """What each of `world` ranks should have: eager training in one process on all their micro-batches."""
    torch.manual_seed(0)
    situation = kind()
    return _train(situation, situation.model(), make, range(world))[0]


def differences(ours: Result, theirs: Result) -> dict[str, float]:
    """What differs by more than rounding."""
    found = compare(ours.state, theirs.state, RTOL)
    found |= {f"gradient of {name}": value for name, value in compare(ours.grads, theirs.grads, RTOL).items()}
    for name in ("losses", "seen"):
        values = difference(torch.tensor(getattr(ours, name)), torch.tensor(getattr(theirs, name)))
        found |= {name: values} if values > RTOL else {}
    return found


def _train(
    situation: Situation, model: nn.Module, make: MakeOptimizer, ranks: Sequence[int]
) -> tuple[list[Result], torch.optim.Optimizer]:
    """Averages over `ranks` itself; buffers belong to ranks, as under DDP with `broadcast_buffers=False`."""
    optimizer = make(situation.groups(model))
    scale = 1 / (len(ranks) * situation.micro_batches)
    buffers = {rank: _buffers(model) for rank in ranks}
    losses: dict[int, list[float]] = {rank: [] for rank in ranks}
    seen: dict[int, list[float]] = {rank: [] for rank in ranks}
    for step in range(STEPS):
        situation.before_step(model, step)
        optimizer.zero_grad()
        for rank in ranks:
            _put_buffers(model, buffers[rank])
            situation.seen = seen[rank]
            torch.manual_seed(1000 * step + rank)
            for micro in range(situation.micro_batches):
                batch = situation.batch(rank, step * situation.micro_batches + micro)
                losses[rank].append(situation.backward(model, batch, scale).item())
            buffers[rank] = _buffers(model)
        if len(ranks) > 1:
            _fill_zeros(model, situation.zero_gradients)
        situation.seen = common = list[float]()
        situation.before_update(model)
        if situation.clip is not None:
            common.append(full(nn.utils.clip_grad_norm_(model.parameters(), situation.clip)).item())
        optimizer.step()
        situation.after_step(model)
        for each in seen.values():
            each += common
    situation.seen = seen[ranks[0]]
    parameters = {name: full(param) for name, param in model.named_parameters(remove_duplicate=False)}
    grads = {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    return [Result(parameters | buffers[rank], grads, losses[rank], seen[rank]) for rank in ranks], optimizer


def _buffers(model: nn.Module) -> State:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _put_buffers(model: nn.Module, values: State) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _fill_zeros(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        param = model.get_parameter(name)
        assert param.grad is None
        param.grad = torch.zeros_like(param)
