"""`zerofx.from_deepspeed`: reads a DeepSpeed configuration into the arguments of zerofx's own functions."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch.distributed as dist

from zerofx.config import PRECISIONS, STAGES, ConfigError
from zerofx.deepspeed_keys import IGNORED, READ, REFUSED, ZERO
from zerofx.deepspeed_recipes import AUTO, Optimizer, Scheduler, optimizer_of, scheduler_of
from zerofx.pipeline import Pipeline
from zerofx.scaling import DynamicLossScale

DTYPES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32"}
KNOWN = {*READ, *IGNORED, *REFUSED}
SECTIONS = {key.partition(".")[0] for key in KNOWN if "." in key}


@dataclass(frozen=True)
class FromDeepSpeed:
    """What a DeepSpeed configuration says, in zerofx's words; printing it shows all of it.

    Attributes:
        compile: arguments of `zerofx.compile`.
        train_step: arguments of `zerofx.train_step`.
        optimizer: what `make_optimizer` builds, or None.
        scheduler: what `make_scheduler` builds, or None.
        micro_batch: rows of a micro-batch on one rank, or None where the configuration does not say. A call of the step
            takes `micro_batch` times `microbatches` of them.
        ignored: keys that have no effect, and why.
    """

    compile: Mapping[str, Any]
    train_step: Mapping[str, Any]
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    micro_batch: int | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)

    def make_optimizer(self, parameters: Any) -> Any:
        """The torch optimizer that the configuration describes, for parameters of a compiled model or groups of them.

        Raises ConfigError where it describes none.
        """
        if self.optimizer is None:
            raise ConfigError("the configuration has no optimizer: build one of torch's from model.parameters()")
        return self.optimizer.make(parameters)

    def make_scheduler(self, optimizer: Any) -> Any:
        """The schedule of learning rates, for `zerofx.train_step(scheduler=)`; None where none is described."""
        return None if self.scheduler is None else self.scheduler.make(optimizer)

    def __str__(self) -> str:
        lines = [f"zerofx.compile(model{_written(self.compile)})"]
        lines.append(f"zerofx.train_step(model, loss_fn, optimizer{_written(self.train_step)})")
        lines += [str(each) for each in (self.optimizer, self.scheduler) if each is not None]
        if self.micro_batch is not None:
            lines.append(f"{self.micro_batch} rows in each micro-batch of a rank")
        return "\n".join([*lines, *(f"without effect: {key}, {why}" for key, why in self.ignored.items())])


def from_deepspeed(
    config: Mapping[str, Any] | str | Path, *, args: Any = None, ranks: int | None = None
) -> FromDeepSpeed:
    """The arguments that a DeepSpeed configuration has for `zerofx.compile` and `zerofx.train_step`.

        told = zerofx.from_deepspeed("ds_config.json")
        model = zerofx.compile(model, **told.compile)
        optimizer = told.make_optimizer(model.parameters())
        step = zerofx.train_step(model, loss_fn, optimizer, scheduler=told.make_scheduler(optimizer), **told.train_step)

    Args:
        config: the dictionary, or the path of a JSON file.
        args: a `transformers.TrainingArguments`, or what has its attributes, from which values of "auto" are taken, as
            Hugging Face's Trainer does. Without it "auto" is zerofx's default where there is one.
        ranks: data-parallel ranks, by which `train_batch_size` is divided. Default: those of the process group, or of
            the environment variable WORLD_SIZE.

    Raises ConfigError for the first key that asks for what zerofx does not have or does not know, for values that
    contradict each other, and for an "auto" that nothing tells.
    """
    given = _load(config)
    read = _Reader(given, args)
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise ConfigError(f"zerofx.from_deepspeed(ranks={ranks!r}) is not possible: ranks must be an int, 1 or more")
    _check_keys(given, read)
    precision, scale = _precision(read)
    accumulation, micro_batch = _batch(read, ranks)
    compile_with: dict[str, Any] = {"stage": read.number(f"{ZERO}.stage", 0, kind=int), **_buckets(read, precision)}
    if compile_with["stage"] not in STAGES:
        read.refuse(f"{ZERO}.stage", f"it must be one of {', '.join(map(str, STAGES))}")
    compile_with |= {"precision": precision} if precision else {}
    step_with: dict[str, Any] = {"loss_scale": scale} if scale is not None else {}
    clip = read.number("gradient_clipping", 0.0, "max_grad_norm")
    step_with |= {"clip": float(clip)} if clip else {}
    stages = read.get("pipeline.stages", None)
    if stages not in (None, AUTO):
        if type(stages) is not int or stages < 1:
            read.refuse("pipeline.stages", "it must be an int, 1 or more")
        compile_with["pipeline"] = Pipeline(stages, microbatches=accumulation)
    elif accumulation > 1:
        step_with["microbatches"] = accumulation
    if (wire := read.get("communication_data_type", None)) not in (None, AUTO):
        compile_with["reduce_dtype"] = _dtype(read, "communication_data_type", wire)
    ignored = {key: why for key, why in IGNORED.items() if read.get(key, None) is not None}
    optimizer = optimizer_of(read)
    frozen = MappingProxyType(compile_with), MappingProxyType(step_with)
    return FromDeepSpeed(*frozen, optimizer, scheduler_of(read, optimizer), micro_batch, MappingProxyType(ignored))


@dataclass(frozen=True)
class _Reader:
    """Reads values by their dotted keys."""

    given: Mapping[str, Any]
    args: Any

    def get(self, key: str, default: Any) -> Any:
        found: Any = self.given
        for name in key.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return default
            found = found[name]
        return found

    def resolved(self, key: str, default: Any, attribute: str = "") -> Any:
        """The value, where "auto" is that of the attribute of `args`, or else the default."""
        found = self.get(key, default)
        if found != AUTO:
            return found
        return getattr(self.args, attribute, default) if attribute and self.args is not None else default

    def number(self, key: str, default: Any, attribute: str = "", kind: type = float) -> Any:
        found = self.resolved(key, default, attribute)
        if found is None or found is default:
            return found
        whole = (
            isinstance(found, (int, float)) and not isinstance(found, bool) and (kind is float or found == int(found))
        )
        if not whole or found < 0:
            self.refuse(key, "it must be a number, 0 or more" if kind is float else "it must be an int, 0 or more")
        return kind(found)

    def flag(self, key: str, attribute: str = "") -> bool:
        found = self.resolved(key, False, attribute)
        if not isinstance(found, bool):
            self.refuse(key, "it must be true, false or 'auto'")
        return found

    def section(self, key: str) -> Mapping[str, Any]:
        """The keys of a section, none where it is missing."""
        found = self.get(key, None)
        if found is not None and not isinstance(found, Mapping):
            self.refuse(key, "it must be an object of keys")
        return found or {}

    def refuse(self, key: str, reason: str) -> NoReturn:
        raise ConfigError(f"zerofx.from_deepspeed: {key} is {self.get(key, None)!r}: {reason}")


def _load(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    try:
        found = json.loads(Path(config).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"zerofx.from_deepspeed takes a dictionary or the path of a JSON file: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"zerofx.from_deepspeed: {config} holds a {type(found).__name__} and not an object of keys")
    return found


def _check_keys(given: Mapping[str, Any], read: _Reader) -> None:
    """Raises ConfigError for the first key that is refused or not known."""
    for key, value in _keys(given):
        if key in REFUSED and not _is_off(value, REFUSED[key].off):
            read.refuse(key, REFUSED[key].remedy)
        if key in KNOWN:
            continue
        parent = key.rpartition(".")[0]
        while parent and parent not in KNOWN:
            parent = parent.rpartition(".")[0]
        if key in SECTIONS:
            inside = ", ".join(sorted(each.removeprefix(f"{key}.") for each in KNOWN if each.startswith(f"{key}."))[:4])
            read.refuse(key, f"it must be an object of keys, such as {inside}")
        if not parent:
            (close,) = difflib.get_close_matches(key, {*KNOWN, *SECTIONS}, 1, cutoff=0.0)
            read.refuse(key, f"zerofx knows no such key of DeepSpeed's; the closest one is {close!r}")


def _keys(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"zerofx.from_deepspeed: the key {prefix}{name!r} is no string: write it in quotes")
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in SECTIONS and key not in KNOWN:
            yield from _keys(value, f"{key}.")
        else:
            yield key, value


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing: a section that is not enabled, or whose members are all off, does not."""
    if not isinstance(value, Mapping):
        return any(type(value) is type(each) and value == each for each in off) or value == AUTO
    if "enabled" in value:
        return value["enabled"] in (False, AUTO)
    if "device" in value:
        return value["device"] in ("none", None)
    return all(_is_off(each, (*off, 1) if name.endswith("_size") else off) for name, each in value.items())


def _precision(read: _Reader) -> tuple[str | None, float | DynamicLossScale | None]:
    fp16, bf16 = read.flag("fp16.enabled", "fp16"), read.flag("bf16.enabled", "bf16")
    if fp16 and bf16:
        read.refuse("bf16.enabled", "fp16.enabled is true as well: choose one")
    if read.flag("torch_autocast.enabled"):
        if fp16 or bf16:
            read.refuse("torch_autocast.enabled", "fp16 or bf16 is enabled as well: choose one")
        return _dtype(read, "torch_autocast.dtype", read.get("torch_autocast.dtype", "bfloat16")), None
    if not fp16:
        return "bf16" if bf16 else None, None
    constant = read.number("fp16.loss_scale", 0)
    if constant:
        return "fp16", float(constant)
    return "fp16", DynamicLossScale(
        initial=2.0 ** read.number("fp16.initial_scale_power", 16),
        window=read.number("fp16.loss_scale_window", 1000, kind=int),
        hysteresis=read.number("fp16.hysteresis", 2, kind=int),
        minimum=float(read.number("fp16.min_loss_scale", 1)),
    )


def _dtype(read: _Reader, key: str, value: Any) -> str:
    name = str(value).removeprefix("torch.")
    found = DTYPES.get(name, name)
    if found not in PRECISIONS:
        read.refuse(key, f"it must be one of {', '.join(map(repr, PRECISIONS))}")
    return found


def _buckets(read: _Reader, precision: str | None) -> dict[str, Any]:
    """Sizes in elements become MiB of what travels: 2 bytes each in half precision, and else 4."""
    width = 2 if precision in ("fp16", "bf16") else 4
    sizes = [read.number(f"{ZERO}.{name}_bucket_size", None, kind=int) for name in ("reduce", "allgather")]
    made: dict[str, Any] = {}
    if known := [size for size in sizes if size]:
        made["bucket_mb"] = min(known) * width / 2**20
    persist = read.number(f"{ZERO}.stage3_param_persistence_threshold", None, kind=int)
    ahead = read.number(f"{ZERO}.stage3_prefetch_bucket_size", None, kind=int)
    made |= {} if persist is None else {"persist_below": persist}
    return made | ({} if ahead is None else {"prefetch": min(ahead, 1)})


def _batch(read: _Reader, ranks: int | None) -> tuple[int, int | None]:
    """How many micro-batches a step has, and the rows of one, by which DeepSpeed's three numbers agree."""
    total = read.number("train_batch_size", None, kind=int)
    rows = read.number("train_micro_batch_size_per_gpu", None, "per_device_train_batch_size", kind=int)
    parts = read.number("gradient_accumulation_steps", None, "gradient_accumulation_steps", kind=int)
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    stages = read.get("pipeline.stages", None)
    ranks //= stages if isinstance(stages, int) and stages and ranks % stages == 0 else 1
    for key, value in (("train_micro_batch_size_per_gpu", rows), ("gradient_accumulation_steps", parts)):
        if value == 0:
            read.refuse(key, "it must be 1 or more")
    if total is None:
        return parts or 1, rows
    if rows is None:
        rows = total // ((parts or 1) * ranks)
    if parts is None:
        parts = max(1, total // (rows * ranks)) if rows else 1
    if rows * parts * ranks != total:
        read.refuse(
            "train_batch_size",
            f"it is not {rows} rows of a micro-batch x {parts} micro-batches x {ranks} ranks: correct one of them",
        )
    return parts, rows


def _written(arguments: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in arguments.items())
