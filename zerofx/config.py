"""What the user asks of `zerofx.compile`, validated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zerofx.allowance import Memory, is_memory
from zerofx.cost import link

if TYPE_CHECKING:
    from zerofx.manager import Pass

STAGES = (0, 1, 2, 3)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
REDUCE_DTYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""Names of dtypes, and those of the programs' text."""
BACKENDS = ("inductor", "interpreter", "eager")
Rewrite = Callable[[tuple["Pass", ...]], tuple["Pass", ...]]


class ConfigError(ValueError):
    """An argument has a value that is not allowed; `told` has its name, the value and what is, where that is all."""

    told: tuple[str, object, str] | None = None


class ModelError(ValueError):
    """The model holds something that zerofx.compile cannot shard."""


def refusal(caller: str, field: str, value: object, allowed: str) -> ConfigError:
    """What a function raises for a value of an argument that must be something else."""
    error = ConfigError(f"{caller}({field}={value!r}) is not possible: {field} must be {allowed}")
    error.told = field, value, allowed
    return error


def _refuse(field: str, value: object, allowed: str) -> None:
    raise refusal("zerofx.compile", field, value, allowed)


def refuse_values(init_fn: object, progress: object) -> None:
    """Raises ConfigError for a value of the arguments that passes and backends do not read."""
    if init_fn is not None and not callable(init_fn):
        _refuse("init_fn", init_fn, "a function of a module that writes its parameters and buffers, or None")
    if progress is not None and not isinstance(progress, bool):
        _refuse("progress", progress, "None, True or False")


@dataclass(frozen=True)
class Config:
    """The arguments of `zerofx.compile` that the passes and backends read."""

    stage: int = 3
    persist_below: int = 10_000
    bucket_mb: float | None = None
    prefetch: int = 1
    memory: Memory | None = None
    recompute: float | None = None
    sync_init: bool = True
    backend: str = "inductor"
    passes: Rewrite | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    per_block: bool = False
    precision: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in STAGES:
            _refuse("stage", self.stage, f"one of {', '.join(map(str, STAGES))}")
        if type(self.persist_below) is not int or self.persist_below < 0:
            _refuse("persist_below", self.persist_below, "a number of elements, 0 or more")
        if self.bucket_mb is not None and (not isinstance(self.bucket_mb, (int, float)) or not self.bucket_mb > 0):
            _refuse("bucket_mb", self.bucket_mb, "a number of MiB, more than 0, or None")
        if type(self.prefetch) is not int or self.prefetch < 0:
            _refuse("prefetch", self.prefetch, "a number of buckets, 0 or more")
        if self.memory is not None and not is_memory(self.memory):
            _refuse("memory", self.memory, "bytes such as '20GiB', a fraction of the device's more than 0.0, or None")
        if self.recompute is not None and (type(self.recompute) not in (int, float) or not 0 <= self.recompute <= 1):
            _refuse("recompute", self.recompute, "a share of the activations, from 0 to 1, or None")
        if self.backend not in BACKENDS:
            _refuse("backend", self.backend, f"one of {', '.join(map(repr, BACKENDS))}")
        if self.passes is not None and not callable(self.passes):
            _refuse("passes", self.passes, "a function from the default tuple of passes to another tuple")
        for field, names in (("precision", PRECISIONS), ("reduce_dtype", REDUCE_DTYPES)):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, str) and value in names):
                _refuse(field, value, f"one of {', '.join(map(repr, names))}, or None")
        if self.dynamic not in (None, True, False):
            _refuse("dynamic", self.dynamic, "None, True or False")
        for field in ("memory", "recompute") if self.backend == "eager" else ():
            if getattr(self, field):
                _refuse(field, getattr(self, field), "left out with backend='eager', which makes no graph to decide on")
        if self.memory is not None and self.per_block is True:
            _refuse(
                "memory", self.memory, "left out with per_block=True: no block's graph foresees what the others hold"
            )
        for field in ("sync_init", "fullgraph", "per_block"):
            if not isinstance(getattr(self, field), bool):
                _refuse(field, getattr(self, field), "True or False")

    def bucket_bytes(self, backend: str) -> int:
        """The most bytes of one bucket on a process group's backend."""
        return link(backend).bucket_bytes() if self.bucket_mb is None else int(self.bucket_mb * 2**20)

    def facts(self) -> dict[str, Any]:
        """What must be equal on every rank."""
        return {
            "stage": self.stage,
            "persist_below": self.persist_below,
            "bucket_mb": self.bucket_mb,
            "prefetch": self.prefetch,
            "memory": self.memory,
            "recompute": self.recompute,
            "sync_init": self.sync_init,
            "backend": self.backend,
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph,
            "per_block": self.per_block,
            "precision": self.precision,
            "reduce_dtype": self.reduce_dtype,
        }
