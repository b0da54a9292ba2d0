"""Runs examples/train.py over two ranks, life after life: each ends by SIGKILL of a rank, the last one is to the end.

python -m tests.distributed.killed_often MOMENT:RANK:COUNT,... ARGUMENTS

The lives are those of killed.py. Ranks are forked from a process that has loaded torch, since loading it takes longer
than a life; as under torchrun, the other rank is ended when one has died. Prints how each life ended.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time

import torch._dynamo
import torch._functorch.aot_autograd  # noqa: F401

from tests.distributed.killed import EXAMPLE, Death, arm

WORLD = 2
LIMIT_SECONDS = 600.0


def run_rank(rank: int, port: int, life: str) -> None:
    """What a forked rank runs."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if life:
        moment, dies, count = life.split(":")
        if int(dies) == rank:
            arm(moment, Death(int(count)))
    sys.argv = [str(EXAMPLE), *sys.argv[2:]]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def live(life: str) -> list[int]:
    """The exit codes of the ranks of one life."""
    port, pids, codes = free_port(), set[int](), list[int]()
    for rank in range(WORLD):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            try:
                run_rank(rank, port, life)
            finally:
                os._exit(1)
        pids.add(pid)
    start = time.monotonic()
    while pids:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pids.discard(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        if pids and (any(codes) or time.monotonic() - start > LIMIT_SECONDS):
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    return sorted(codes)


def main() -> None:
    lives = [life for life in sys.argv[1].split(",") if life != "none"]
    for life in [*lives, ""]:
        start = time.monotonic()
        codes = live(life)
        print(f"life {life or 'to the end'}: {codes} after {time.monotonic() - start:.1f} s", flush=True)
        if -signal.SIGKILL not in codes if life else any(codes):
            sys.exit(f"a life that was to end otherwise: {life or 'to the end'}")


if __name__ == "__main__":
    main()
