"""`zerofx.save`: a checkpoint of a model's training, in parts and whole or not at all."""

from __future__ import annotations

import copy
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from zerofx import background, publish, saved_names
from zerofx.background import Saving
from zerofx.checkpoint_files import Writer, failure_of, write_plain
from zerofx.manifest import CheckpointError, Entry, Manifest
from zerofx.parts import Part, collect, nested
from zerofx.progress import bar
from zerofx.saved_names import fingerprint
from zerofx.together import together

CALLER = "zerofx.save"
BESIDE = "state.pt"
"""The file of all that is no tensor of the model or the optimizer."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    step: int | None = None,
    scheduler: Any = None,
    loss_scale: Any = None,
    extra: Any = None,
    overwrite: bool = False,
    keep: int | None = None,
    asynchronous: bool = False,
    progress: bool | None = None,
) -> Saving | None:
    """Saves a training as the folder `path`. Call it on all ranks that share the model, between two steps.

    Each rank writes its own part, through torch.distributed.checkpoint. The folder appears under its name when all of
    it is on the disk, with a manifest of sizes and checksums; before, and where anything fails on any rank, nothing of
    the name is changed. All ranks write to one file system.

    Saved are parameters and buffers under the keys of `model.state_dict()`, the optimizer's states and options by the
    names of parameters, and the generators of random numbers of every rank. Gradients are not. Buffers, and parameters
    that zerofx was told to ignore, are the first rank's, and those of other ranks beside them where they differ.

    A model is not saved with trainable parameters that hold nan or inf, so that no good checkpoint is removed for it.

    Ranks whose slices of a model zerofx does not know how to join, as with an `mpu`, save each slice by a call with a
    folder of its own.

    Args:
        path: the folder, on storage that all ranks share.
        model: a model that zerofx.compile was called on, or another one: plain, in DDP, or sharded by fully_shard.
        optimizer: that of the model's parameters.
        step: a number to come back from `zerofx.load`.
        scheduler: what has `state_dict()` and `load_state_dict()`, or a list of such.
        loss_scale: what holds the loss scale: the result of zerofx.train_step, or a torch.amp.GradScaler.
        extra: numbers, strings and tensors, in lists, tuples and dicts, equal on all ranks, such as the position in the
            data. What differs between ranks, gather into a list first.
        overwrite: replace a checkpoint of that name, at once.
        keep: remove older checkpoints from the folder that `path` is in, but for that many. Only those count that are
            named like `path` but for numbers, such as `step-100` and `step-200`.
        asynchronous: copy all into the host's memory, write from there in the background, and return the save, whose
            `wait()` raises what went wrong; so does the next save, which waits for this one.
        progress: whether the first rank shows how far a save has come that lasts longer than a second. Default: in a
            terminal, and not in the background.

    Raises CheckpointError, the same on all ranks.
    """
    problem = wrong_arguments(path, optimizer, step)
    target = Path() if problem else Path(path).absolute()
    group = saved_names.group_of(model)
    saved_names.refuse_shared_folder(model, str(target))
    if asynchronous and progress is None:  # training draws meanwhile
        progress = False
    facts: dict[str, Any] = {"the path": str(target), "the step": step, "overwrite": overwrite, "keep": keep}
    facts["asynchronous"] = asynchronous

    def collected() -> Part:
        if problem:
            raise CheckpointError(problem)
        part = collect(model, optimizer, scheduler, loss_scale, {"step": step, "extra": extra})
        publish.refuse_keep(keep, slices=bool(part.beside["slice"]))
        return part

    job = begin(Job(Part({}, {}), target, target, group, overwrite, keep, progress), collected, facts)
    if asynchronous:
        return background.start(group, stage(job).run)
    job.run()
    return None


def wrong_arguments(path: Any, optimizer: Any, step: Any) -> str:
    """What is wrong with them, and what to pass, in a sentence; empty where nothing is."""
    if not isinstance(path, (str, os.PathLike)):
        return f"the path is a {type(path).__name__}: pass the name of the folder to save as"
    if step is not None and (type(step) is not int or step < 0):
        return f"step={step!r} is not possible: pass how many steps have been trained, as an int"
    if optimizer is not None and not isinstance(optimizer, optim.Optimizer):
        return f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer: pass that, or None"
    return ""


@dataclass(frozen=True)
class Job:
    """A part that is to be written into a folder, which then appears as `target`."""

    part: Part
    folder: Path
    target: Path
    group: dist.ProcessGroup | None
    overwrite: bool = False
    keep: int | None = None
    progress: bool | None = None

    def run(self) -> None:
        """Raises CheckpointError, and leaves nothing then."""
        try:
            self._write()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes what was written."""
        if self.first():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self) -> None:
        shown = self.progress if self.first() else False
        with bar(f"saving {self.target.name}", self.part.local_bytes(), shown) as drawn:
            files = together(CALLER, self.group, *_write_tensors(self.part, self.folder, self.group, drawn.add))
        problem: Exception | None = None
        if self.first():
            try:
                finish(self.part, self.folder, self.target, files, self.overwrite)
            except Exception as error:
                problem = error
        together(CALLER, self.group, problem)
        if self.keep is not None and self.first():
            with suppress(OSError):  # what is old and cannot be removed is in nobody's way
                publish.prune(self.target, self.keep)

    def first(self) -> bool:
        return self.group is None or self.group.rank() == 0


def begin(draft: Job, collected: Callable[[], Part], facts: dict[str, Any]) -> Job:
    """The draft with this rank's part and the folder that all write into. Collective.

    Raises CheckpointError, and leaves nothing then.
    """
    problem: Exception | None = None
    part, folder = draft.part, None
    try:
        background.settle(draft.group)
        part = collected()
        facts["extra"] = fingerprint(part.beside["extra"])
        if draft.first():
            publish.refuse_target(draft.target, draft.overwrite)
            folder = publish.begin(draft.target)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    try:
        notes = together(CALLER, draft.group, problem, part.note(folder), facts)
        part.divide(notes, draft.group)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return replace(draft, part=part, folder=Path(notes[0]["folder"]))


def stage(job: Job) -> Job:
    """The job with a copy of all that training goes on to change, over a group for its thread. Collective."""
    problem: Exception | None = None
    part = job.part
    group, mesh = background.group_for_threads(job.group)
    try:
        tensors = {path: background.copied(tensor, mesh) for path, tensor in job.part.tensors.items()}
        part = Part(tensors, copy.deepcopy(job.part.beside))
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    try:
        together(CALLER, job.group, problem)
    except BaseException:
        job.discard()
        raise
    return replace(job, part=part, group=group)


def _write_tensors(
    part: Part, folder: Path, group: dist.ProcessGroup | None, told: Callable[[int], None]
) -> tuple[BaseException | None, Mapping[str, Entry]]:
    """Returns the rank's problem, and the files that it has written."""
    writer = Writer(folder, told)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_saver.save(nested(part), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank = 0 if group is None else group.rank()
        return writer.files.error or failure_of(error, rank), {}
    return None, writer.files.entries


def finish(part: Part, folder: Path, target: Path, files: Sequence[Mapping[str, Entry]], overwrite: bool) -> None:
    """Writes what stands beside the tensors, and the manifest, and gives the folder its name."""
    entries = {BESIDE: write_plain(part.beside, folder / BESIDE)}
    for written in files:
        entries |= written
    Manifest(entries, part.beside["step"], part.beside["world"], time.time()).write(folder)
    publish.publish(folder, target, overwrite)
