"""Shows which pass runs while a model is compiled, where that takes more than a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import torch.distributed as dist
from rich.console import Console
from rich.status import Status

PATIENCE = 1.0
"""Seconds for which nothing is shown."""


class Progress:
    """A line that tells what is being compiled; in a file, one line for each pass."""

    def __init__(self, shown: bool, console: Console | None = None) -> None:
        self.shown, self.console = shown, console or Console(stderr=True)
        self.status: Status | None = None
        self.late = False
        self.what = self.told = ""

    def advance(self, step: str) -> None:
        """Tells that a pass begins."""
        self._tell(f"pass {step}")

    @contextmanager
    def compiling(self, index: int, backend: str) -> Iterator[None]:
        """Around the compilation of one graph."""
        if not self.shown:
            yield
            return
        self.what, self.late = f"zerofx compiles graph {index} for {backend}", False
        status = self.status = Status(self.what, console=self.console)
        timer = Timer(PATIENCE, self._show)
        timer.daemon = True
        timer.start()
        self._tell("tracing")
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            status.stop()
            self.status = None

    def _show(self) -> None:
        self.late, status = True, self.status
        if status is None:
            return
        if self.console.is_terminal:
            status.start()
        else:
            self.console.print(self.told)

    def _tell(self, step: str) -> None:
        if self.status is None:
            return
        self.told = f"{self.what}: {step}"
        self.status.update(self.told)
        if self.late and not self.console.is_terminal:
            self.console.print(self.told)


def shown_progress(asked: bool | None) -> Progress:
    """On rank 0, in a terminal or where it is asked for."""
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    return Progress(first and (sys.stderr.isatty() if asked is None else asked))
