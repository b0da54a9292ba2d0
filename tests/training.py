"""Ordinary training loops for the test models: the eager single-process reference and the loop of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from tests.models import Case

State = dict[str, torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Trained(NamedTuple):
    """Full tensors after training: parameters and buffers, the last step's gradients, each step's mean loss."""

    state: State
    grads: State
    losses: list[float]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Linear in the gradients, so that rounding stays rounding."""
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an eps that keeps gradients that are zero in theory from deciding an update's sign."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def adamw_default(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as torch ships it; comparable only where the compared arithmetic is bitwise equal."""
    return torch.optim.AdamW(parameters)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A detached whole copy; a collective when `tensor` is a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def snapshot(model: nn.Module, losses: list[float]) -> Trained:
    """What `model` holds now; every rank must call it together."""
    state = {name: full(value) for name, value in model.state_dict().items()}
    grads = {name: full(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    return Trained(state, grads, losses)


def micro_loss(case: Case, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of one rank's micro-batch, with the random numbers of that rank and step."""
    torch.manual_seed(1000 * step + rank)
    return case.loss(model, case.batch(rank, step))


def reference(
    builder: Callable[[], Case],
    make_optimizer: MakeOptimizer,
    steps: int,
    world: int,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Trained:
    """Training of the model that `wrap` returns (unless given, eager) in one process on all ranks' micro-batches,
    gradients averaged, buffers kept per rank.

    The buffers reported are rank 0's, as under DDP with `broadcast_buffers=False`.
    """
    case = builder()
    model = case.model
    called = wrap(model)
    optimizer = make_optimizer(model.parameters())
    buffers = [{name: value.clone() for name, value in model.named_buffers()} for _ in range(world)]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for rank in range(world):
            _copy_buffers(model, buffers[rank])
            loss = micro_loss(case, called, rank, step)
            loss.backward()
            losses[-1] += loss.item() / world
            buffers[rank] = {name: value.clone() for name, value in model.named_buffers()}
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world
        optimizer.step()
    _copy_buffers(model, buffers[0])
    return snapshot(model, losses)


def train(case: Case, make_optimizer: MakeOptimizer, steps: int, rank: int) -> Trained:
    """One rank's ordinary loop over a model that averages its own gradients; losses are this rank's."""
    optimizer = make_optimizer(case.model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = micro_loss(case, case.model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return snapshot(case.model, losses)


def compare(state: State, expected: State, rtol: float) -> dict[str, float]:
    """The keys whose max|a-b| / (max|b| + 1e-6) exceeds `rtol`, worst first; infinite where they cannot be compared."""
    worst = {key: difference(state.get(key), expected.get(key)) for key in state.keys() | expected.keys()}
    order = sorted(worst, key=lambda key: (-worst[key], key))
    return {key: worst[key] for key in order if worst[key] > rtol}


def difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """max|a-b| / (max|b| + 1e-6); infinite when one is missing, shaped or typed differently, or not a number."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    value = ((a - b).abs().max() / (b.abs().max() + 1e-6)).item()
    return math.inf if math.isnan(value) else value


def _copy_buffers(model: nn.Module, values: State) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])
