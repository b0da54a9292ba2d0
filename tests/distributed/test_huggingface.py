"""The example trains by Hugging Face's Trainer on two ranks what plain Trainer trains in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pool import ENVIRONMENT, ROOT

pytest.importorskip("accelerate")
STEPS = 4


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


def launched(folder: Path, *arguments: str) -> None:
    """Runs the example on two ranks; it fails where they do."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *ranks, "examples/huggingface.py", "--folder", str(folder), *arguments]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_trainer_trains_as_in_one_process(tmp_path: Path, accumulate: int) -> None:
    from transformers import GPT2LMHeadModel, Trainer

    from examples.huggingface import arguments, rows, tiny_model

    launched(tmp_path, "--steps", str(STEPS), "--accumulate", str(accumulate), "--backend", "interpreter")
    plain = Trainer(
        tiny_model(),
        arguments(tmp_path / "plain", STEPS, gradient_accumulation_steps=accumulate),
        train_dataset=rows(256),
    )
    plain.train()
    expected = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert len(expected) == STEPS and losses(tmp_path) == pytest.approx(expected, abs=2e-3)  # each rounds its log
    saved = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_what_does_not_go_together_is_said() -> None:
    from examples.huggingface import ShardedTrainer, arguments, tiny_model

    for option, remedy in {"torch_compile": "leave it out", "bf16": "'precision': 'bf16'"}.items():
        given = arguments(Path("unused"), 1)
        setattr(given, option, True)
        with pytest.raises(ValueError, match=rf"TrainingArguments\({option}=True\) does not go with zerofx.*{remedy}"):
            ShardedTrainer(tiny_model(), given, {})
