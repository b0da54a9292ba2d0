"""The contestants: how each is set up to train the model, data-parallel, and what its policy sends."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import zerofx

MIB = 2**20
BUCKET_MB = 25  # MiB, DDP's default; DeepSpeed's own default would reserve 2 GB
FLOAT = 4  # bytes
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What is computed in; parameters, gradients and the optimizer are fp32 in any case."""

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Training:
    """A set-up contestant: `step` trains on a rank's batch and returns its loss; `bytes_sent` if counted."""

    step: Step
    bytes_sent: Callable[[], int] | None = None


Setup = Callable[[nn.Module, torch.dtype], Training]
"""Takes the model and the dtype to compute in."""


@dataclass(frozen=True)
class Traffic:
    """How often a step passes all parameters, or all gradients, through each collective."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0

    def bytes_sent(self, elements: int, ranks: int, dtype: torch.dtype = torch.float32) -> int:
        """What each rank sends a step, by rings: (N-1)/N of the bytes a gather or scatter, twice that an all-reduce.

        Parameters are gathered in the dtype to compute in, and gradients are reduced in fp32.
        """
        per_element = self.all_gathers * dtype.itemsize + (self.reduce_scatters + 2 * self.all_reduces) * FLOAT
        return per_element * elements * (ranks - 1) // ranks


SILENT, REPLICATED = Traffic(), Traffic(all_reduces=1)
GATHERED_ONCE = Traffic(all_gathers=1, reduce_scatters=1)
GATHERED_TWICE = Traffic(all_gathers=2, reduce_scatters=1)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def loop(forward: Step, model: nn.Module, dtype: torch.dtype = torch.float32) -> Step:
    """The ordinary step around a model's call, under autocast to another dtype than fp32."""
    optimizer = adamw(model)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            loss = forward(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def local(model: nn.Module, dtype: torch.dtype, compiled: bool) -> Training:
    return Training(loop(torch.compile(model) if compiled else model, model, dtype))


def ddp(model: nn.Module, dtype: torch.dtype, compiled: bool) -> Training:
    replicated = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return Training(loop(torch.compile(replicated) if compiled else replicated, model, dtype))


def fsdp2(model: nn.Module, dtype: torch.dtype, compiled: bool, stage: int) -> Training:
    """Block by block, as `fully_shard` is meant to be used; stage 2 keeps gathered parameters for the backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {
        "mesh": dist.init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": stage == 3,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Training(loop(model, model))


def deepspeed(model: nn.Module, dtype: torch.dtype, stage: int) -> Training:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference only, and compiled on first use
    bucket = BUCKET_MB * MIB // FLOAT
    zero = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # for its own bookkeeping only
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero | {"stage3_prefetch_bucket_size": bucket},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    if dtype == torch.bfloat16:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(step)


def zerofx_stage(
    model: nn.Module, dtype: torch.dtype, stage: int, fused: bool = False, recompute: float | None = None
) -> Training:
    """The ordinary loop, or, where `fused`, a step whose backward updates the parameters."""
    (precision,) = (name for name, known in PRECISIONS.items() if known == dtype)
    model = zerofx.compile(model, stage=stage, precision=precision, recompute=recompute)
    step = loop(model, model)
    if fused:
        whole_step = zerofx.train_step(model, nn.Module.__call__, adamw(model), fuse_optimizer=True)

        def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return whole_step(ids, targets).loss

    return Training(step, lambda: zerofx.inspect(model).collectives().bytes_sent)


@dataclass(frozen=True)
class Contestant:
    """`whole_batch`: one process takes the batch of all ranks; without `agrees`, losses are not to be compared."""

    name: str
    setup: Setup
    traffic: Traffic
    needs: str = "torch"
    whole_batch: bool = False
    agrees: bool = True


REFERENCE, FLOOR = "reference", "floor-compiled"

CONTESTANTS = (
    Contestant(REFERENCE, partial(local, compiled=False), SILENT, whole_batch=True),
    Contestant(FLOOR, partial(local, compiled=True), SILENT, agrees=False),
    Contestant("floor-eager", partial(local, compiled=False), SILENT, agrees=False),
    Contestant("ddp-eager", partial(ddp, compiled=False), REPLICATED),
    Contestant("ddp-compiled", partial(ddp, compiled=True), REPLICATED),
    Contestant("fsdp2-zero2-eager", partial(fsdp2, compiled=False, stage=2), GATHERED_ONCE),
    Contestant("fsdp2-zero2-compiled", partial(fsdp2, compiled=True, stage=2), GATHERED_ONCE),
    Contestant("fsdp2-zero3-eager", partial(fsdp2, compiled=False, stage=3), GATHERED_TWICE),
    Contestant("fsdp2-zero3-compiled", partial(fsdp2, compiled=True, stage=3), GATHERED_TWICE),
    Contestant("deepspeed-1", partial(deepspeed, stage=1), GATHERED_ONCE, needs="deepspeed"),
    Contestant("deepspeed-2", partial(deepspeed, stage=2), GATHERED_ONCE, needs="deepspeed"),
    Contestant("deepspeed-3", partial(deepspeed, stage=3), GATHERED_TWICE, needs="deepspeed"),
    Contestant("zerofx-0", partial(zerofx_stage, stage=0), REPLICATED),
    Contestant("zerofx-1", partial(zerofx_stage, stage=1), GATHERED_ONCE),
    Contestant("zerofx-2", partial(zerofx_stage, stage=2), GATHERED_ONCE),
    Contestant("zerofx-3", partial(zerofx_stage, stage=3), GATHERED_TWICE),
    Contestant("zerofx-3-fused", partial(zerofx_stage, stage=3, fused=True), GATHERED_TWICE),
    Contestant("zerofx-3-fused-recompute", partial(zerofx_stage, stage=3, fused=True, recompute=0.3), GATHERED_TWICE),
)

BY_NAME = {contestant.name: contestant for contestant in CONTESTANTS}


def choose(only: str) -> list[str]:
    """The contestants that a list with commas names, each by its name or the beginning of it, in the usual order.

    The reference and the floor always take part. Raises ValueError for a name that no contestant has.
    """
    wishes = [wish.strip() for wish in only.split(",") if wish.strip()]
    granted = {wish: {name for name in BY_NAME if name == wish or name.startswith(f"{wish}-")} for wish in wishes}
    for wish, names in granted.items():
        if not names:
            raise ValueError(f"{wish!r} is none of {', '.join(BY_NAME)}")
    chosen = {REFERENCE, FLOOR}.union(*granted.values())
    return [name for name in BY_NAME if name in chosen or not wishes]
