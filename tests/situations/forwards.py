"""Situations in the forward: shared and checkpointed layers, buffers, random numbers, graph breaks, autocast."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.models import generator
from tests.situations.situation import Situation, rows, to_one, tokens
from tests.training import full, sgd


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.out = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        for _ in range(4):
            h = h + checkpoint(self.block, h, use_reentrant=False)
        return self.out(h)


class SharedLayerUnderCheckpoint(Situation):
    """A layer used four times under activation checkpointing has its gradient ready, and reduced, more than once."""

    batch = rows(5, 6)

    def model(self) -> nn.Module:
        return Repeated()

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        collectives = zerofx.inspect(model).collectives().rows
        reduced = [name for row in collectives if row.role == "reduce_grad" for name in row.params]
        assert sorted(reduced) == sorted(dict(model.named_parameters()))


class NormedAdapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8).requires_grad_(False)
        self.base = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 8) * 0.3), nn.Parameter(torch.randn(8, 2) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        return x + torch.tanh(self.base(n) + n @ self.down.T @ self.up.T)


class CheckpointedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(NormedAdapter() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h


class FrozenNormUnderCheckpoint(Situation):
    """Frozen weights, released after the forward, are empty when checkpointing recomputes; adapters then get zeros."""

    batch = tokens(9, 2, 5)
    loss = to_one

    def model(self) -> nn.Module:
        return CheckpointedBlocks()

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trained = [param for param in model.parameters() if param.requires_grad]
        assert len(trained) == 6 and all(full(param.grad).abs().max() > 0 for param in trained)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 3), nn.Linear(3, 4)
        self.register_buffer("code", torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.enc(x)
        nearest = torch.cdist(z, self.code).argmin(-1)
        q = self.code[nearest]
        with torch.no_grad():
            hot = F.one_hot(nearest, 5).float()
            count = hot.sum(0)[:, None]
            mean = (hot.T @ z) / count.clamp(min=1)
            self.code.copy_(torch.where(count > 0, 0.9 * self.code + 0.1 * mean, self.code))
        return self.dec(z + (q - z).detach()), (z - q.detach()).square().mean()


class CodebookUpdatedInForward(Situation):
    """What a forward writes into a buffer is lost; here each rank keeps its own, as under DDP without broadcasts."""

    batch = rows(8, 4)

    def model(self) -> nn.Module:
        return Codebook()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out, commitment = model(batch)
        return (out - batch).square().mean() + commitment


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * self.inv_freq
        a, b = self.q(x).chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class RotaryBuffer(Situation):
    """A buffer of frequencies is converted with the weights, or written into checkpoints that it is not part of."""

    def model(self) -> nn.Module:
        return Rotated()

    def batch(self, rank: int, micro: int) -> Any:
        numbers = generator(rank, micro)
        positions = torch.randint(3000, 4096, (6,), generator=numbers)
        return torch.randn(6, 8, generator=numbers), positions, torch.randn(6, 8, generator=numbers)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0], batch[1]) - batch[2]).square().mean()

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert model.get_buffer("inv_freq").dtype is torch.float32
        assert "inv_freq" not in model.state_dict()


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = self.enc(x).mean(0)
        torch._dynamo.graph_break()
        h = torch.tanh(self.enc(x) - mean)
        torch._dynamo.graph_break()
        return self.head(h)


class GraphWithoutBackward(Situation):
    """A trainable weight is read in a graph that has no backward: what waits for one backward a forward breaks."""

    batch = rows(3, 4)
    loss = to_one

    def model(self) -> nn.Module:
        return Interrupted()

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert [graph.kind for graph in zerofx.inspect(model).graphs] == ["inference", "train", "train"]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(self.a(x), 0.5, self.training)
        return dropped + F.dropout(self.b(x[:, :8].repeat(1, 2)), 0.3, self.training)


class Dropout(Situation):
    """Passes that move or repeat random ops change the masks, or give the backward another one than the forward."""

    on_inductor = False
    batch = rows(4, 16)

    def model(self) -> nn.Module:
        return Dropped()


class Pinned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        with torch.autocast("cpu", enabled=False):
            return h.float() @ self.b.weight.float().T + self.b.bias.float()


class FullPrecisionInsideAutocast(Situation):
    """A region that the user has taken out of autocast has a low-precision backward once it is compiled."""

    worlds = (2, 4)  # of three ranks, one process rounds a third of each gradient in bf16
    on_inductor = False  # it keeps fp32 between ops where eager code rounds to bf16
    optimizers = (sgd,)
    batch = rows(4, 32)

    def model(self) -> nn.Module:
        return Pinned()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
        assert out.dtype is torch.float32
        return (out - 1).square().mean()


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.register_buffer("frequencies", 1.0 / 10 ** torch.arange(4.0))

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        angles = times[:, None] * self.frequencies
        return self.lin(torch.cat([angles.sin(), angles.cos()], -1))


class FloatInputUnderAutocast(Situation):
    """Every float input and buffer is cast to bf16 on entry, which cannot tell 993.4 from 996."""

    worlds = (2, 4)  # of three ranks, one process rounds a third of each gradient in bf16
    on_inductor = False  # it keeps fp32 between ops where eager code rounds to bf16
    optimizers = (sgd,)

    def model(self) -> nn.Module:
        return Timed()

    def batch(self, rank: int, micro: int) -> torch.Tensor:
        return torch.tensor([993.4, 996.0, 995.1 + rank, 994.3 + micro])

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
        assert model.get_buffer("frequencies").dtype is torch.float32
        assert (out[0] - out[1]).abs().max() > 0.1
        return (out.float() - 1).square().mean()


FORWARDS: tuple[type[Situation], ...] = (
    SharedLayerUnderCheckpoint,
    FrozenNormUnderCheckpoint,
    CodebookUpdatedInForward,
    RotaryBuffer,
    GraphWithoutBackward,
    Dropout,
    FullPrecisionInsideAutocast,
    FloatInputUnderAutocast,
)
