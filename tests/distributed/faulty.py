"""One rank of a training run in which something happens to a rank; the fault is named on the command line."""

from __future__ import annotations

import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import zerofx

RANK = int(os.environ["RANK"])
STEPS = 12


class Net(nn.Module):
    """Two layers, and a third that only some ranks may use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.use_extra = False
        self.eager = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.use_extra:
            x = self.extra(x)
        if self.eager:
            torch._dynamo.graph_break()
        return self.last(x)


def compiles_slowly(order: tuple) -> tuple:
    return order


def main(fault: str, backend: str) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = zerofx.compile(Net(), persist_below=0, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        rows = 4
        if step == 6:
            print(f"rank {RANK} fault at {time.time()}", flush=True)
        if fault == "divergent":
            model.use_extra = step >= 6 and RANK == 1
        if fault == "shapes":
            rows = 4 + (step % 3) * (RANK + 1)
        if step == 6 and RANK == 1:
            if fault == "killed":
                os.kill(os.getpid(), 9)
            if fault == "stopped":
                os.kill(os.getpid(), 19)
            if fault == "sleeps":
                time.sleep(20)
            if fault == "raises":
                raise ValueError("a bad batch")
            if fault == "leaves":
                return
            if fault == "recompiles":
                torch.compiler.reset()
                slow = type(model._zerofx_engine)._compile

                def slower(*args: object) -> object:
                    time.sleep(6)
                    return slow(*args)

                type(model._zerofx_engine)._compile = slower
        if step == 6 and RANK == 0 and fault == "host killed":
            os.kill(os.getpid(), 9)
        if step == 6 and RANK == 0 and fault == "host stopped":
            os.kill(os.getpid(), 19)
        model(torch.randn(rows, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
    if fault == "again":
        dist.destroy_process_group()
        port = str(int(os.environ["MASTER_PORT"]) + 1)
        os.environ["MASTER_PORT"] = port
        dist.init_process_group("gloo")
        model = zerofx.compile(Net(), persist_below=0, backend=backend)
        for _ in range(10):
            model(torch.randn(3, 16)).sum().backward()
            time.sleep(0.3)
    print(f"rank {RANK} trained", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2])
    print(f"rank {RANK} ended at {time.time()}", flush=True)
