"""The optimizer and the schedule that a DeepSpeed configuration describes, as torch's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import optim
from torch.optim.lr_scheduler import LambdaLR

from zerofx.deepspeed_rates import Factor, warmup, warmup_cosine, warmup_decay

AUTO = "auto"
OPTIMIZERS: Mapping[str, tuple[type[optim.Optimizer], tuple[str, ...]]] = {
    "adam": (optim.Adam, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "adamw": (optim.AdamW, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "sgd": (optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    "adagrad": (optim.Adagrad, ("lr", "eps", "weight_decay")),
}
FLAGS = {"amsgrad", "nesterov"}
SWITCHES = {"torch_adam", "adam_w_mode", "fused", "bias_correction", "set_grad_none", "freeze_step", "cuda_aware"}
TRAINER = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "eps": "adam_epsilon",
    "warmup_max_lr": "learning_rate",
    "warmup_num_steps": "warmup_steps",
    "total_num_steps": "max_steps",
}
"""Attributes of `transformers.TrainingArguments` that "auto" stands for."""

SCHEDULES: Mapping[str, Callable[..., Factor]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
}


class Reader(Protocol):
    """What reads a configuration."""

    @property
    def args(self) -> Any: ...
    def get(self, key: str, default: Any) -> Any: ...
    def section(self, key: str) -> Mapping[str, Any]: ...
    def refuse(self, key: str, reason: str) -> NoReturn: ...


@dataclass(frozen=True)
class Optimizer:
    """A class of torch.optim and its arguments."""

    kind: type[optim.Optimizer]
    arguments: Mapping[str, Any]

    def make(self, parameters: Any) -> optim.Optimizer:
        return self.kind(parameters, **self.arguments)

    def __str__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"torch.optim.{self.kind.__name__}(model.parameters(){given})"


@dataclass(frozen=True)
class Scheduler:
    """One of DeepSpeed's schedules, and the arguments of its function in `zerofx.deepspeed_rates`."""

    name: str
    arguments: Mapping[str, Any]

    def make(self, optimizer: optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, SCHEDULES[self.name](**self.arguments))

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"LambdaLR(optimizer, {SCHEDULES[self.name].__name__}({given}))"


def optimizer_of(read: Reader) -> Optimizer | None:
    kind = read.get("optimizer.type", None)
    if kind is None:
        return None
    name, params = str(kind).lower(), read.section("optimizer.params")
    if name == "adam" and params.get(
        "adam_w_mode", True
    ):  # DeepSpeed's Adam decays weights as AdamW, unless told not to
        name = "adamw"
    if name not in OPTIMIZERS:
        known = ", ".join(sorted(made.__name__ for made, _ in OPTIMIZERS.values()))
        read.refuse("optimizer.type", f"it is none of {known}: leave it out, and build one of torch's yourself")
    made, allowed = OPTIMIZERS[name]
    if params.get("bias_correction", True) is not True:
        read.refuse("optimizer.params.bias_correction", "torch's optimizers correct the bias: leave it out")
    arguments: dict[str, Any] = {}
    for key, value in params.items():
        if key in SWITCHES:
            continue
        if key not in allowed:
            takes = f"torch.optim.{made.__name__} takes {', '.join(allowed)}{_closest(key, allowed)}"
            read.refuse(f"optimizer.params.{key}", takes)
        told = _auto(read, key) if value == AUTO else value
        if told is not None:
            arguments[key] = _value(read, f"optimizer.params.{key}", key, told)
    if name == "sgd" and "lr" not in arguments:
        arguments["lr"] = 1e-3
    return Optimizer(made, arguments)


def _closest(key: str, known: Iterable[str]) -> str:
    """Names the key that was perhaps meant."""
    found = difflib.get_close_matches(key, known, 1)
    return f"; the closest one is {found[0]!r}" if found else ""


def _value(read: Reader, where: str, key: str, value: Any) -> Any:
    """The value of an option, of the kind that torch's optimizers and schedules take."""
    if key == "betas":
        if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))):
            read.refuse(where, "it must be a list of two numbers")
        return tuple(value)
    if key in FLAGS:
        if not isinstance(value, bool):
            read.refuse(where, "it must be true or false")
    elif not _is_number(value):
        read.refuse(where, "it must be a number")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _auto(read: Reader, key: str) -> Any:
    """What "auto" is by the Trainer's arguments; None leaves torch's default."""
    if read.args is None:
        return None
    if key == "betas":
        return read.args.adam_beta1, read.args.adam_beta2
    return getattr(read.args, TRAINER.get(key, ""), None)


def scheduler_of(read: Reader, optimizer: Optimizer | None) -> Scheduler | None:
    name = read.get("scheduler.type", None)
    if name is None:
        return None
    if name not in SCHEDULES:
        remedy = f"it is none of {', '.join(SCHEDULES)}: give torch.optim.lr_scheduler.LambdaLR a function of the step"
        read.refuse("scheduler.type", remedy)
    known: dict[str, Any] = {"warmup_type": "log", "warmup_min_lr": 0.0, "warmup_num_steps": 1000}
    known |= {} if name == "WarmupCosineLR" else {"warmup_max_lr": 1e-3}
    known |= {} if name == "WarmupLR" else {"total_num_steps": None}
    known |= {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001} if name == "WarmupCosineLR" else {}
    given = read.section("scheduler.params")
    params = {key: value for key, value in given.items() if key != "last_batch_iteration"}
    for key, value in params.items():
        if key not in known:
            read.refuse(f"scheduler.params.{key}", f"{name} has {', '.join(known)}{_closest(key, known)}")
        known[key] = value
        if value == AUTO:
            known[key] = 0.0 if key == "warmup_min_lr" else _auto(read, key)
            if known[key] is None or (key == "total_num_steps" and known[key] <= 0):
                read.refuse(f"scheduler.params.{key}", "give a number, or transformers.TrainingArguments as args=")
        if key != "warmup_type":
            _value(read, f"scheduler.params.{key}", key, known[key])
    if known["warmup_type"] not in ("log", "linear"):
        read.refuse("scheduler.params.warmup_type", "it must be 'log' or 'linear'")
    return Scheduler(name, _arguments(read, name, known, optimizer))


def _arguments(read: Reader, name: str, known: Mapping[str, Any], optimizer: Optimizer | None) -> dict[str, Any]:
    made: dict[str, Any] = {"steps": known["warmup_num_steps"], "log": known["warmup_type"] == "log"}
    if name != "WarmupLR":
        if known["total_num_steps"] is None:
            read.refuse("scheduler.params", f"{name} needs total_num_steps")
        made["total"] = known["total_num_steps"]
    if name == "WarmupCosineLR":
        return {"low": known["warmup_min_ratio"], "end": known["cos_min_ratio"], **made}
    highest = known["warmup_max_lr"]
    rate = None if optimizer is None else optimizer.arguments.get("lr")
    if rate is not None and not torch.isclose(torch.tensor(float(rate)), torch.tensor(float(highest))):
        read.refuse(
            "scheduler.params.warmup_max_lr",
            f"the optimizer's lr is {rate}, which a schedule of torch's multiplies: make both the same",
        )
    return {"low": known["warmup_min_lr"] / highest if highest else 0.0, **made}
