"""Persistent worker processes in which a test runs a function on every rank of a gloo group."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import cloudpickle

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".cache" / "inductor"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
START_SECONDS = 180
GRACE_SECONDS = 5
PROBE_SECONDS = 5
LOG_LINES = 40


class RankError(RuntimeError):
    """A run in which at least one rank raised, died or did not finish; the text holds every rank's traceback."""


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a run: `kind` is "result", "error", "died" or "unfinished"."""

    kind: str
    value: Any = None
    message: str = ""
    detail: str = ""


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


class Pool:
    """`world` processes in one gloo group, started at the first run, kept between runs, replaced after a fault."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._marks: list[int] = []
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        """Each rank's `fn(*args)`; raises RankError when a rank raises, dies, or takes more than `timeout` seconds."""
        outcomes = self._round(fn, args, timeout)
        if any(outcome.kind != "result" for outcome in outcomes):
            raise RankError(_report(fn, outcomes))
        return [outcome.value for outcome in outcomes]

    def run_errors(self, fn: Callable[..., Any], *args: Any, timeout: float = 300) -> list[str | None]:
        """Each rank's "Type: message", None where `fn(*args)` returned; a rank that dies or hangs is a RankError."""
        outcomes = self._round(fn, args, timeout)
        if any(outcome.kind in ("died", "unfinished") for outcome in outcomes):
            raise RankError(_report(fn, outcomes))
        return [outcome.message if outcome.kind == "error" else None for outcome in outcomes]

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._pipes = [], []
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    @property
    def alive(self) -> int:
        """How many processes this pool holds now."""
        return len(self._processes)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        environment = {**os.environ, **ENVIRONMENT}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in range(self.world):
            ours, theirs = Pipe()
            command = [sys.executable, "-u", "-m", "tests.worker"]
            command += [str(theirs.fileno()), str(rank), str(self.world), str(Path(self._folder.name) / "store")]
            with self._log(rank).open("wb") as log:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._marks = [0] * self.world
        outcomes = self._collect(START_SECONDS)
        if any(outcome.kind != "result" for outcome in outcomes):
            self.close()
            raise RankError(_report(Pool, outcomes))

    def _round(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        payload = pickle.dumps((_home(fn), cloudpickle.dumps((fn, args))))
        if any(process.poll() is not None for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        self._marks = [self._log(rank).stat().st_size for rank in range(self.world)]
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a worker that just died is reported when its reply is awaited
                pipe.send_bytes(payload)
        outcomes = self._collect(timeout)
        kinds = {outcome.kind for outcome in outcomes}
        if kinds & {"died", "unfinished"}:
            self.close()
        elif "error" in kinds and fn is not _barrier:
            self._probe()
        return outcomes

    def _probe(self) -> None:
        """Ranks that raised may have left collectives unmatched: a barrier that does not pass shows it."""
        if any(outcome.kind != "result" for outcome in self._round(_barrier, (), PROBE_SECONDS)):
            self.close()

    def _collect(self, timeout: float) -> list[Outcome]:
        """Every rank's outcome; after the first fault the others, which may wait for that rank, get GRACE_SECONDS."""
        outcomes: dict[int, Outcome] = {}
        start = time.monotonic()
        limit = timeout
        while len(outcomes) < self.world:
            waiting = {self._pipes[rank]: rank for rank in range(self.world) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, start + limit - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].kind != "result":
                    limit = min(limit, time.monotonic() - start + GRACE_SECONDS)
        seconds = time.monotonic() - start
        missing = [rank for rank in range(self.world) if rank not in outcomes]
        for rank in missing:
            self._processes[rank].send_signal(signal.SIGUSR1)
        if missing:
            time.sleep(0.5)  # the workers' fault handlers write their stacks meanwhile
        for rank in missing:
            message = f"still running after {seconds:.1f} s"
            outcomes[rank] = Outcome("unfinished", message=message, detail=self._tail(rank))
        return [outcomes[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> Outcome:
        try:
            kind, message, detail, value = pickle.loads(self._pipes[rank].recv_bytes())
            result = pickle.loads(value)
        except (EOFError, ConnectionResetError):
            code = self._processes[rank].wait()
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome("died", message=f"the worker process ended ({cause})", detail=self._tail(rank))
        detail = detail + self._tail(rank) if kind == "error" else detail
        return Outcome(kind, result, message, detail)

    def _log(self, rank: int) -> Path:
        assert self._folder
        return Path(self._folder.name) / f"rank{rank}.log"

    def _tail(self, rank: int) -> str:
        output = self._log(rank).read_bytes()[self._marks[rank] :]
        lines = output.decode(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(["  output of this run:", *("    " + line for line in lines)]) if lines else ""


def _home(fn: Callable[..., Any]) -> tuple[str, str | None]:
    """The module that a worker must load before it unpickles `fn`, with its file, for modules off the import path."""
    return fn.__module__, getattr(sys.modules.get(fn.__module__), "__file__", None)


def _report(fn: Callable[..., Any], outcomes: list[Outcome]) -> str:
    lines = [f"{fn.__module__}.{fn.__qualname__} failed on {len(outcomes)} ranks:"]
    for rank, outcome in enumerate(outcomes):
        lines.append(f"--- rank {rank}: {outcome.message or 'returned'}")
        lines += [outcome.detail.rstrip()] if outcome.detail else []
    return "\n".join(lines)
