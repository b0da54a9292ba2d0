"""`zerofx.load`: takes up a training from a checkpoint, on any number of ranks."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerofx import random_state, saved_names
from zerofx.checkpoint_files import METADATA, Reader, failure_of, read_metadata, read_plain
from zerofx.manifest import CheckpointError, Manifest
from zerofx.parts import as_list
from zerofx.saved_names import STATES, Names, blank_state, fingerprint, listed
from zerofx.saving import BESIDE
from zerofx.together import together

CALLER = "zerofx.load"
AS_SAVED = "build the model as it was saved"


class Loaded(NamedTuple):
    """What was saved beside the training.

    Attributes:
        step: the number that zerofx.save was given, or None.
        extra: what zerofx.save was given; tensors are on the CPU.
        world: how many ranks saved.
    """

    step: int | None
    extra: Any
    world: int


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    loss_scale: Any = None,
    generators: bool = True,
) -> Loaded:
    """Gives a model, and what trains it, the state that `zerofx.save` saved. Call it on all ranks that share the model.

    The model may be sharded over another number of ranks, at another stage or by fully_shard, or not at all, and have
    other dtypes, into which values are rounded. Names and shapes must be those that were saved, in the model and in the
    optimizer, whose groups may be others as long as the options of each agree. On as many ranks as saved, each gets
    the buffers and the generators that it had; otherwise all get the first rank's buffers, and generators that were not
    in the same state on all ranks are seeded by the first rank's and the number of the rank.

    All files are compared with their checksums before anything is changed, and no code in them is executed.

    Args:
        path: what `zerofx.save` wrote, or `zerofx.latest` found.
        model: compiled or sharded already, with its parameters on their devices.
        optimizer: of the class that was saved; None leaves its states where they are.
        scheduler: as for `zerofx.save`.
        loss_scale: as for `zerofx.save`.
        generators: whether the generators of random numbers go on where they were.

    Raises CheckpointError, the same on all ranks.
    """
    folder = Path(path or "").absolute()
    group = saved_names.group_of(model)
    problem: BaseException | None = None
    plan = None
    facts: dict[str, Any] = {"the path": str(folder), "whether there is an optimizer": optimizer is not None}
    try:
        saved_names.refuse_model(model)
        _refuse_nothing(path)
        saved = Saved.read(folder, group)
        facts["the checkpoint"] = saved.manifest.time
        saved.refuse_other_slice(saved_names.slice_of(model))
        plan = Plan(saved, Names(saved_names.bare(model)), optimizer, generators)
        plan.refuse_others(as_list(scheduler), loss_scale)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    notes = together(CALLER, group, problem, None if plan is None else plan.note(), facts)
    assert plan is not None
    plan.refuse_unused(notes, group)
    together(CALLER, group, plan.read(group))
    try:
        plan.give(as_list(scheduler), loss_scale)
    except Exception as error:
        problem = CheckpointError(f"{type(error).__name__}: {error} (the model is loaded in parts: do not train it)")
    together(CALLER, group, problem)
    return Loaded(saved.beside["step"], saved.beside["extra"], saved.manifest.world)


def _refuse_nothing(path: object) -> None:
    if not path:
        raise CheckpointError(
            "there is no path, as where zerofx.latest finds no whole checkpoint: begin without zerofx.load then"
        )


class Saved(NamedTuple):
    """A checkpoint, with its files found to be what was written."""

    folder: Path
    manifest: Manifest
    beside: dict[str, Any]
    metadata: Metadata
    rank: int
    world: int

    @classmethod
    def read(cls, folder: Path, group: dist.ProcessGroup | None) -> Saved:
        """Each rank reads its share of the large files to compare their checksums."""
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        manifest = Manifest.read(folder)
        manifest.check_sizes(folder)
        large = sorted(manifest.files.keys() - {METADATA, BESIDE})
        manifest.check_contents(folder, [METADATA, BESIDE, *large[rank::world]])
        return cls(folder, manifest, read_plain(folder / BESIDE), read_metadata(folder), rank, world)

    def refuse_other_slice(self, mine: Mapping[str, int]) -> None:
        """Raises CheckpointError where a rank with another slice of the model saved."""
        saved = self.beside.get("slice", {})
        if saved != mine:
            raise CheckpointError(
                f"{self.folder} has {_named(saved)}, and this rank has {_named(mine)}: load the folder that was saved "
                "where the rank is"
            )

    def size_of(self, path: saved_names.Path) -> TensorStorageMetadata | None:
        found = self.metadata.state_dict_metadata.get(".".join(path))
        return found if isinstance(found, TensorStorageMetadata) else None

    def place(self, path: saved_names.Path, own: bool) -> saved_names.Path:
        """Where the tensor is for this rank: at its own place if each rank had its own."""
        mine = ("rank", str(self.rank), *path)
        return mine if own and self.world == self.manifest.world and self.size_of(mine) is not None else path


class Plan:
    """What this rank reads, and where to."""

    def __init__(self, saved: Saved, names: Names, optimizer: optim.Optimizer | None, generators: bool) -> None:
        self.saved, self.names, self.optimizer = saved, names, optimizer
        self.targets: dict[str, Tensor] = {}
        self.state: dict[str, dict[str, Any]] = {}
        self._plan_model()
        if optimizer is not None:
            self._plan_optimizer(optimizer)
        self.generators: Tensor | None = None
        if generators and saved.beside["generators"]:  # weights that were imported have none
            rank = saved.rank if saved.world == saved.manifest.world else 0
            self.generators = self._add(("rank", str(rank), "generators"), None)

    def _add(self, path: saved_names.Path, target: Tensor | None) -> Tensor:
        found = self.saved.size_of(path)
        name = ".".join(path)
        if found is None:
            raise CheckpointError(f"{self.saved.folder} has no {name!r}: load another checkpoint")
        if target is None:
            target = torch.empty(found.size, dtype=found.properties.dtype)
        elif target.shape != found.size:
            raise CheckpointError(
                f"{name!r} has the shape {tuple(found.size)} in {self.saved.folder}, and {tuple(target.shape)} here: "
                "build the model as it was saved"
            )
        self.targets[name] = target
        return target

    def _plan_model(self) -> None:
        tensors = self.names.tensors()
        known = set(self.saved.beside["names"])
        if lost := self.names.without(known):
            raise CheckpointError(f"{self.saved.folder} does not have {listed(lost)}, which the model has: {AS_SAVED}")
        if lost := self.names.objects().keys() - self.saved.beside["objects"].keys():
            raise CheckpointError(f"{self.saved.folder} does not have {listed(lost)}, which the model has: {AS_SAVED}")
        for path, tensor in ((path, tensor) for path, tensor in tensors.items() if path[-1] in known):
            self._add(self.saved.place(path, path in self.names.own), tensor.detach())

    def _plan_optimizer(self, optimizer: optim.Optimizer) -> None:
        saved = self.saved.beside["optimizer"]
        if saved is None:
            raise CheckpointError(f"{self.saved.folder} was saved without an optimizer: load the model alone")
        if saved["kind"] != type(optimizer).__name__:
            raise CheckpointError(
                f"{self.saved.folder} has states of {saved['kind']}, and the optimizer is {type(optimizer).__name__}: "
                f"build {saved['kind']}, or load the model alone"
            )
        self.groups = [regrouped(group, saved["groups"], self.saved.folder) for group in self.names.groups(optimizer)]
        for name in (name for group in self.groups for name in group["params"]):
            self.state[name] = dict(saved["values"].get(name, {}))
            for key in saved["tensors"].get(name, ()):
                path = self.saved.place((*STATES, name, key), self.names.is_own(name))
                found = self.saved.size_of(path)
                if found is None:
                    raise CheckpointError(f"{self.saved.folder} has no {'.'.join(path)!r}: load another checkpoint")
                blank = blank_state(self.names.params[name], key, found.size, found.properties.dtype)
                self.state[name][key] = self._add(path, blank)

    def refuse_others(self, schedulers: list[Any], loss_scale: Any) -> None:
        count = len(self.saved.beside["scheduler"])
        if schedulers and len(schedulers) != count:
            raise CheckpointError(
                f"{self.saved.folder} has {count} scheduler(s), not {len(schedulers)}: pass as many, or none"
            )
        if loss_scale is not None and self.saved.beside["loss_scale"] is None:
            raise CheckpointError(f"{self.saved.folder} was saved without a loss scale: leave loss_scale out")

    def note(self) -> dict[str, str]:
        return {"names": fingerprint(sorted(self.names.values)), "params": fingerprint(sorted(self.state))}

    def refuse_unused(self, notes: list[Any], group: dist.ProcessGroup | None) -> None:
        """Raises CheckpointError where no rank has a place for something that was saved."""
        used, params = set(self.names.values), set(self.state)
        if any(note != notes[0] for note in notes):
            told: list[Any] = [None] * len(notes)
            dist.all_gather_object(told, (used, params), group=group)
            used, params = (set().union(*(each[place] for each in told)) for place in (0, 1))
        beside = self.saved.beside
        if left := {*beside["names"], *beside["objects"]} - used:
            raise CheckpointError(
                f"{CALLER} failed: {self.saved.folder} has {listed(left)}, which the model has not: {AS_SAVED}"
            )
        if self.optimizer is not None:
            saved = {name for each in beside["optimizer"]["groups"] for name in each["params"]}
            if left := saved - params:
                raise CheckpointError(
                    f"{CALLER} failed: {self.saved.folder} has optimizer states of {listed(left)}, which the optimizer "
                    "has not: give it the parameters that it had, or load the model alone"
                )

    def read(self, group: dist.ProcessGroup | None) -> BaseException | None:
        """Reads into the targets; what goes wrong is returned."""
        reader = Reader(self.saved.folder, self.saved.manifest.files)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                state_dict_loader.load(self.targets, storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            return failure_of(error, self.saved.rank)
        return None

    def give(self, schedulers: list[Any], loss_scale: Any) -> None:
        """Gives all what was read."""
        beside = self.saved.beside
        self.names.load(beside["objects"])
        if self.optimizer is not None:
            self._give_optimizer(self.optimizer)
        for scheduler, state in zip(schedulers, beside["scheduler"], strict=bool(schedulers)):
            scheduler.load_state_dict(state)
        if loss_scale is not None:
            loss_scale.load_state_dict(beside["loss_scale"])
        if self.generators is not None:
            states = torch.load(io.BytesIO(self.generators.numpy().tobytes()), weights_only=True)
            if self.saved.world == self.saved.manifest.world:
                random_state.resume(states)
            else:
                random_state.spread(states, beside["generators"], self.saved.rank)

    def _give_optimizer(self, optimizer: optim.Optimizer) -> None:
        numbers = {name: number for number, name in enumerate(self.state)}
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in self.groups]
        states = {numbers[name]: state for name, state in self.state.items() if state}
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def regrouped(group: Mapping[str, Any], saved: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """A group of the optimizer with the options that its parameters were saved with."""
    options: dict[str, Any] | None = None
    by_name = {name: each for each in saved for name in each["params"]}
    if lost := set(group["params"]) - by_name.keys():
        raise CheckpointError(
            f"{folder} has no optimizer options of {listed(lost)}, which the optimizer has: give it the parameters "
            "that it had, or load the model alone"
        )
    for name in group["params"]:
        found = {key: value for key, value in by_name[name].items() if key != "params"}
        if options is not None and fingerprint(found) != fingerprint(options):
            raise CheckpointError(
                f"{folder} has other optimizer options for {name!r} than for {group['params'][0]!r}, which are in one "
                "group now: group parameters as they were"
            )
        options = found
    return {**group, **(options or {})}


def _named(place: Mapping[str, int]) -> str:
    where = " and ".join(f"{axis} {number}" for axis, number in place.items())
    return f"the slice of {where}" if where else "no slice but a whole model"
