"""Shows how far a save has come, where someone looks and it takes longer than a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

AFTER_SECONDS = 1.0


class Bar:
    """Bytes that are done of a total: nothing is drawn in the first second, nor where it is not to be shown."""

    def __init__(self, what: str, total: int, shown: bool | None) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        self.shown = console.is_terminal if shown is None else shown
        self.start, self.done, self.drawn = time.monotonic(), 0, False
        self.bar = Progress(*columns, console=console, transient=console.is_terminal)
        self.task = self.bar.add_task(what, total=total)

    def add(self, count: int) -> None:
        self.done += count
        if not self.shown:
            return
        if not self.drawn and time.monotonic() - self.start > AFTER_SECONDS:
            self.drawn = True
            self.bar.start()
        self.bar.update(self.task, completed=self.done)

    def stop(self) -> None:
        if self.drawn:
            self.bar.stop()


@contextmanager
def bar(what: str, total: int, shown: bool | None) -> Iterator[Bar]:
    """A bar that ends with the block. `shown`: None for only in a terminal."""
    made = Bar(what, total, shown)
    try:
        yield made
    finally:
        made.stop()
