"""What the user asks of `zerofx.train_step`, validated once, and agreed on over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

import torch
from torch import nn, optim

from zerofx import _torch
from zerofx.agree_all import agree_all
from zerofx.batches import MicroBatch, micro_batches
from zerofx.config import ConfigError
from zerofx.engine import Engine
from zerofx.pipeline import Pipeline
from zerofx.scaling import DynamicLossScale
from zerofx.stale import STALE
from zerofx.step_fused import refuse_fused
from zerofx.unfit import unfit
from zerofx.unsupported import STEP_ARGUMENTS, refuse_arguments

ACCUMULATE = ("auto", "defer", "reduce")
Scale = float | str | DynamicLossScale | None


@dataclass(frozen=True)
class StepArguments:
    """The arguments of `zerofx.train_step` or `zerofx.eval_step`, which is the `caller`."""

    caller: str
    loss_fn: Callable[..., Any]
    loss_weight: Callable[..., Any] | None = None
    microbatches: int = 1
    clip: float | None = None
    accumulate: str = "auto"
    loss_scale: Scale = None
    optimizer: Any = None
    scheduler: Any = None
    fuse_optimizer: bool = False
    callback: Callable[..., Any] | None = None
    others: tuple[str, ...] = ()

    def refuse(self) -> None:
        """Raises ConfigError for the first argument that is not possible."""
        taken = [each.name for each in fields(self) if each.name not in ("caller", "others")]
        refuse_arguments(self.caller, self.others, taken, STEP_ARGUMENTS)
        if not callable(self.loss_fn):
            self._refuse("loss_fn", "a function of the model and a batch that returns a scalar")
        if self.loss_weight is not None and not callable(self.loss_weight):
            self._refuse("loss_weight", "a function of a batch that returns a number, such as its tokens, or None")
        if type(self.microbatches) is not int or self.microbatches < 1:
            self._refuse("microbatches", "an int, 1 or more")
        if self.clip is not None and not _is_positive(self.clip):
            self._refuse("clip", "a norm above 0, or None")
        if self.accumulate not in ACCUMULATE:
            self._refuse("accumulate", f"one of {', '.join(map(repr, ACCUMULATE))}")
        dynamic = self.loss_scale in ("dynamic", None) or isinstance(self.loss_scale, DynamicLossScale)
        if not dynamic and not _is_positive(self.loss_scale):
            self._refuse("loss_scale", "'dynamic', a zerofx.DynamicLossScale, a number above 0, or None")
        if self.callback is not None and not callable(self.callback):
            self._refuse("callback", "a function of the step's result and its batch, or None")
        if type(self.fuse_optimizer) is not bool:
            self._refuse("fuse_optimizer", "True or False")

    def refuse_optimizer(self, model: nn.Module) -> None:
        """Raises ConfigError for an optimizer or a scheduler that cannot train the model a step at a time."""
        optimizer, scheduler = self.optimizer, self.scheduler
        if not isinstance(optimizer, optim.Optimizer):
            self._refuse("optimizer", "a torch.optim.Optimizer, built from model.parameters() after zerofx.compile")
        if isinstance(optimizer, optim.LBFGS):
            self._refuse("optimizer", "one that steps on given gradients: LBFGS calls the loss again, in a loop")
        STALE.check(optimizer, (), {})
        known = {id(param) for param in model.parameters()}
        for place, group in enumerate(optimizer.param_groups):
            foreign = [param for param in group["params"] if id(param) not in known]
            if foreign:
                raise ConfigError(
                    f"{self.caller} was given an optimizer whose group {place} holds {len(foreign)} parameter(s), the "
                    f"first of shape {tuple(foreign[0].shape)}, that are not of the model: build it from "
                    "model.parameters(), after zerofx.compile"
                )
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            self._refuse("scheduler", "one of torch.optim.lr_scheduler, or None")
        if isinstance(scheduler, optim.lr_scheduler.ReduceLROnPlateau):
            self._refuse("scheduler", "one that counts steps: call ReduceLROnPlateau.step yourself, with its metric")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            self._refuse("scheduler", "one that was built from the optimizer that the step is given: pass that one")

    def split(self, engine: Engine, batch: tuple[Any, ...], named: Mapping[str, Any]) -> list[MicroBatch]:
        """The batch in micro-batches: as many as were asked for, or as the model's pipeline runs.

        A pipeline evaluates a batch of fewer rows in as many micro-batches as it has rows.
        """
        pipelined = engine.pipelined
        count = self.microbatches if pipelined is None else pipelined.pipeline.microbatches
        fewer = pipelined is not None and self.optimizer is None
        return micro_batches(batch, named, count, self.loss_weight is not None, fewer, rest=self.optimizer is None)

    def facts(self) -> Mapping[str, Any]:
        """What must be equal on every rank."""
        groups = [len(group["params"]) for group in self.optimizer.param_groups] if self.optimizer else []
        return {
            "the function": self.caller,
            "microbatches": self.microbatches,
            "clip": self.clip,
            "accumulate": self.accumulate,
            "loss_scale": self.loss_scale,
            "whether there is a loss_weight": self.loss_weight is not None,
            "the optimizer": (type(self.optimizer).__name__, groups),
            "the scheduler": type(self.scheduler).__name__,
            "fuse_optimizer": self.fuse_optimizer,
        }

    def _refuse(self, field: str, allowed: str) -> None:
        value = getattr(self, field)
        shown = repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"
        raise ConfigError(f"{self.caller}({field}={shown}) is not possible: {field} must be {allowed}")


def agreed_engine(model: nn.Module, arguments: StepArguments) -> Engine:
    """The model's engine, where the arguments are right and those of all ranks; else one error on each rank."""
    engine: Engine | None = model.__dict__.get("_zerofx_engine") if isinstance(model, nn.Module) else None
    if engine is None:
        raise ConfigError(
            f"{arguments.caller} needs a model that zerofx.compile was called on, not a {type(model).__name__}: call "
            "zerofx.compile(model) first"
        )
    problem: Exception | None = None
    facts: Mapping[str, Any] = {}
    try:
        arguments.refuse()
        if arguments.caller == "zerofx.train_step":
            arguments.refuse_optimizer(model)
            if arguments.fuse_optimizer:
                refuse_fused(arguments, engine.config)
        facts = arguments.facts()
        if engine.pipelined is not None:
            _refuse_beside_pipeline(arguments, engine.pipelined.pipeline)
            facts = {
                **facts,
                "the optimizer": type(arguments.optimizer).__name__,
            }  # each stage has parameters of its own
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    everyone = engine.step_group
    group = _torch.process_group(everyone.name) if everyone.world > 1 else None
    agree_all(dict.fromkeys(("dp", "tp"), facts), problem, group, engine.parallel, caller=arguments.caller)
    return engine


def _refuse_beside_pipeline(arguments: StepArguments, pipeline: Pipeline) -> None:
    """Raises ConfigError for what the model's pipeline has decided already."""
    if arguments.microbatches not in (1, pipeline.microbatches):
        raise ConfigError(
            f"{arguments.caller}(microbatches={arguments.microbatches}) is not possible: the model's pipeline runs "
            f"{pipeline.microbatches} micro-batches, leave microbatches out"
        )
    if arguments.accumulate == "reduce":
        raise ConfigError(
            f"{arguments.caller}(accumulate='reduce') is not possible: a pipeline reduces whole gradients once a step, "
            "leave accumulate out"
        )
    if arguments.fuse_optimizer:
        raise ConfigError(
            f"{arguments.caller}(fuse_optimizer=True) does not go with a pipeline, whose gradients of several "
            "micro-batches are added up before any update: leave it out"
        )


def scale_asked(loss_scale: Scale, precision: str | None) -> float | DynamicLossScale | None:
    """The loss scale that is asked for; without a word, a dynamic one for a model that runs in fp16."""
    if loss_scale == "dynamic" or (loss_scale is None and precision == "fp16"):
        return DynamicLossScale()
    assert not isinstance(loss_scale, str)
    return loss_scale


def defers(accumulate: str, engine: Engine) -> bool:
    """Whether whole gradients wait for the last micro-batch, which alone reduces them.

    That is asked for, or left to zerofx: where they fit into what `memory` leaves, by the forecast; without `memory`
    at stages 0 and 1.
    """
    if accumulate != "auto":
        return accumulate == "defer"
    if engine.config.stage == 0 or engine.config.memory is None:
        return engine.config.stage <= 1
    settled = engine.settled
    if settled is None or settled.allowed is None:
        return False
    world = engine.mesh.axis("dp").size
    return settled.deferred + engine.layout.gradient_bytes(world) <= settled.allowed


def refuse_call(arguments: StepArguments, model: nn.Module, part: MicroBatch, error: TypeError) -> None:
    """Raises TypeError where what a step was called with does not fit the parameters of loss_fn."""
    if why := unfit(arguments.loss_fn, (model, *part.args), part.kwargs):
        given = ", ".join([*(type(each).__name__ for each in part.args), *part.kwargs])
        raise TypeError(
            f"the step was called with ({given}), and loss_fn(model, *batch) does not take that ({why}): call "
            "step(*batch), where each argument of loss_fn behind the model is one of the step"
        ) from error


def device_of(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and isfinite(value)
