"""What `zerofx.train_step` refuses with `fuse_optimizer=True`, since the backward updates parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import optim

from zerofx import _torch
from zerofx.config import Config, ConfigError
from zerofx.optimizers import ELEMENTWISE

if TYPE_CHECKING:
    from zerofx.step_arguments import StepArguments


def refuse_fused(given: StepArguments, config: Config) -> None:
    """Raises ConfigError for the first argument that does not go with it, and for what refuse_hooks refuses."""
    for why in _reasons(given, config):
        raise ConfigError(f"{given.caller}(fuse_optimizer=True) does not go with {why}")
    refuse_hooks(given.caller, given.optimizer)


def _reasons(given: StepArguments, config: Config) -> Iterator[str]:
    early = "parameters are updated before all gradients are there"
    if given.microbatches != 1:
        added = "gradients of several are added up before any update, which saves nothing"
        yield f"microbatches={given.microbatches}: {added}; leave out one of both"
    if given.clip is not None:
        yield f"clip={given.clip}: {early}, and their norm is known only then; leave out one of both"
    if given.loss_scale is not None or config.precision == "fp16":
        remedy = "train with precision='bf16', or leave out fuse_optimizer"
        yield f"a loss scale: {early}, so that a step cannot be skipped; {remedy}"
    if given.loss_weight is not None:
        remedy = "return the mean from loss_fn, or leave out fuse_optimizer"
        yield f"loss_weight: gradients are divided when all weights are known; {remedy}"
    if config.backend == "eager":
        yield "backend='eager', which makes no graph to put updates into; leave out one of both"
    if type(given.optimizer) not in ELEMENTWISE:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        yield f"{type(given.optimizer).__name__}: take one of torch's own elementwise optimizers, {known}"
    if any(group.get("differentiable") for group in given.optimizer.param_groups):
        yield "differentiable=True: make the optimizer without it"


def refuse_hooks(caller: str, optimizer: optim.Optimizer) -> None:
    """Raises ConfigError for hooks that would not see the gradients which they are there for."""
    if _torch.has_step_hooks(optimizer):
        raise ConfigError(
            f"{caller}(fuse_optimizer=True) does not go with a hook before the optimizer's step, for gradients are "
            "gone by then: use register_step_post_hook, or leave out fuse_optimizer"
        )
    params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param._backward_hooks or _torch.post_accumulate_hooks(param) for param in params):
        raise ConfigError(
            f"{caller}(fuse_optimizer=True) does not go with hooks on parameters, which never have a gradient: remove "
            "them, or leave out fuse_optimizer"
        )
