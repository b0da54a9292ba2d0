"""The benchmark's pure parts: the heap meter counts, rows follow from figures, failures are rows."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.bench import meter, table
from tests.bench.__main__ import load, save
from tests.bench.contestants import CONTESTANTS, FLOOR, GATHERED_TWICE, MIB, REFERENCE, REPLICATED, choose
from tests.bench.launch import ROOT, Run, cause
from tests.bench.measure import WARMUP, WIRE
from tests.bench.report import Ratio, Row, report
from tests.bench.wire import COLLECTIVES

SETTINGS = {"size": "tiny", "precision": "fp32", "rounds": 2, "steps": 2, "ranks": 2}

ALLOCATIONS = """
import ctypes
from tests.bench.meter import HeapMeter
meter, c, bytes = HeapMeter(), ctypes.CDLL(None), 10**7
for name in ("malloc", "calloc", "realloc", "aligned_alloc", "memalign"):
    getattr(c, name).restype, getattr(c, name).argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
c.malloc.argtypes, c.realloc.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
out = ctypes.c_void_p()
def posix_memalign():
    assert c.posix_memalign(ctypes.byref(out), ctypes.c_size_t(64), ctypes.c_size_t(bytes)) == 0
    return out.value
ways = {
    "malloc": lambda: c.malloc(bytes),
    "calloc": lambda: c.calloc(bytes // 4, 4),
    "realloc": lambda: c.realloc(c.malloc(bytes // 2), bytes),
    "aligned_alloc": lambda: c.aligned_alloc(64, bytes),
    "memalign": lambda: c.memalign(64, bytes),
    "posix_memalign": posix_memalign,
}
for name, way in ways.items():
    meter.reset_peak()
    before = meter.read()
    block = way()
    during = meter.read()
    c.free(block)
    after = meter.read()
    print(name, during.large_live - before.large_live, after.large_live - before.large_live,
          after.large_peak - before.large_live, during.live - before.live)
"""


def figures(seconds: float, losses: list[float], heap: int = 0, sent: int | None = None) -> dict[str, Any]:
    """Of one rank, whose first warm-up step takes 9 seconds more than the others."""
    steps = [seconds + 9] + [seconds] * (WARMUP - 1 + SETTINGS["steps"])
    memory = {"heap_steady_bytes": heap, "heap_peak_bytes": 2 * heap, "resident_peak_bytes": 3 * heap}
    return {"wall_seconds": steps, "cpu_seconds": steps, "losses": losses, "bytes_sent": sent} | memory


def run(name: str, number: int, *ranks: dict[str, Any]) -> Run:
    return Run(name, number, ranks=list(ranks))


@pytest.fixture
def runs() -> list[Run]:
    losses = [4.0, 3.0, 2.0, 1.0]
    other = [4.0, 3.0, 2.0, 1.5]
    wire = {name: {"wall_seconds": [0.5, 0.5], "cpu_seconds": [0.25, 0.25]} for name in COLLECTIVES}
    return [
        run(WIRE, 0, wire, wire),
        run(REFERENCE, 0, figures(8.0, losses)),
        run(FLOOR, 0, figures(2.0, other), figures(2.0, other)),
        run("zerofx-3", 0, figures(3.0, losses, MIB, 7), figures(2.0, other, 2 * MIB, 7)),
        Run("ddp-eager", 0, "RuntimeError: no"),
        run(FLOOR, 1, figures(4.0, other), figures(4.0, other)),
        run("zerofx-3", 1, figures(8.0, losses, MIB, 7), figures(8.0, other, 2 * MIB, 7)),
    ]


def settings(runs: list[Run]) -> dict[str, Any]:
    return SETTINGS | {"contestants": list(dict.fromkeys(each.contestant for each in runs))}


def rows(runs: list[Run]) -> dict[str, Row]:
    return {row.contestant: row for row in report(settings(runs), runs).rows}


def test_step_times_are_over_the_floors_of_the_same_rounds(runs: list[Run]) -> None:
    assert rows(runs)["zerofx-3"].wall == Ratio(1.75, 1.5, 2.0)
    assert rows(runs)[FLOOR].wall == Ratio(1.0, 1.0, 1.0)
    assert rows(runs)[REFERENCE].wall == Ratio(4.0, 4.0, 4.0)


def test_memory_is_that_of_the_larger_rank(runs: list[Run]) -> None:
    row = rows(runs)["zerofx-3"]
    assert (row.heap_steady, row.heap_peak, row.resident_peak) == (2 * MIB, 4 * MIB, 6 * MIB)


def test_compiling_is_what_warm_up_steps_take_beyond_the_median(runs: list[Run]) -> None:
    row = rows(runs)["zerofx-3"]
    assert (row.compile_cold_seconds, row.compile_warm_seconds) == (9.0, 9.0)


def test_the_loss_compared_is_the_mean_over_ranks(runs: list[Run]) -> None:
    assert rows(runs)["zerofx-3"].loss_difference == 0.25
    assert rows(runs)[FLOOR].loss_difference is None


def test_counted_bytes_go_before_the_closed_form(runs: list[Run]) -> None:
    counted, closed = rows(runs)["zerofx-3"], rows(runs)[FLOOR]
    assert (counted.bytes_sent, counted.bytes_sent_are_the_policy) == (7, False)
    assert (closed.bytes_sent, closed.bytes_sent_are_the_policy) == (0, True)


def test_the_closed_forms_are_those_of_rings() -> None:
    assert REPLICATED.bytes_sent(elements=100, ranks=4) == 2 * 400 * 3 // 4
    assert GATHERED_TWICE.bytes_sent(elements=100, ranks=4) == 3 * 400 * 3 // 4
    assert GATHERED_TWICE.bytes_sent(elements=100, ranks=4, dtype=torch.bfloat16) == (2 * 200 + 400) * 3 // 4


def test_floor_and_wire_adds_the_collectives_of_the_policy(runs: list[Run]) -> None:
    """The floor's median step is 3 s, and stage 3 takes three collectives of 0.5 s."""
    assert rows(runs)["zerofx-3"].floor_and_wire == pytest.approx(1 + 1.5 / 3)
    wire = {row.what: row for row in report(settings(runs), runs).wire}
    assert wire["stage 3"].wall == pytest.approx(1.5 / 3)


def test_a_failure_is_a_row_that_says_so(runs: list[Run]) -> None:
    assert rows(runs)["ddp-eager"] == Row("ddp-eager", "RuntimeError: no")


def test_without_a_floor_there_are_no_ratios(runs: list[Run]) -> None:
    left = [each for each in runs if each.contestant != FLOOR]
    row = rows(left)["zerofx-3"]
    assert (row.wall, row.floor_and_wire, row.heap_peak) == (None, None, 4 * MIB)


def test_the_table_of_a_saved_run_shows_every_contestant(runs: list[Run], tmp_path: Path) -> None:
    save(tmp_path / "results.json", settings(runs), runs)
    told, read = load(tmp_path / "results.json")
    assert read == runs
    console = Console(file=io.StringIO(), width=150)
    table.show(told, report(told, read), console)
    lines = console.file.getvalue().splitlines()
    cells = [cell.strip() for cell in next(line for line in lines if "zerofx-3" in line).strip("│").split("│")]
    assert cells[1:] == ["1.75 (1.50-2.00)"] * 2 + ["1.50", "2.0", "4.0", "6.0", "0.0", "9.0", "9.0", "2.5e-01"]
    assert "ddp-eager: RuntimeError: no" in lines


def test_contestants_are_chosen_by_the_beginning_of_their_names() -> None:
    assert choose("zerofx-2,ddp") == [REFERENCE, FLOOR, "ddp-eager", "ddp-compiled", "zerofx-2"]
    assert choose("") == [contestant.name for contestant in CONTESTANTS]
    with pytest.raises(ValueError, match="'dpp' is none of"):
        choose("zerofx,dpp")


def test_the_cause_of_a_failure_is_the_first_error_of_a_rank() -> None:
    log = "[rank1]: Traceback\n[rank1]: torch.SomeError: why\ntorch.distributed.elastic.ChildFailedError: \n"
    assert cause(log) == "torch.SomeError: why"
    assert cause("all is well") == ""


@pytest.mark.skipif(not shutil.which("gcc") or sys.platform != "linux", reason="the heap meter needs gcc and Linux")
def test_the_heap_meter_counts_blocks_of_every_kind(tmp_path: Path) -> None:
    environment = os.environ | {"LD_PRELOAD": str(meter.build(tmp_path))}
    command = [sys.executable, "-c", ALLOCATIONS]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    counted = {name: list(map(int, rest)) for name, *rest in map(str.split, done.stdout.splitlines())}
    assert list(counted) == ["malloc", "calloc", "realloc", "aligned_alloc", "memalign", "posix_memalign"]
    for during, after, peak, every in counted.values():
        assert 10**7 <= during <= peak < 10**7 + 2**17
        assert after == 0
        assert abs(every - during) < 2**14
