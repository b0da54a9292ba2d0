"""Trains in several groups of forked ranks at once, each with a fault of its own, and prints how each rank ended.

Usage: faulty.py FOLDER BACKEND FAULT...; the ranks write to files in FOLDER. A fault is that of two ranks, or
"SITUATION STAGE WORLD" for a situation in which ranks run different code. Started as a process of its own, since the
ranks die; forked from one that has loaded torch, since loading it takes longer than all that is tested.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.distributed.situation_runs import differences, expected, train_rank
from tests.situations.ranks import RANKS
from zerofx._torch import TCPStore
from zerofx.engine import Engine
from zerofx.stage_run import StageRun

STEPS, FAULT_STEP = 12, 6
LIMIT_SECONDS = 150
STAGES = "in a gathered stage"
SITUATIONS = {kind.__name__: kind for kind in RANKS}


class Net(nn.Module):
    """Two layers, a third that only some ranks may use, and one of the same size as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.spare = nn.Linear(24, 8)
        self.use_extra = self.use_spare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.use_extra:
            x = self.extra(x)
        return (self.spare if self.use_spare else self.last)(x)


class Blocks(nn.Module):
    """Two blocks that share a graph, which a rank may run in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.use_spare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks) if self.use_spare else self.blocks:
            x = block(x)
        return x


def compile_slowly() -> None:
    """Makes the next calls compile again, and take six seconds for it."""
    torch.compiler.reset()
    own = Engine._compile

    def slow(*args: object) -> object:
        time.sleep(6)
        return own(*args)

    Engine._compile = slow


def tell_compilations() -> None:
    """Prints the time at the end of each compilation: how long a rank takes for it depends on what else runs."""
    own = Engine._compile

    def told(*args: object) -> object:
        compiled = own(*args)
        print(f"fault {time.time()}", flush=True)
        return compiled

    Engine._compile = told


def happen(fault: str, rank: int, model: Net | Blocks) -> None:
    """What goes wrong on a rank before the step in which it shows."""
    match fault, rank:
        case ("killed", 1) | ("host killed", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        case ("stopped", 1) | ("host stopped", 0):
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleeps", 1:
            time.sleep(20)
        case "recompiles", 1:
            compile_slowly()
        case "raises", 1:
            raise ValueError("a bad batch")
        case "out of memory", 1:
            torch.empty(2**60, dtype=torch.uint8)
        case "interrupted", _:
            raise KeyboardInterrupt
        case "leaves", 1:
            sys.exit(0)
        case "diverges", 1:
            model.use_extra = True
        case (("swaps, then ends" | "swaps, then compiles" | "swaps blocks"), 1):
            model.use_spare = True


def train(fault: str, backend: str, rank: int) -> None:
    torch.manual_seed(0)
    swaps = fault.startswith("swaps")
    if fault == "swaps blocks":
        model = zerofx.compile(Blocks(), persist_below=0, backend=backend, per_block=True)
    else:
        model = zerofx.compile(Net(), persist_below=0, backend="eager" if swaps else backend)
    for step in range(STEPS):
        if step == (STEPS - 1 if swaps else FAULT_STEP):
            print(f"fault {time.time()}", flush=True)
            happen(fault, rank, model)
        rows = 4 + (step % 3) * (rank + 1) if fault == "shapes" else 4
        model(torch.randn(rows, 16)).square().mean().backward()
        time.sleep(0.1)


def train_stages(rank: int) -> None:
    """Two stages, there and back, gathered always by two ranks each; on rank 1 they compute no more."""
    layers = [nn.Linear(16, 16) for _ in range(4)]
    asked: dict[str, Any] = {"backend": "interpreter", "example_inputs": ((torch.zeros(2, 16),), {})}
    asked |= {"stage": 3, "persist_below": 0, "pipeline": zerofx.Pipeline(4, "zbv", 2, gather="always")}
    model = zerofx.compile(nn.Sequential(*layers), **asked)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = zerofx.train_step(model, lambda model, x: model(x).square().mean(), optimizer)
    forward = StageRun.forward

    def fails(*args: Any) -> Any:
        if rank == 1:
            raise ArithmeticError("no good numbers")
        return forward(*args)

    for number in range(STEPS):
        if number == 2:
            print(f"fault {time.time()}", flush=True)
            StageRun.forward = fails
        step(torch.ones(4, 16))


def train_situation(name: str, stage: int, rank: int, world: int) -> None:
    """Fails where training ends with a result that is not that of one process."""
    kind = SITUATIONS[name]
    print(f"fault {time.time()}", flush=True)
    tell_compilations()
    results = train_rank(kind, stage, {})
    worst = {make: differences(results[make.__name__], expected(kind, make, world)[rank]) for make in kind.optimizers}
    assert not any(worst.values()), worst


def world_of(fault: str) -> int:
    if fault == STAGES:
        return 4
    name, *rest = fault.split()
    return int(rest[1]) if name in SITUATIONS else 2


def make_group(listening: socket.socket, rank: int, world: int) -> None:
    """Makes the default group over a store of rank 0, whose socket has listened since before the ranks were forked: no
    other process can take its port.
    """
    port, descriptor = listening.getsockname()[1], listening.fileno()
    if rank:
        listening.close()  # else it would answer for rank 0 when that one is gone
        store = TCPStore("127.0.0.1", port, world)
    else:
        store = TCPStore("127.0.0.1", port, world, is_master=True, master_listen_fd=descriptor)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def run(fault: str, backend: str, rank: int, listening: list[socket.socket]) -> None:
    world = world_of(fault)
    warnings.simplefilter("ignore")
    make_group(listening[0], rank, world)
    name, *rest = fault.split()
    if name in SITUATIONS:
        train_situation(name, int(rest[0]), rank, world)
    elif fault == STAGES:
        train_stages(rank)
    else:
        train(fault, backend, rank)
    if fault == "swaps, then compiles":
        train(fault, backend, rank)
    if fault == "again":
        dist.destroy_process_group()
        make_group(listening[1], rank, world)
        train(fault, backend, rank)
    print(f"trained {time.time()}", flush=True)


def start(fault: str, backend: str, folder: Path) -> dict[int, int] | None:
    """Forks the ranks; returns their process ids, or None in a rank that has trained to the end."""
    pids = dict[int, int]()
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for rank in range(world_of(fault)):
        log = os.open(folder / f"{fault} {rank}", os.O_WRONLY | os.O_CREAT)
        if pid := os.fork():
            pids[rank] = pid
            os.close(log)
            continue
        os.dup2(log, 1)
        os.dup2(log, 2)
        run(fault, backend, rank, listening)
        return None
    for sockets in listening:
        sockets.close()
    return pids


def main(folder: Path, backend: str, faults: list[str]) -> None:
    running: dict[str, dict[int, int]] = {}
    for fault in faults:
        pids = start(fault, backend, folder)
        if pids is None:
            return
        running[fault] = pids
    ended: dict[str, dict[int, list[float]]] = {fault: {} for fault in faults}
    begin = time.time()
    while any(running.values()):
        for fault, pids in running.items():
            for rank, pid in list(pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del pids[rank]
                    ended[fault][rank] = [os.waitstatus_to_exitcode(status), time.time()]
            if pids and ((len(pids) < world_of(fault) and "stopped" in fault) or time.time() > begin + LIMIT_SECONDS):
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    (folder / "ended").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
