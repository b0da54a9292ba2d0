"""What is shown while a model is compiled."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from zerofx.reporting import progress
from zerofx.reporting.progress import Progress, shown_progress


def shown(seconds: float, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(progress, "PATIENCE", 0.2)
    out = io.StringIO()
    watched = Progress(True, Console(file=out, force_terminal=terminal, width=100))
    with watched.compiling(2, "inductor"):
        watched.advance("merge-reads")
        time.sleep(seconds)
        watched.advance("sink-casts")
        time.sleep(seconds / 4)
    return out.getvalue()


def test_short_compilations_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(0.0, False, monkeypatch) == shown(0.0, True, monkeypatch) == ""


def test_in_a_file_each_pass_is_a_line_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "zerofx compiles graph 2 for inductor: pass"
    assert shown(0.5, False, monkeypatch).splitlines() == [f"{start} merge-reads", f"{start} sink-casts"]


def test_in_a_terminal_one_line_is_kept_up_to_date_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(0.8, True, monkeypatch)
    assert "pass merge-reads" in text and "pass sink-casts" in text
    assert text.endswith(("\x1b[2K", "\x1b[?25h"))


def test_nothing_is_shown_where_nobody_looks_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not shown_progress(None).shown and not shown_progress(False).shown and shown_progress(True).shown
