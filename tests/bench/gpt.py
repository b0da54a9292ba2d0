"""The model that every contestant trains, in plain PyTorch, and its batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Size:
    """Shapes of the model; `micro_batch` is the number of sequences a rank takes a step."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    micro_batch: int


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, context=32, vocabulary=256, micro_batch=4),
    "small": Size(layers=6, width=512, heads=8, context=256, vocabulary=8192, micro_batch=4),
    "wide": Size(layers=8, width=1024, heads=8, context=128, vocabulary=8192, micro_batch=4),
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A pre-norm decoder with learned positions and a head of its own; a call returns the mean cross-entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(rows, size.width) for rows in (size.vocabulary, size.context))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if residual else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def elements(size: Size) -> int:
    """How many elements the parameters have."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(size).parameters())


def global_batch(size: Size, step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets of all ranks, `[ranks * micro_batch, context]` each: walks that mostly go one up, learnable."""
    generator = torch.Generator().manual_seed(1 + step)
    rows = ranks * size.micro_batch
    start = torch.randint(size.vocabulary, (rows, 1), generator=generator)
    strides = 1 + torch.bernoulli(torch.full((rows, size.context), 0.2), generator=generator).long()
    walk = torch.cat([start, start + strides.cumsum(1)], 1) % size.vocabulary
    return walk[:, :-1].contiguous(), walk[:, 1:].contiguous()
