"""Models that return their loss, for plans that are compared with what is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.bench.gpt import GPT, Size

SIZE = Size(layers=6, width=64, heads=4, context=32, vocabulary=512, micro_batch=4)


class Planned(NamedTuple):
    """A model without weights of its own, and one rank's batch."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(SIZE)


def tokens() -> tuple[Tensor, ...]:
    ids = torch.randint(SIZE.vocabulary, (SIZE.micro_batch, SIZE.context), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(-1, 1)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 3 * width),
            nn.LayerNorm(3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.norm(self.up(x))))


class MLP(nn.Module):
    """Odd sizes, so that parts are uneven, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(77, 131), nn.Linear(131, 3)
        self.layers = nn.Sequential(*(Residual(131) for _ in range(7)))
        self.first.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.layers(self.first(x))), y)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def numbers() -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(48, 77, generator=source), torch.randn(48, 3, generator=source)


class Images(nn.Module):
    """Convolutions with BatchNorm, whose buffers change in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(24) for _ in range(3))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def images() -> nn.Module:
    torch.manual_seed(0)
    return Images()


def pictures() -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 16, 16, generator=source), torch.randint(10, (8,), generator=source)


MODELS = {"gpt": Planned(gpt, tokens), "mlp": Planned(mlp, numbers), "images": Planned(images, pictures)}
