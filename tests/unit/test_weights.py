"""Weights go from checkpoints to safetensors and plain state dicts, and from these into models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerofx
from tests.pool import ROOT
from zerofx.__main__ import main as command_line
from zerofx.manifest import CheckpointError
from zerofx.weights import export_weights, import_weights, weights_of

safetensors_torch = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.norm = nn.BatchNorm1d(5)


def equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize(("out", "files"), [("weights", 1), ("weights", 3), ("weights.pt", 1)])
def test_weights_go_out_and_in_again(tmp_path: Path, out: str, files: int) -> None:
    model, other = Tied(0), Tied(1)
    zerofx.save(tmp_path / "a", model)
    written = export_weights(tmp_path / "a", tmp_path / out, file_bytes=2**20 if files == 1 else 150)
    assert len(written) == (files if files == 1 else files + 1)
    equal(dict(weights_of(tmp_path / out)), model.state_dict())
    assert import_weights(tmp_path / out, tmp_path / "b") == len(model.state_dict())
    zerofx.load(tmp_path / "b", other)
    equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("left_out", ["head.weight", "tokens.weight"])
def test_a_tied_parameter_is_found_under_one_of_its_names(tmp_path: Path, left_out: str) -> None:
    model, other = Tied(0), Tied(1)
    state = {name: value.clone() for name, value in model.state_dict().items() if name != left_out}
    safetensors_torch.save_file(state, tmp_path / "a.safetensors")
    import_weights(tmp_path / "a.safetensors", tmp_path / "a")
    zerofx.load(tmp_path / "a", other)
    equal(other.state_dict(), model.state_dict())


def test_a_sharded_model_of_hugging_face_is_read_by_its_index(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    model, other = (transformers.GPT2LMHeadModel(config) for _ in range(2))
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    import_weights(tmp_path / "hf", tmp_path / "a")
    zerofx.load(tmp_path / "a", other)
    equal(other.state_dict(), model.state_dict())


def test_what_is_no_weights_is_one_sentence(tmp_path: Path) -> None:
    zerofx.save(tmp_path / "a", Tied(0))
    torch.save({"model": Tied(0).state_dict()}, tmp_path / "nested.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for source, words in [
        ("nested.pt", "is not a state dict of tensors"),
        ("broken.safetensors", "broken.safetensors cannot be read"),
        ("empty", "has no weights"),
        ("nowhere", "nowhere is not there: give a .safetensors"),
    ]:
        with pytest.raises(zerofx.CheckpointError, match=words):
            import_weights(tmp_path / source, tmp_path / "b")
    with pytest.raises(zerofx.CheckpointError, match="exists already"):
        export_weights(tmp_path / "a", tmp_path / "empty")
    with (
        mock.patch.dict(sys.modules, {"safetensors": None}),
        pytest.raises(zerofx.CheckpointError, match="pip install"),
    ):
        export_weights(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_command_line_exports_imports_and_tells_what_is_wrong(tmp_path: Path) -> None:
    zerofx.save(tmp_path / "a", Tied(0))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zerofx", *words]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )

    assert run("export", "a", "w.pt").stdout.split() == ["w.pt"]
    wrong = run("import", "nowhere", "b")
    assert wrong.returncode == 1 and "nowhere is not there: give a " in wrong.stderr and "Traceback" not in wrong.stderr
    well = run("doctor", "--seconds", "0.5")
    assert well.returncode == 0, well.stdout + well.stderr
    (counted,) = re.findall(r"all-reduce over 2 rank\(s\) on gloo: (\d+) sums in 0.5 s are right", well.stdout)
    assert int(counted) >= 3 and re.search(r"ranks on \S+: 0, 1\n", well.stdout)
    assert len(re.findall(r" MiB in \S+ ms, at most ", well.stdout)) == 3
    assert f"torch {torch.__version__.partition('+')[0]}" in well.stdout


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_doctor_asks_for_seconds_that_are_a_time(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["zerofx", "doctor", f"--seconds={seconds}"])
    with pytest.raises(SystemExit):
        command_line()
    assert "is no time: pass a number of seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        (None, {}, "the path is a NoneType: pass the name"),
        ("a", {"step": "x"}, "step='x' is not possible: pass how many steps"),
        ("a", {"step": 1.5}, "step=1.5 is not possible"),
        ("a", {"optimizer": "adam"}, "the optimizer is a str, not a torch.optim.Optimizer"),
    ],
)
def test_save_says_which_argument_is_wrong(path: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        zerofx.save(path, torch.nn.Linear(2, 2), **arguments)
