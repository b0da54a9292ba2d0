"""`zerofx.TensorBoard`: writes what steps make as scalars."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofx.config import ConfigError


class TensorBoard:
    """A callback of `zerofx.train_step` that writes scalars for TensorBoard, on the first rank alone.

        with zerofx.TensorBoard("runs/1", tokens=lambda x, y: x.numel()) as board:
            step = zerofx.train_step(model, loss_fn, optimizer, callback=board)

    It writes `loss`, `grad_norm`, `loss_scale`, `skipped`, `memory_bytes`, `steps_per_second` and, with `tokens`,
    `tokens_per_second` of all ranks, which are taken to get as many each. `memory_bytes` is the most that the GPU has
    had allocated, or on CPUs the most resident memory of the process. Results are looked at every `every` steps, so
    that in between nothing waits for a step.

    Args:
        folder: where event files go; or a writer that has `add_scalar(name, value, step)`.
        tokens: `tokens(*batch)` returns how many tokens this rank's batch has.
        every: how many steps there are between two looks.
        start: the number of the first step, for a training that goes on.

    Raises ConfigError where the package `tensorboard` is missing.
    """

    def __init__(
        self, folder: str | Path | Any, *, tokens: Callable[..., Any] | None = None, every: int = 10, start: int = 0
    ) -> None:
        if type(every) is not int or every < 1:
            raise ConfigError(f"zerofx.TensorBoard(every={every!r}) is not possible: every must be an int, 1 or more")
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.writer = folder if hasattr(folder, "add_scalar") else _writer(folder) if self.first else None
        self.tokens, self.every, self.step = tokens, every, start
        self.waiting: list[tuple[int, Any]] = []
        self.counted = 0.0
        self.since = time.perf_counter()

    def __call__(self, result: Any, *batch: Any, **named: Any) -> None:
        if not self.first:
            return
        if self.tokens is not None:
            self.counted += float(self.tokens(*batch, **named))
        self.waiting.append((self.step, result))
        self.step += 1
        if len(self.waiting) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Writes what has not been written yet; waits for the last step."""
        if not self.waiting or self.writer is None:
            return
        for number, result in self.waiting:
            for name in ("loss", "grad_norm", "loss_scale", "skipped"):
                self.writer.add_scalar(name, float(getattr(result, name)), number)
        seconds = time.perf_counter() - self.since
        last = self.waiting[-1][0]
        self.writer.add_scalar("steps_per_second", len(self.waiting) / seconds, last)
        self.writer.add_scalar("memory_bytes", memory_bytes(), last)
        if self.tokens is not None:
            self.writer.add_scalar("tokens_per_second", self.counted * self.ranks / seconds, last)
        self.waiting, self.counted, self.since = [], 0.0, time.perf_counter()

    def close(self) -> None:
        """Writes the rest and closes the writer."""
        self.flush()
        if self.writer is not None and hasattr(self.writer, "close"):
            self.writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def memory_bytes() -> int:
    """The most that this rank has held: of the GPU's memory, or of the host's where there is no GPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _writer(folder: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "zerofx.TensorBoard needs the package tensorboard: pip install tensorboard, or give a writer that has "
            "add_scalar(name, value, step)"
        ) from None
    return SummaryWriter(str(folder))
