"""What is wrong with a checkpoint, or goes wrong as one is written, is one error on all ranks, and changes nothing."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import zerofx
from tests.distributed.ranks import Net, has, message, on_ranks, rows, same, sharded, square, whole
from zerofx.manifest import NAME, Entry, Manifest


def told(function: Callable[[], Any]) -> str:
    """The CheckpointError of all ranks, which have the same."""
    text = message(function, zerofx.CheckpointError)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    return text


def training(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = sharded(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    square(model, dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@contextmanager
def small_files(rank: int, most: int) -> Any:
    """That rank cannot write files of more bytes, as where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saves(folder: Path) -> None:
    model, optimizer = training()
    zerofx.save(folder / "a", model, optimizer, step=1)
    before = whole(model)
    with torch.no_grad():
        model.get_parameter("a.weight").add_(1.0)
    has(told(lambda: zerofx.save(folder / "a", model)), ["exists already", "overwrite=True"])
    for rank in (0, 1):
        with small_files(rank, 3000):
            text = told(lambda: zerofx.save(folder / "a", model, optimizer, overwrite=True))
        has(text, [f"zerofx.save failed on rank {rank} of the group: File too large"])
    blocked = mock.patch("pathlib.Path.mkdir", side_effect=OSError(30, "Read-only file system", "/there"))
    with blocked:
        has(
            told(lambda: zerofx.save(folder / "b", model)),
            ["rank 0 of the group: Read-only file system: /there; give a folder that"],
        )
    with mock.patch("zerofx.manifest.Manifest.write", side_effect=OSError(28, "No space left on device", "/there")):
        has(
            told(lambda: zerofx.save(folder / "b", model)),
            ["rank 0 of the group: No space left on device: /there; free space"],
        )
    has(told(lambda: zerofx.save(folder / "b", model, extra=dist.get_rank())), ["ranks differ in extra"])
    has(told(lambda: zerofx.save(folder / "b", model, extra={"f": Net()})), ["without running code", "Net"])
    has(told(lambda: zerofx.save(folder / "b", model, keep=0)), ["keep=0 is not possible"])
    loaded = training(1)
    assert zerofx.load(folder / "a", *loaded).step == 1
    same(whole(loaded[0]), before)
    if dist.get_rank() == 0:
        assert [place.name for place in folder.iterdir()] == ["a"]
    zerofx.save(folder / "a", model, optimizer, step=2, overwrite=True)
    assert zerofx.load(folder / "a", *loaded).step == 2
    same(whole(loaded[0]), whole(model))
    for step in (3, 4, 5):
        zerofx.save(folder / f"step-{step}", model, step=step, keep=2)
    if dist.get_rank() == 0:
        assert sorted(place.name for place in folder.iterdir()) == ["a", "step-4", "step-5"]


def losses_that_are_not_finite(folder: Path) -> None:
    """One rank's batch spoils the parameters of all: the checkpoint before stays the newest one."""
    model, optimizer = training()
    zerofx.save(folder / "step-1", model, optimizer, step=1, keep=1)
    x = rows(0)
    if dist.get_rank() == 1:
        x[0, 0] = torch.nan
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for options in ({"keep": 1}, {"asynchronous": True}):
        text = told(lambda options=options: zerofx.save(folder / "step-2", model, optimizer, step=2, **options))
        has(text, ["parameter 'a.weight' holds nan or inf", "go on from the last checkpoint"])
    assert zerofx.latest(folder) == folder / "step-1"
    zerofx.load(folder / "step-1", model, optimizer)
    assert all(value.isfinite().all() for value in whole(model).values())
    if dist.get_rank() == 0:
        assert [place.name for place in folder.iterdir()] == ["step-1"]


def test_a_model_spoilt_by_a_loss_that_is_not_finite_replaces_no_checkpoint(pool: Any, tmp_path: Path) -> None:
    pool(2).run(losses_that_are_not_finite, tmp_path)


def memory_runs_out(folder: Path) -> None:
    """On one rank, in a copy for the background, in writing, and in loading."""
    model, optimizer = training()
    zerofx.save(folder / "a", model, optimizer, step=1)
    out_of_memory = {"side_effect": lambda *_: torch.empty(2**60, dtype=torch.uint8)}
    moments = {
        "zerofx.background.copied": lambda: zerofx.save(folder / "b", model, asynchronous=True),
        "zerofx.progress.Bar.add": lambda: zerofx.save(folder / "b", model),
        "zerofx.loading.blank_state": lambda: zerofx.load(folder / "a", model, optimizer),
    }
    before = whole(model)
    for moment, function in moments.items():
        with mock.patch(moment, **out_of_memory) if dist.get_rank() == 1 else nullcontext():
            has(told(function), ["on rank 1 of the group: RuntimeError", "can't allocate memory"])
    same(whole(model), before)
    if dist.get_rank() == 0:
        assert [place.name for place in folder.iterdir()] == ["a"]


def test_a_rank_without_memory_is_one_error_and_leaves_what_is_there(pool: Any, tmp_path: Path) -> None:
    pool(2).run(memory_runs_out, tmp_path)


def test_keep_counts_checkpoints_that_are_named_alike(tmp_path: Path) -> None:
    model = Net()
    for name in ("base", "best-1", "step-1", "step-2-of-9", "step-2"):
        zerofx.save(tmp_path / name, model)
    (tmp_path / "step-3").mkdir()
    zerofx.save(tmp_path / "step-4", model, keep=1)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["base", "best-1", "step-2-of-9", "step-3", "step-4"]


def test_a_long_save_shows_how_far_it_is_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zerofx.save(tmp_path / "quick", Net(), progress=True)
    monkeypatch.setattr("zerofx.progress.AFTER_SECONDS", -1.0)
    zerofx.save(tmp_path / "quiet", Net())  # no terminal
    assert capsys.readouterr().err == ""
    zerofx.save(tmp_path / "slow", Net(), progress=True)
    assert "saving slow" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(zerofx.CheckpointError, match="file; give a folder that this process may write to"):
        zerofx.save(tmp_path / "file" / "a", Net())
    assert (tmp_path / "file").read_text() == "no folder"


def test_a_save_that_fails_is_one_error_and_leaves_what_is_there(pool: Any, tmp_path: Path) -> None:
    pool(2).run(saves, tmp_path)


@on_ranks(2)
def test_what_cannot_be_saved_is_refused() -> None:
    path = Path("/nowhere/a")
    model, optimizer = training()
    other = torch.optim.SGD(Net().parameters(), 0.1)
    has(told(lambda: zerofx.save(path, model, other)), ["SGD has a parameter that is not the model's"])
    with zerofx.full_params(model):
        has(told(lambda: zerofx.save(path, model)), ["inside zerofx.full_params"])
    with model.no_sync():
        square(model, dist.get_rank()).backward()
    for function in (zerofx.save, zerofx.load):
        has(told(lambda function=function: function(path, model, optimizer)), ["gradients wait to be reduced"])
    model.zero_grad()
    weight = model.get_parameter("a.weight")
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].to_local()
    has(told(lambda: zerofx.save(path, model, optimizer)), ["'exp_avg' of 'a.weight' is a plain tensor"])


def shard_of(folder: Path) -> Path:
    return next(place for place in sorted(folder.iterdir()) if place.suffix == ".distcp")


def truncated(folder: Path) -> list[str]:
    place = shard_of(folder)
    os.truncate(place, place.stat().st_size - 1)
    return [str(place), "is damaged: it has"]


def missing(folder: Path) -> list[str]:
    place = shard_of(folder)
    place.unlink()
    return [str(place), "is missing"]


def flipped(folder: Path) -> list[str]:
    place = shard_of(folder)
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.write_bytes(content)
    return [str(place), "does not have its checksum"]


def edited(folder: Path) -> list[str]:
    place = folder / NAME
    place.write_text(place.read_text().replace('"step": 1', '"step": 2'))
    return [str(place), "does not have its checksum"]


def of_tomorrow(folder: Path) -> list[str]:
    place = folder / NAME
    place.write_text(json.dumps(json.loads(place.read_text()) | {"version": 2}))
    return ["version 2", "load it with the zerofx that wrote it"]


def foreign(folder: Path) -> list[str]:
    (folder / NAME).unlink()
    return [str(folder), "is not a checkpoint of zerofx.save"]


def gone(folder: Path) -> list[str]:
    shutil.rmtree(folder)
    return [f"there is no checkpoint {folder}"]


DAMAGES = (truncated, missing, flipped, edited, of_tomorrow, foreign, gone)


class Runs:
    """Its pickle makes a folder where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def with_code(folder: Path, name: str, write: Callable[[Any, Any], None]) -> None:
    """Puts code into a file, and into the manifest what the file is then."""
    place, manifest = folder / name, Manifest.read(folder)
    with place.open("wb") as file:
        write(Runs(folder.parent / "ran"), file)
    import hashlib

    entry = Entry(place.stat().st_size, hashlib.sha256(place.read_bytes()).hexdigest())
    Manifest({**manifest.files, name: entry}, 1, manifest.world, manifest.time).write(folder)


def code_in_metadata(folder: Path) -> list[str]:
    with_code(folder, ".metadata", pickle.dump)
    return [".metadata is not the metadata of a checkpoint: it asks for posix.mkdir"]


def code_beside(folder: Path) -> list[str]:
    with_code(folder, "state.pt", torch.save)
    return ["state.pt cannot be read"]


def refused(folder: Path, damages: tuple[Callable[[Path], list[str]], ...]) -> None:
    model, optimizer = training()
    zerofx.save(folder / "whole", model, optimizer, step=1)
    other, others = training(1)
    before = whole(other)
    for damage in damages:
        place = folder / damage.__name__
        words: list[Any] = [None]
        if dist.get_rank() == 0:
            shutil.copytree(folder / "whole", place)
            words = [damage(place)]
        dist.broadcast_object_list(words)
        has(told(lambda place=place: zerofx.load(place, other, others)), words[0])
    same(whole(other), before)
    assert not (folder / "ran").exists()
    found = zerofx.latest(folder)
    assert found is not None
    assert found.name in ("whole", "flipped", "code_in_metadata", "code_beside")  # their sizes are right
    zerofx.load(folder / "whole", other, others)
    same(whole(other), whole(model))


def test_a_damaged_or_foreign_checkpoint_is_refused_by_its_file(pool: Any, tmp_path: Path) -> None:
    pool(2).run(refused, tmp_path, (*DAMAGES, code_in_metadata, code_beside))


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(13, 5), nn.Linear(2, 2)


def others(folder: Path) -> None:
    model, optimizer = training()
    zerofx.save(folder / "a", model, optimizer)
    zerofx.save(folder / "alone", model)
    other = sharded(Other())
    has(told(lambda: zerofx.load(folder / "a", other)), ["does not have 'c.bias', 'c.weight', which the model has"])
    del other.c
    has(told(lambda: zerofx.load(folder / "a", other)), ["'model.b.weight' has the shape (7, 13)", "and (5, 13) here"])
    small = sharded(nn.ModuleDict({"a": nn.Linear(7, 13)}))
    has(told(lambda: zerofx.load(folder / "a", small)), ["has 'b.bias', 'b.weight', 'norm.bias' and 2 more, which the"])
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    has(told(lambda: zerofx.load(folder / "a", model, sgd)), ["states of AdamW, and the optimizer is SGD"])
    has(told(lambda: zerofx.load(folder / "alone", model, optimizer)), ["was saved without an optimizer"])
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    has(told(lambda: zerofx.load(folder / "a", model, scheduler=scheduler)), ["has 0 scheduler(s), not 1"])
    fewer = torch.optim.AdamW([model.get_parameter("a.weight")])
    has(
        told(lambda: zerofx.load(folder / "a", model, fewer)),
        ["optimizer states of 'a.bias'", "which the optimizer has"],
    )
    elsewhere = folder / f"rank-{dist.get_rank()}"
    has(told(lambda: zerofx.save(elsewhere, model)), ["ranks differ in the path"])
    assert model(rows(0)).isfinite().all()


def test_a_checkpoint_of_another_training_is_refused_by_name(pool: Any, tmp_path: Path) -> None:
    pool(2).run(others, tmp_path)


def test_what_a_killed_save_leaves_is_passed_over_and_removed_by_the_next(tmp_path: Path) -> None:
    model = Net()
    zerofx.save(tmp_path / "a", model, step=1)
    for moment in ("zerofx.saving.write_plain", "zerofx.manifest.Manifest.write", "zerofx.publish.publish"):
        keeps = mock.patch("zerofx.saving.shutil.rmtree")  # a killed process removes nothing
        with keeps, mock.patch(moment, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            zerofx.save(tmp_path / "b", model, step=2)
        assert zerofx.latest(tmp_path) == tmp_path / "a"
    assert len(list(tmp_path.iterdir())) > 1
    zerofx.save(tmp_path / "b", model, step=2)
    assert zerofx.latest(tmp_path) == tmp_path / "b"
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a", "b"]


def test_a_file_system_that_exchanges_nothing_has_the_old_or_the_new_one_at_each_moment(tmp_path: Path) -> None:
    model = Net()
    zerofx.save(tmp_path / "a", model, step=1)
    rename = Path.rename

    def stops(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    with mock.patch("zerofx.publish._exchange", return_value=False):
        with mock.patch("pathlib.Path.rename", stops), pytest.raises(KeyboardInterrupt):
            zerofx.save(tmp_path / "a", model, step=2, overwrite=True)
        assert zerofx.latest(tmp_path) == tmp_path / "a.replaced"
        assert zerofx.load(tmp_path / "a.replaced", model).step == 1
        zerofx.save(tmp_path / "a", model, step=2)
        zerofx.save(tmp_path / "a", model, step=3, overwrite=True)
    assert [place.name for place in tmp_path.iterdir()] == ["a"]
    assert zerofx.load(tmp_path / "a", model).step == 3


def in_the_background(folder: Path) -> None:
    model, optimizer = training()
    before = whole(model)
    saving = zerofx.save(folder / "a", model, optimizer, step=1, asynchronous=True)
    assert saving is not None
    square(model, dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    saving.wait()
    assert saving.done()
    loaded = training(1)
    assert zerofx.load(folder / "a", *loaded).step == 1
    same(whole(loaded[0]), before)
    with small_files(1, 3000):
        failing = zerofx.save(folder / "b", model, optimizer, asynchronous=True)
        assert failing is not None
        has(told(failing.wait), ["zerofx.save failed on rank 1 of the group: File too large"])
    with small_files(1, 3000):
        zerofx.save(folder / "b", model, optimizer, asynchronous=True)
        has(told(lambda: zerofx.save(folder / "c", model)), ["the save before this one, in the background, failed"])
    zerofx.save(folder / "b", model, optimizer, step=2, asynchronous=True)
    zerofx.save(folder / "c", model, optimizer, step=3)
    if dist.get_rank() == 0:
        assert sorted(place.name for place in folder.iterdir()) == ["a", "b", "c"]


def test_a_save_in_the_background_is_of_the_moment_and_its_failure_is_told(pool: Any, tmp_path: Path) -> None:
    pool(2).run(in_the_background, tmp_path)
