"""Where tables and programs are printed: a terminal, or a pipe, which has no width to cut or wrap at."""

from __future__ import annotations

from typing import IO

from rich.console import Console

UNBOUNDED = 10_000
"""Columns of what is no terminal."""


def console_for(stream: IO[str]) -> Console:
    """A console of the terminal's width, or of any width where the stream is a file or a pipe."""
    return Console(file=stream) if stream.isatty() else Console(file=stream, width=UNBOUNDED)
