"""A training that is saved and taken up in legs, each on other ranks and by another library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerofx
from tests.distributed.ranks import rows, sharded
from tests.training import State, full

BATCH = 12
STEPS = 2  # of a leg


class Odd(nn.Module):
    """Tied, frozen, 0-dim and empty parameters, and buffers of two dtypes, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.frozen, self.again, self.out = (nn.Linear(*s) for s in ((7, 13), (13, 7), (7, 13), (13, 7)))
        self.again.weight = self.a.weight
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scale", torch.full((13,), 2.0))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.ones(13), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(F.gelu(self.a(x)) * self.mask)
        return self.out(torch.tanh(self.again(x)) * self.scale) * self.gain


class Training(NamedTuple):
    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any


def begin(wrap: Callable[[nn.Module], Any], seed: int) -> Training:
    torch.manual_seed(seed)
    model = wrap(Odd())
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-3)
    return Training(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))


def steps(training: Training, first: int, rank: int, world: int) -> None:
    """Two steps on one global batch, of which each rank has its rows; in the first of all, one parameter does not
    take part, so that its number of steps is another one.
    """
    model, optimizer, scheduler = training
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        part = rows(step, BATCH, 7).chunk(world)[rank]
        model(part).square().mean().backward()
        gain = dict(model.named_parameters())["gain"]
        if world > 1 and not isinstance(gain, DTensor):
            dist.all_reduce(gain.grad)
            gain.grad /= world
        if step == 0:
            gain.grad = None
        optimizer.step()
        scheduler.step()


def everything(training: Training) -> State:
    """Parameters, buffers, optimizer states and rates, by name and whole."""
    model, optimizer, scheduler = training
    names = {param: name for name, param in model.named_parameters()}
    found = {name: full(value) for name, value in model.state_dict().items()}
    for param, state in optimizer.state.items():
        found |= {f"{names[param]}/{key}": full(value) for key, value in state.items()}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{number}/{key}": torch.tensor(float(group[key])) for key in ("lr", "weight_decay")}
    return found | {"epoch": torch.tensor(scheduler.last_epoch)}


def fsdp2(model: nn.Module) -> nn.Module:
    """FSDP2 neither shards nor reduces 0-dim parameters: `steps` does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, ignored_params={model.gain})


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: model,
    "fsdp2": fsdp2,
    **{f"stage {stage}": lambda model, stage=stage: sharded(model, stage=stage) for stage in range(4)},
}


def leg(kind: str, folder: Path, number: int) -> tuple[State, State, Any]:
    """Takes up the training after `number` legs, trains on and saves: the states found and left."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    training = begin(WRAPS[kind], seed=number)
    model, optimizer, scheduler = training
    found: State = {}
    loaded = None
    if number:
        loaded = zerofx.load(folder / f"leg-{number}", model, optimizer, scheduler=scheduler)
        found = everything(training)
    steps(training, STEPS * number, rank, world)
    extra = {"legs": number + 1, "where": torch.arange(number + 1)}
    path = folder / f"leg-{number + 1}"
    zerofx.save(path, model, optimizer, step=STEPS * (number + 1), scheduler=scheduler, extra=extra)
    return found, everything(training), loaded
