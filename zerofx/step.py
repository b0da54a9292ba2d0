"""`zerofx.train_step`: a whole step in one call, from the batch to the updated parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor, nn, optim

from zerofx.batches import MicroBatch
from zerofx.boundary import clip_factor, totals, update
from zerofx.engine import Engine
from zerofx.notes import note_call
from zerofx.scaling import DynamicLossScale, LossScale
from zerofx.step_arguments import StepArguments, agreed_engine, defers, device_of, refuse_call, scale_asked
from zerofx.step_fused import refuse_hooks
from zerofx.updates import Updates


class StepResult(NamedTuple):
    """What a step made, as 0-dim tensors on the model's device: printing one, or `float()`, waits for the step.

    Attributes:
        loss: the loss of the global batch, float32.
        grad_norm: the 2-norm of its gradient before clipping, float32; not finite where the step overflowed.
        skipped: whether gradients overflowed, so that nothing was updated; always false without a loss scale.
        loss_scale: the scale that the loss of this step had; 1.0 without one.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor


def train_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: optim.Optimizer,
    *,
    microbatches: int = 1,
    clip: float | None = None,
    accumulate: str = "auto",
    loss_scale: float | str | DynamicLossScale | None = None,
    loss_weight: Callable[..., Any] | None = None,
    scheduler: Any = None,
    fuse_optimizer: bool = False,
    callback: Callable[..., Any] | None = None,
    **others: Never,
) -> TrainStep:
    """A function that trains a compiled model on one batch: `result = step(*batch)`. Call it on all ranks together.

    A step runs forward and backward for each micro-batch, agrees with the other ranks on loss, norm and overflow in one
    all-reduce of three numbers, clips, updates, steps the scheduler and frees the gradients. Adam, AdamW and SGD are
    run fused on local tensors, where no other way was asked for (`foreach=True`, `fused=False`, `capturable=True`) and
    no hooks are on the optimizer: their kernel unscales, clips and skips, and the host waits for nothing. For other
    optimizers a step with a loss scale waits for the verdict.

    Args:
        model: what zerofx.compile returned.
        loss_fn: `loss_fn(model, *batch)`, or `loss_fn(model, **batch)` for a mapping, returns a scalar: the mean over
            the rows that it is given, or, with `loss_weight`, the sum over what that counts.
        optimizer: built from `model.parameters()` after zerofx.compile. Its options, states and hooks are its own, as
            outside; hooks before its step see unscaled, clipped gradients.
        microbatches: how many parts the batch is run in. Rows are split along dim 0, the first parts having one more
            where they do not divide; the mean is still that over the rows of this rank's batch.
        clip: the largest 2-norm of the gradient of all of the optimizer's parameters, as in clip_grad_norm_.
        accumulate: `reduce` reduces the gradients of each micro-batch and adds up parts; `defer` adds up whole ones and
            reduces them once. `auto` defers where nothing speaks against it: at stages 0 and 1, and with `memory` where
            whole gradients fit into what it leaves by the forecast.
        loss_scale: `dynamic` or a DynamicLossScale follows overflows by DeepSpeed's rule; a number is constant. In both
            a step whose gradients are not finite on any rank is skipped on all. None: a dynamic one for a model with
            precision="fp16", and none otherwise.
        loss_weight: `loss_weight(*batch)` returns how much a micro-batch counts, such as its tokens, as a number or a
            0-dim tensor. The loss is then the sum of all losses over the sum of all weights, over micro-batches and
            ranks; without it micro-batches count by their rows and ranks equally.
        scheduler: one of torch.optim.lr_scheduler, stepped behind each step that is not skipped. Together with a loss
            scale this makes the host wait for each step.
        fuse_optimizer: whether the backward updates each parameter as soon as its gradient is reduced, and frees that:
            at no time are all gradients there. It goes with elementwise optimizers of torch's, one micro-batch and
            neither clip nor loss scale, which need all gradients first. A parameter that is also read outside of
            graphs, or by a graph whose output the loss ignores, is updated behind the backward. Parameters then have
            no gradients for hooks to see, and a step that raises may have updated some of them.
        callback: `callback(result, *batch)`, or `callback(result, **batch)` for a mapping, runs behind each step, such
            as a `zerofx.TensorBoard`; ranks may have different ones, or none.
        others: no other argument is taken.

    Raises:
        ConfigError: an argument is not possible, or not the model's.
        RankMismatchError: ranks differ in the arguments.

    A step raises ValueError for a batch that cannot be split and for an iterator with fewer micro-batches left,
    TypeError for a loss that is no scalar or depends on no parameter that is trained, RuntimeError where parameters
    have gradients already, and LossScaleError where gradients overflow at the smallest scale; on GPUs a few steps
    later, since no step waits for that. A rank that raises alone ends the others by the watch.
    """
    arguments = StepArguments(
        "zerofx.train_step",
        loss_fn,
        loss_weight,
        microbatches,
        clip,
        accumulate,
        loss_scale,
        optimizer,
        scheduler,
        fuse_optimizer,
        callback,
        tuple(others),
    )
    return TrainStep(model, agreed_engine(model, arguments), arguments)


class TrainStep:
    """What zerofx.train_step returns. Its state dict is that of the loss scale, equal on all ranks."""

    def __init__(self, model: nn.Module, engine: Engine, arguments: StepArguments) -> None:
        self.model, self.engine, self.arguments = model, engine, arguments
        self.optimizer: optim.Optimizer = arguments.optimizer
        self.group = engine.step_group
        self.device = device_of(model)
        self.scale = LossScale(scale_asked(arguments.loss_scale, engine.config.precision), self.device)

    def __call__(self, *batch: Any, **named: Any) -> StepResult:
        """Trains on this rank's part of a batch: trees of tensors that share dim 0, or an iterator of micro-batches.

        From an iterator it takes `microbatches` of them; each is a tuple or list of arguments, a mapping of named ones,
        or the only argument.
        """
        with noting(self.engine):
            result = self._step(batch, named)
            if self.arguments.callback is not None:
                self.arguments.callback(result, *batch, **named)
            return result

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.scale.load_state_dict(saved)

    def _step(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        given = self.arguments
        self.scale.check()
        pipelined, scale = self.engine.pipelined, self.scale.scale
        updates = None
        if given.fuse_optimizer:
            refuse_hooks(given.caller, self.optimizer)
            updates = Updates(self.optimizer, self.model, self.engine.parallel)

        def split() -> list[MicroBatch]:
            self._refuse_gradients()
            return given.split(self.engine, batch, named)

        if pipelined is not None:
            loss, weight = pipelined.train(split, lambda part: loss_of(self.model, given, part), scale)
            return self._end(loss, weight, scale, None)
        parts = split()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        weight = torch.zeros_like(loss)
        defer = len(parts) > 1 and defers(given.accumulate, self.engine)
        for place, part in enumerate(parts):
            with self.engine.micro_batch(place == 0, place == len(parts) - 1, defer, updates):
                found, weighs = loss_of(self.model, given, part)
                torch.autograd.backward(found if scale is None else found * scale)
            loss += found.detach()
            weight += weighs
        return self._end(loss, weight, scale, updates)

    def _end(self, loss: Tensor, weight: Tensor, scale: Tensor | None, updates: Updates | None) -> StepResult:
        """Updates the parameters by the gradients of the sum of the losses, each of them the mean over ranks."""
        if updates is not None:
            updates.refuse_late_gradients()
        found = totals(self.optimizer, loss, weight, self.group, self.engine.parallel, updates)
        factor = None if scale is None else 1.0 / scale.double()
        mean = found.loss / self.group.replicas
        if self.arguments.loss_weight is not None:
            share = self.group.replicas / torch.where(found.weight == 0, 1.0, found.weight)
            factor = share if factor is None else share * factor
            mean = found.loss / found.weight
        norm = found.squares.sqrt() if factor is None else found.squares.sqrt() * factor
        clipped = clip_factor(norm, self.arguments.clip)
        if clipped is not None:
            factor = clipped if factor is None else clipped * factor
        overflow = ~found.squares.isfinite()
        update(self.optimizer, factor, None if scale is None else overflow)
        skipped = torch.zeros_like(overflow) if scale is None else overflow
        self.model.zero_grad()
        if self.arguments.scheduler is not None and not (scale is not None and skipped.item()):
            self.arguments.scheduler.step()
        if scale is not None:
            self.scale.update(overflow)
        used = torch.ones_like(mean, dtype=torch.float32) if scale is None else scale
        return StepResult(mean.float(), norm.float(), skipped, used)

    def _refuse_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            if any(param.grad is not None for param in group["params"]):
                raise RuntimeError(
                    "parameters have gradients before the step, which would mix with those of the batch: call "
                    "model.zero_grad() after a backward of your own, or after a step that raised"
                )


def loss_of(model: nn.Module, arguments: StepArguments, part: MicroBatch) -> tuple[Tensor, Any]:
    """A micro-batch's loss as it counts in the sum over all of them, and its weight."""
    try:
        loss = arguments.loss_fn(model, *part.args, **part.kwargs)
    except TypeError as error:
        refuse_call(arguments, model, part, error)
        raise
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            f"loss_fn returned {found} and not a scalar of floating point: return the mean over the micro-batch, or "
            "the sum together with loss_weight"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TypeError(
            "loss_fn returned a loss that no trained parameter has a part in, so that there is no gradient: return it "
            "without detach() or item(), and call the model outside of torch.no_grad()"
        )
    if arguments.loss_weight is not None:
        weight = arguments.loss_weight(*part.args, **part.kwargs)
        return loss.reshape(()), weight.detach() if isinstance(weight, Tensor) else weight
    return (loss if part.share == 1.0 else loss * part.share).reshape(()), part.share


@contextmanager
def noting(engine: Engine) -> Iterator[None]:
    """Notes what leaves a step, for the other ranks to hear, and forgets what has left an earlier one."""
    note_call(engine.step_group.name)
    try:
        yield
    except BaseException as error:
        note_call(engine.step_group.name, error)
        raise
