"""Stage 3 keeps no gathered parameter after use, and a rank's steady state is its share of the model."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

import zerofx
from tests.distributed.runs import Builder, Spy, Tensors, members, spied
from tests.models import gpt, gpt2, mlp_odd
from tests.pool import Pool
from tests.training import adamw
from zerofx.passes.release_after_use import ReleaseAfterUse

SETTLE = 0.5  # seconds: gloo's threads let go of a tensor only soon after it was waited for
WIDTH = 4224  # a square weight of 68 MiB: its halves too are so large that malloc returns them to the system at once


class Held:
    """Watches the storages of gathered parameters and of their copies."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def __call__(self, node: Node, given: Tensors, result: Tensors) -> None:
        if node.meta["zerofx"].role == "unshard":
            self.storages += [StorageWeakRef(part.untyped_storage()) for part in members(result)]

    def counts(self) -> tuple[int, int]:
        """How many were seen and how many stay alive."""
        time.sleep(SETTLE)
        return len(self.storages), sum(not storage.expired() for storage in self.storages)


def keep(order: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(step for step in order if not isinstance(step, ReleaseAfterUse))


def gathered_storages(builder: Builder, passes: Any) -> list[tuple[int, int]]:
    """Gathered storages seen and alive: after the forward, and after the backward."""
    case, held = builder(), Held()
    with spied(), mock.patch.object(Spy, "listeners", (held,)):
        zerofx.compile(case.model, stage=3, persist_below=0, backend="interpreter", passes=passes)
        counts = []
        for step in range(2):
            held.storages.clear()
            loss = case.loss(case.model, case.batch(dist.get_rank(), step))
            counts.append(held.counts())
            held.storages.clear()
            loss.backward()
            counts.append(held.counts())
    return counts


@pytest.mark.parametrize("builder", [mlp_odd, gpt, gpt2])
def test_no_gathered_parameter_outlives_its_graph(pool: Callable[[int], Pool], builder: Builder) -> None:
    if builder is gpt2:
        pytest.importorskip("transformers")
    for counts in pool(2).run(gathered_storages, builder, None):
        assert all(seen > 0 for seen, _ in counts)
        assert [alive for _, alive in counts] == [0, 0, 0, 0]


def test_without_the_release_pass_gathered_parameters_wait_for_the_backward(pool: Callable[[int], Pool]) -> None:
    for (_, after_forward), (_, after_backward), *_ in pool(2).run(gathered_storages, mlp_odd, keep):
        assert after_forward > 0
        assert after_backward == 0


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_over_forward(passes: Any) -> int:
    """Bytes that a forward of four large layers leaves allocated for its backward."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    zerofx.compile(model, stage=3, passes=passes)
    for _ in range(3):
        gc.collect()
        time.sleep(SETTLE)
        before = resident()
        loss = model(torch.ones(1, WIDTH)).sum()
        time.sleep(SETTLE)
        growth = resident() - before
        loss.backward()
    return growth


@pytest.mark.inductor
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_compiled_forward_leaves_no_gathered_weight_allocated(pool: Callable[[int], Pool]) -> None:
    weight = WIDTH * WIDTH * 4
    for growth in pool(2).run(growth_over_forward, None):
        assert growth < weight / 2


class Mixed(nn.Module):
    """Large weights to shard, vectors that stay replicated, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(96, 480), nn.BatchNorm1d(480), nn.Linear(480, 96)
        self.register_buffer("scale", torch.ones(96, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x @ self.scale))))


def storages() -> Iterator[tuple[int, int]]:
    """Address and bytes of every tensor that is alive."""
    gc.collect()
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter) and found.device.type != "meta":  # a DTensor's part is a Tensor
            yield found.untyped_storage().data_ptr(), found.untyped_storage().nbytes()


def live_bytes() -> int:
    return sum(dict(storages()).values())


def steady_state(stage: int, backend: str) -> tuple[int, int]:
    """Bytes that training added: after a step, and after the gradients were dropped as well."""
    before = live_bytes()
    model = zerofx.compile(Mixed(), stage=stage, persist_below=1000, backend=backend)
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 96), 1.0 + step)).square().mean().backward()
        optimizer.step()
    with_gradients = live_bytes() - before
    optimizer.zero_grad()
    return with_gradients, live_bytes() - before


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_steady_state_is_a_share_of_parameters_gradients_and_states(
    pool: Callable[[int], Pool], world: int, stage: int
) -> None:
    model = Mixed()
    sizes = [param.nbytes for param in model.parameters()]
    large = sum(size for size in sizes if size >= 4000)
    share = large / world if stage == 3 else large
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    for with_gradients, without in pool(world).run(steady_state, stage, "interpreter"):
        mine = share + sum(sizes) - large
        assert with_gradients == pytest.approx(4 * mine + buffers, rel=0.02)
        assert without == pytest.approx(3 * mine + buffers, rel=0.02)
