"""What ranks compare at `zerofx.compile`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx import records
from zerofx.agree_all import Facts
from zerofx.config import Config
from zerofx.manager import Pass
from zerofx.shard import Owner
from zerofx.stage_plan import Plan
from zerofx.tensor_parallel import is_marked


def facts_of(
    model: nn.Module, config: Config, order: Sequence[Pass], owners: Sequence[Owner], plan: Plan | None
) -> Facts:
    """Ranks along `dp` hold the same model, those along `tp` slices of it, those along `pp` other layers.

    With a plan, ranks along `dp` are all of a pipeline: they are given the same model, before it is cut.
    """
    shared = config.facts() | _versions() | {"the passes": repr(order)}
    own: dict[str, Any] = {f"parameter {owner.layout.name}": _stored(owner.param) for owner in owners}
    if plan is not None:
        own |= {"the pipeline": repr(plan.pipeline), "the stages that the model is cut into": plan.digest()}
        shared |= {"which parameters are in which stage": plan.digest(boundaries=False)}
    own |= {f"buffer {name}": _described(buffer) for name, buffer in model.named_buffers()}
    slices = {
        f"parameter {owner.layout.name}": (
            "sliced" if is_marked(owner.param) else "a copy" if owner.sliced is None else str(owner.sliced.placement),
            "sequence-parallel" if owner.summed else "",
        )
        for owner in owners
    }
    return {"dp": shared | own, "tp": shared | slices, "pp": shared}


def _versions() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {"torch's version": torch.__version__, "zerofx's source": records.source()[:16], "Python's version": python}


def _stored(param: Tensor) -> tuple[Any, ...]:
    return (*_described(param), "sliced") if is_marked(param) else _described(param)


def _described(tensor: Tensor) -> tuple[Any, ...]:
    placements = [str(tensor.placements)] if isinstance(tensor, DTensor) else []
    return (
        tuple(tensor.shape),
        str(tensor.dtype),
        tensor.requires_grad,
        "meta" if tensor.is_meta else "real",
        *placements,
    )
