"""The example takes itself up again where ranks of it are killed, and ends as if nothing had been."""

from __future__ import annotations

import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import zerofx
from tests.distributed.killed import CALLS, EXAMPLE, FIRST_RANK_ONLY
from tests.pool import ENVIRONMENT, ROOT
from tests.training import State

STEPS = 6
ARGUMENTS = ["--size", "tiny", "--batch", "4", "--steps", str(STEPS), "--backend", "interpreter", "--every", "2"]
SEED = 20


def train(folder: Path, lives: Sequence[str], timeout: int) -> str:
    """Trains over two ranks that die as told; what the last life has printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(len(lives)), "--monitor-interval", "0.2", "tests/distributed/killed.py"]
    command += [",".join(lives) or "none:0:0", "--checkpoints", str(folder), *ARGUMENTS]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def trained(folder: Path) -> State:
    """What the last checkpoint of the example holds."""
    example = runpy.run_path(str(EXAMPLE))
    model: nn.Module = example["GPT"](example["SIZES"]["tiny"])
    optimizer, _ = example["optimizer_of"](model, STEPS, 0.1)
    path = zerofx.latest(folder)
    assert path == folder / f"step-{STEPS}"
    zerofx.load(path, model, optimizer, generators=False)
    names = {param: name for name, param in model.named_parameters()}
    states = {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}
    return model.state_dict() | states


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> State:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder, [], timeout=200)
    return trained(folder)


def equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    different = [name for name, value in state.items() if not torch.equal(value, expected[name])]
    assert not different


def test_a_training_whose_ranks_are_killed_ends_as_if_nothing_had_been(uninterrupted: State, tmp_path: Path) -> None:
    lives = ["forward:1:40", "write:1:30", "backward:0:500", "sync:0:2", "optimizer:1:2"]
    printed = train(tmp_path, lives, timeout=400)
    assert re.search("Taken up at step [24], from ", printed)
    equal(trained(tmp_path), uninterrupted)


@pytest.mark.full
def test_fifty_random_kills_lose_nothing(uninterrupted: State, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    lives = list[str]()
    for _ in range(50):
        moment = draw.choice([*CALLS, "forward", "backward"])
        rank = 0 if moment in FIRST_RANK_ONLY else draw.randrange(2)
        most = {"forward": 2000, "backward": 2000, "write": 200, "sync": 4}.get(moment, 2)
        lives.append(f"{moment}:{rank}:{draw.randint(1, most)}")
    print(f"seed {SEED}: {lives}")
    train(tmp_path, lives, timeout=3000)
    equal(trained(tmp_path), uninterrupted)
