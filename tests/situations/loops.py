"""Situations in the training loop: accumulation, clipping, groups, hooks, reads and edits by the user."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from tests.models import generator
from tests.situations.situation import Situation, buckets, rows, to_one
from tests.training import full, sgd


class ClippedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.frozen(torch.tanh(self.b(torch.tanh(self.a(x)))))) * 50


class ClippedGlobalNorm(Situation):
    """Each rank clips by the norm of its own part, or counts tied and replicated parameters more than once."""

    optimizers = (sgd,)
    options = ({}, {"persist_below": 20})
    clip = 0.5

    def model(self) -> nn.Module:
        return ClippedModel()

    def batch(self, rank: int, micro: int) -> torch.Tensor:
        return torch.randn(4, 6, generator=generator(rank, micro)) * (1 + 3 * rank)


class ParameterGroups(Situation):
    """Once matrices and biases are flattened together, one learning rate and one weight decay serve both."""

    options = buckets(10, 10**6)
    batch = rows(4, 5)
    loss = to_one

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))

    def groups(self, model: nn.Module) -> Iterable[Any]:
        matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) == large] for large in (True, False))
        return [
            {"params": matrices, "weight_decay": 0.5, "lr": 1e-2},
            {"params": rest, "weight_decay": 0.0, "lr": 3e-2, "betas": (0.5, 0.9)},
        ]

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(2, 0.5), (4, 0)]


class AccumulatedMicroBatches(Situation):
    """Only the last micro-batch's gradient survives, or the sum of them is divided twice or never."""

    micro_batches = 4

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def batch(self, rank: int, micro: int) -> Any:
        opposite = torch.full((3, 1), float((-1) ** micro * (1 + micro)))
        return torch.randn(3, 4, generator=generator(rank, micro)), opposite

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()


class GradientPenalty(Situation):
    """The gradient of a gradient is silently wrong, or is left out of the loss."""

    refused = ("double backward",)
    batch = rows(5, 4)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + 10 * (slope.norm(dim=-1) - 1).square().mean()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.body(x))
        return self.one(h), self.two(h)


class TwoBackwardsOfOneForward(Situation):
    """The first of two backwards releases the gathered weights, and the second finds them empty."""

    batch = rows(3, 4)

    def model(self) -> nn.Module:
        return TwoOutputs()

    def backward(self, model: nn.Module, batch: torch.Tensor, scale: float) -> torch.Tensor:
        one, two = model(batch)
        first, second = one.square().mean(), (two - 1).square().mean()
        (first * scale).backward(retain_graph=True)
        (second * scale).backward()
        return (first + second).detach()


class UserHooks(Situation):
    """Gradient hooks of parameters and hooks that are put on after the first forward never run."""

    batch = rows(3, 4)
    loss = to_one

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        model[0].weight.register_hook(lambda grad: grad * 0.5)
        return model

    def before_step(self, model: nn.Module, step: int) -> None:
        if step == 1:
            model.get_submodule("1").register_forward_hook(
                lambda module, args, out: self.seen.append(out.detach().abs().mean().item())
            )

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert len(self.seen) == 2


class ParametersClampedAfterStep(Situation):
    """What the user writes into parameters between steps goes to a released copy and is lost."""

    batch = rows(3, 4)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 1))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()

    def after_step(self, model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.05, 0.05)

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert all(full(param).abs().max() <= 0.05 for param in model.parameters())


class GradientsReadByTheUser(Situation):
    """Code that looks at `p.grad` or `p.shape` finds None or nothing; here `p.grad` is a DTensor with all of it."""

    batch = rows(3, 4)
    loss = to_one

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def before_update(self, model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None and param.grad.shape == param.shape
            self.seen += [*map(float, param.shape), full(param.grad.norm()).item(), full(param.grad).sum().item()]

    def check(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        assert model.get_parameter("0.weight").shape == (6, 4)
        for param in model.parameters():
            assert isinstance(param.grad, DTensor) and param.grad.placements == param.placements
            assert param.grad.to_local().shape == param.to_local().shape


LOOPS: tuple[type[Situation], ...] = (
    ClippedGlobalNorm,
    ParameterGroups,
    AccumulatedMicroBatches,
    GradientPenalty,
    TwoBackwardsOfOneForward,
    UserHooks,
    ParametersClampedAfterStep,
    GradientsReadByTheUser,
)
