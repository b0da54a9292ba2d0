"""Situations in which ranks run different code on their own batches."""

from __future__ import annotations

import torch
import torch.nn as nn

from tests.models import Batch, generator
from tests.situations.situation import Situation


class TextAndImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision, self.head = nn.Linear(4, 6), nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        h = self.text(text)
        if image is not None:
            h = h + self.vision(image)
        return self.head(torch.relu(h))


class ImageOnSomeRanksOnly(Situation):
    """The vision tower runs only on ranks whose batch has an image; they wait for the others for ever."""

    def model(self) -> nn.Module:
        return TextAndImage()

    def batch(self, rank: int, micro: int) -> Batch:
        numbers = generator(rank, micro)
        batch = {"text": torch.randn(3, 4, generator=numbers)}
        if (rank + micro) % 2 == 0:
            batch["image"] = torch.randn(3, 5, generator=numbers)
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch).square().mean()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = (chosen == place).nonzero().squeeze(-1)
            if rows.numel() > 0:
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


class IdleExperts(Situation):
    """Two tokens a rank for three experts: some expert is idle on a rank, and the others wait for its gradient."""

    worlds = (2, 4)

    def model(self) -> nn.Module:
        return Experts()

    def batch(self, rank: int, micro: int) -> torch.Tensor:
        return torch.randn(2, 4, generator=generator(rank, micro)) * 3


RANKS: tuple[type[Situation], ...] = (ImageOnSomeRanksOnly, IdleExperts)
