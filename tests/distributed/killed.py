"""Runs examples/train.py under torchrun with a rank that dies by SIGKILL in each life but the last.

python -m torch.distributed.run ... tests/distributed/killed.py MOMENT:RANK:COUNT,... ARGUMENTS

In the life of that number the rank dies where it comes to the moment for the COUNT-th time.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.fx import Interpreter

import zerofx.backends
import zerofx.loading
import zerofx.saving
import zerofx.step
from zerofx import checkpoint_files, manifest, publish

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
CALLS: dict[str, tuple[Any, str]] = {
    "optimizer": (zerofx.step, "update"),
    "load": (zerofx.loading.Plan, "read"),
    "begin": (publish, "begin"),
    "write": (checkpoint_files.Hashed, "write"),
    "metadata": (checkpoint_files.Writer, "finish"),
    "beside": (zerofx.saving, "write_plain"),
    "manifest": (manifest.Manifest, "write"),
    "publish": (publish, "publish"),
    "sync": (publish, "sync_folder"),  # the first time before the rename, the second time behind it
    "prune": (publish, "prune"),
    "remove": (publish, "remove"),
}
FIRST_RANK_ONLY = ("begin", "metadata", "beside", "manifest", "publish", "sync", "prune", "remove")


class Death:
    """Dies where `tick` is called for the last time of `count`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def tick(self) -> None:
        self.count -= 1
        if not self.count:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str, death: Death) -> None:
    if moment in CALLS:
        owner, name = CALLS[moment]
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            death.tick()
            return original(*args, **kwargs)

        setattr(owner, name, call)
        return
    backward, inside = torch.autograd.backward, [False]

    def run_backward(*args: Any, **kwargs: Any) -> None:
        inside[0] = True
        backward(*args, **kwargs)
        inside[0] = False

    class Dying(Interpreter):
        def run_node(self, node: Any) -> Any:
            if inside[0] == (moment == "backward"):
                death.tick()
            return super().run_node(node)

    torch.autograd.backward = run_backward
    zerofx.backends.Interpreter = Dying


def main() -> None:
    lives = sys.argv[1].split(",")
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life < len(lives):
        moment, rank, count = lives[life].split(":")
        if int(rank) == int(os.environ["RANK"]):
            arm(moment, Death(int(count)))
    sys.argv = [str(EXAMPLE), *sys.argv[2:]]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
