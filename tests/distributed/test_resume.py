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
ARGUMENTS = ["--size", "tiny", "--batch", "4", "--backend", "interpreter", "--every", "2"]
SEED = 20
KILLS, LONG = 50, 300


def train(folder: Path, lives: Sequence[str], timeout: int) -> str:
    """Trains over two ranks that die as told; what the last life has printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(len(lives)), "--monitor-interval", "0.2", "tests/distributed/killed.py"]
    command += [",".join(lives) or "none:0:0", "--checkpoints", str(folder), "--steps", str(STEPS)]
    command += ARGUMENTS
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def trained(folder: Path, steps: int = STEPS) -> State:
    """What the last checkpoint of the example holds."""
    example = runpy.run_path(str(EXAMPLE))
    model: nn.Module = example["GPT"](example["SIZES"]["tiny"])
    optimizer, _ = example["optimizer_of"](model, steps, 0.1)
    path = zerofx.latest(folder)
    assert path == folder / f"step-{steps}"
    zerofx.load(path, model, optimizer, generators=False)
    names = {param: name for name, param in model.named_parameters()}
    states = {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}
    return model.state_dict() | states


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> State:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_forked(folder, [], STEPS, timeout=200)
    return trained(folder)


def equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    different = [name for name, value in state.items() if not torch.equal(value, expected[name])]
    assert not different


def test_a_training_whose_ranks_are_killed_ends_as_if_nothing_had_been(uninterrupted: State, tmp_path: Path) -> None:
    printed = train_forked(tmp_path, ["write:1:30", "backward:0:500", "sync:0:2"], STEPS, timeout=300)
    assert printed.count("-9") == 3
    assert re.search("Taken up at step [24], from ", printed)
    equal(trained(tmp_path), uninterrupted)


@pytest.mark.full
def test_torchrun_starts_a_training_again_whose_ranks_are_killed(uninterrupted: State, tmp_path: Path) -> None:
    lives = ["forward:1:40", "write:1:30", "backward:0:500", "sync:0:2", "optimizer:1:2"]
    printed = train(tmp_path, lives, timeout=900)
    assert re.search("Taken up at step [24], from ", printed)
    equal(trained(tmp_path), uninterrupted)


def drawn_lives(count: int, draw: random.Random) -> list[str]:
    """Moments at which a rank dies within its next few steps; the first life has nothing to load or remove yet."""
    lives = list[str]()
    most = {"forward": 300, "backward": 500, "write": 60, "sync": 4, "load": 1}
    while len(lives) < count:
        moment = draw.choice([*CALLS, "forward", "backward"])
        if not lives and moment in ("load", "remove"):
            continue
        rank = 0 if moment in FIRST_RANK_ONLY else draw.randrange(2)
        lives.append(f"{moment}:{rank}:{draw.randint(1, most.get(moment, 2))}")
    return lives


def train_forked(folder: Path, lives: Sequence[str], steps: int, timeout: int) -> str:
    """The same with all ranks forked from one process, which saves loading torch a hundred times."""
    command = [sys.executable, "-m", "tests.distributed.killed_often", ",".join(lives) or "none"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command += ["--checkpoints", str(folder), "--steps", str(steps), *ARGUMENTS]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.full
def test_fifty_random_kills_lose_nothing(tmp_path: Path) -> None:
    lives = drawn_lives(KILLS, random.Random(SEED))
    print(f"seed {SEED}: {lives}")
    train_forked(tmp_path / "whole", [], LONG, timeout=900)
    printed = train_forked(tmp_path / "killed", lives, LONG, timeout=3000)
    told = re.findall(r"^life .*", printed, re.MULTILINE)
    print("\n".join(told))
    assert sum(": [-" in line and "-9" in line for line in told) == KILLS
    equal(trained(tmp_path / "killed", LONG), trained(tmp_path / "whole", LONG))
