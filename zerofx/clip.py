"""`zerofx.clip_grad_norm_`: torch's, over all ranks that hold parts of a model, however these are arranged."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx import _torch
from zerofx.boundary import Group, clip_factor
from zerofx.config import ConfigError
from zerofx.norm import local_gradients, powers
from zerofx.step_arguments import device_of
from zerofx.unreduced import WAITING


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients of a compiled model, in place, by their norm over all ranks; returns that norm, 0-dim.

    For loops of your own; zerofx.train_step clips by itself. Call it on all ranks together. Unlike torch's it counts
    each parameter once over data-parallel, tensor-parallel and pipeline-parallel ranks: one that is sliced, which its
    placements or Megatron's `tensor_model_parallel` say, on every tensor-parallel rank, and others on one.

    Args:
        model_or_params: what zerofx.compile returned, or parameters of one such model.
        max_norm: the largest norm that gradients keep, 0 or more.
        norm_type: the p of the norm, above 0, or infinity.
        error_if_nonfinite: raise RuntimeError, on all ranks, for a norm that is not finite.

    Raises:
        ConfigError: a norm is not possible, or parameters are of no compiled model, or of several.
        RuntimeError: gradients wait to be reduced.
    """
    p = float(norm_type)
    if isnan(p) or p <= 0:
        raise ConfigError(f"zerofx.clip_grad_norm_(norm_type={norm_type!r}) is not possible: pass a p above 0, or inf")
    if isnan(float(max_norm)) or float(max_norm) < 0:
        raise ConfigError(f"zerofx.clip_grad_norm_(max_norm={max_norm!r}) is not possible: pass a norm of 0 or more")
    model, params = _model_and_params(model_or_params)
    engine = model.__dict__["_zerofx_engine"]
    gradients = local_gradients(params, engine.parallel)
    total = powers(gradients, p, torch.zeros((), device=device_of(model)))
    for group in (engine.step_group, *map(Group.of_axis, engine.parallel.axes)):
        group.reduce(total, "the norm of the gradients", dist.ReduceOp.MAX if p == inf else dist.ReduceOp.SUM)
    norm = (total if p == inf else total.pow(1.0 / p)).float()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped: pass error_if_nonfinite=False to "
            "scale them all the same"
        )
    factor = clip_factor(norm, float(max_norm))
    assert factor is not None
    for tensors in gradients.values():
        _torch.multiply(tensors, factor)
    return norm


def _model_and_params(given: Any) -> tuple[nn.Module, list[Tensor]]:
    if isinstance(given, nn.Module):
        if "_zerofx_engine" not in given.__dict__:
            raise ConfigError(
                f"zerofx.clip_grad_norm_ was given a {type(given).__name__} that zerofx.compile was not called on: "
                "pass the compiled model"
            )
        return given, list(given.parameters())
    params = [given] if isinstance(given, Tensor) else list(given)
    models = [model for each in list(WAITING.known) if (model := each.engine.model()) is not None]
    wanted = {id(param) for param in params}
    for model in models:
        if wanted and wanted <= {id(param) for param in model.parameters()}:
            return model, params
    raise ConfigError(
        f"zerofx.clip_grad_norm_ was given {len(params)} parameter(s), not all of one model that zerofx.compile was "
        "called on: pass the compiled model, or parameters of it"
    )
