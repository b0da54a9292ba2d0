"""Runs one contestant once, in fresh processes, and tells what came of it: figures of each rank, or the problem."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.contestants import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 60.0  # beyond the timeout, at which the ranks end themselves
ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b.*)")


@dataclass(frozen=True)
class Plan:
    """What all contestants have in common."""

    size: str
    precision: str
    steps: int
    ranks: int
    timeout: float
    out: Path
    heap_meter: Path

    def inductor_cache(self, contestant: str) -> Path:
        return self.out / "inductor" / contestant


@dataclass(frozen=True)
class Run:
    """One contestant in one round. `load` is the load average before it; `problem` is empty if all went well."""

    contestant: str
    round: int
    problem: str = ""
    seconds: float = 0.0
    load: float = 0.0
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(plan: Plan, contestant: str, number: int) -> Run:
    described = BY_NAME.get(contestant)
    if described and importlib.util.find_spec(described.needs) is None:
        return Run(contestant, number, f"{described.needs} is not installed")
    figures, log = (plan.out / "logs" / f"{contestant}.{number}.{kind}" for kind in ("json", "txt"))
    log.parent.mkdir(parents=True, exist_ok=True)
    figures.unlink(missing_ok=True)
    processes = 1 if described and described.whole_batch else plan.ranks
    load, start = os.getloadavg()[0], time.monotonic()
    problem = _processes(plan, contestant, processes, figures, log)
    seconds = time.monotonic() - start
    if not problem and not figures.exists():
        problem = "no figures were handed in"
    if problem:
        return Run(contestant, number, problem, seconds, load)
    return Run(contestant, number, "", seconds, load, json.loads(figures.read_text()))


def _processes(plan: Plan, contestant: str, processes: int, figures: Path, log: Path) -> str:
    """Starts the ranks and waits for them; returns the problem."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    options = {
        "contestant": contestant,
        "size": plan.size,
        "precision": plan.precision,
        "steps": plan.steps,
        "ranks": plan.ranks,
        "timeout": plan.timeout,
        "json": figures,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, *torchrun, "-m", "tests.bench.measure", *flags]
    with log.open("w") as file:
        started = subprocess.Popen(command, env=_environment(plan, contestant), cwd=ROOT, stdout=file, stderr=file)
        try:
            code = started.wait(plan.timeout + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(started)
    text = log.read_text(errors="replace")
    if code == 0:
        return ""
    if code is None or "Timeout (" in text:  # faulthandler's word
        return f"not done after {plan.timeout:.0f} s"
    return cause(text) or f"exit code {code}"


def _environment(plan: Plan, contestant: str) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(plan.heap_meter),
        "TORCHINDUCTOR_CACHE_DIR": str(plan.inductor_cache(contestant)),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun, which ends its ranks when it is told to terminate."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cause(log: str) -> str:
    """The first error that a rank reported, in one line; empty where there is none."""
    for line in log.splitlines():
        found = ERROR.match(line)
        if found and "ChildFailedError" not in line:
            return found[1].strip()[:300]
    return ""
