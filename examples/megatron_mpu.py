"""Tensor slicing as in Megatron-LM under ZeRO, with an mpu of six functions: 2 x 2 ranks against one process.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/megatron_mpu.py

Ranks 0 and 1 slice the layers between them, and so do 2 and 3; 0 and 2 hold the same slices, of which zerofx stores
parts, and read different parts of the batch, as do 1 and 3. The layers communicate in plain autograd functions.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx

WIDTH, ROWS, STEPS, RATE, CLIP = 32, 8, 5, 1e-3, 0.5


class Mpu:
    """The six functions; ranks that slice layers between them are neighbours."""

    def __init__(self, slices: int) -> None:
        world, me = dist.get_world_size(), dist.get_rank()
        for first in range(0, world, slices):
            group = dist.new_group(list(range(first, first + slices)))
            if first <= me < first + slices:
                self.model = group
        for first in range(slices):
            group = dist.new_group(list(range(first, world, slices)))
            if me % slices == first:
                self.data = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.model)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)


class CopyToSlices(torch.autograd.Function):
    """The same value for all slices; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOfSlices(torch.autograd.Function):
    """The sum of all slices' values; each has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def slice_of(whole: Tensor, dim: int, mpu: Any) -> nn.Parameter:
    """The slice of this rank, marked as such for zerofx, Megatron and DeepSpeed."""
    size, rank = mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()
    param = nn.Parameter(whole.detach().chunk(size, dim)[rank].clone())
    param.tensor_model_parallel = True
    return param


class ColumnParallelLinear(nn.Module):
    """Each rank computes some of the outputs."""

    def __init__(self, whole: nn.Linear, mpu: Any) -> None:
        super().__init__()
        self.group = mpu.get_model_parallel_group()
        self.weight, self.bias = slice_of(whole.weight, 0, mpu), slice_of(whole.bias, 0, mpu)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(CopyToSlices.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Each rank reads some of the inputs; the bias, a copy on each rank, is added to the sum."""

    def __init__(self, whole: nn.Linear, mpu: Any) -> None:
        super().__init__()
        self.group = mpu.get_model_parallel_group()
        self.weight, self.bias = slice_of(whole.weight, 1, mpu), nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return SumOfSlices.apply(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    """A norm and two linear layers beside a residual stream."""

    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def sliced(block: Block, mpu: Any) -> Block:
    """The same block with sliced layers, in place."""
    block.up, block.down = ColumnParallelLinear(block.up, mpu), RowParallelLinear(block.down, mpu)
    return block


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    """What the ranks of one copy of the model read."""
    numbers = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(ROWS, WIDTH, generator=numbers)
    return x, x.sin().sum(1, keepdim=True)


def in_one_process(replicas: int) -> list[tuple[float, float]]:
    """Loss and norm of each step of plain PyTorch on the global batch."""
    model, found = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for step in range(STEPS):
        parts = zip(*(batch(replica, step) for replica in range(replicas)), strict=True)
        loss = loss_fn(model, *map(torch.cat, parts))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--backend", default="interpreter", help="or inductor, which compiles for half a minute")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    mpu = Mpu(slices=2)

    model = build()
    for place in (0, 1):
        model[place] = sliced(model[place], mpu)
    zerofx.compile(model, stage=options.stage, mpu=mpu, persist_below=0, backend=options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    step = zerofx.train_step(model, loss_fn, optimizer, clip=CLIP)
    results = [step(*batch(mpu.get_data_parallel_rank(), place)) for place in range(STEPS)]

    expected = in_one_process(mpu.get_data_parallel_world_size())
    for place, (result, (loss, norm)) in enumerate(zip(results, expected, strict=True)):
        ours = result.loss.item(), result.grad_norm.item()
        if dist.get_rank() == 0:
            print(f"step {place}: loss {ours[0]:.6f}, in one process {loss:.6f}; norm {ours[1]:.6f} and {norm:.6f}")
        torch.testing.assert_close(torch.tensor(ours), torch.tensor((loss, norm)), rtol=1e-4, atol=1e-5)
    if dist.get_rank() == 0:
        print(f"the same on {dist.get_world_size()} ranks, 2 slices x {mpu.get_data_parallel_world_size()} replicas")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
