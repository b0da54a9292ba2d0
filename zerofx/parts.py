"""What one rank brings to a checkpoint, and how the parts of all ranks are made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zerofx import saved_names
from zerofx.checkpoint_files import as_bytes
from zerofx.random_state import digests, generators
from zerofx.saved_names import GROUPS, Names, States, Tensors, fingerprint


@dataclass
class Part:
    """What one rank brings to a checkpoint: tensors, and beside them plain values.

    `own` are the tensors that each rank has its own.
    """

    tensors: Tensors
    beside: dict[str, Any]
    own: set[saved_names.Path] = field(default_factory=set)

    def local_bytes(self) -> int:
        """What this rank has of the tensors."""
        locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in self.tensors.values())
        return sum(each.nbytes for each in locals_)

    def note(self, folder: Path | None) -> dict[str, Any]:
        """What the other ranks must know of it."""
        return {
            "folder": str(folder),
            "names": fingerprint(sorted(self.tensors)),
            "own": {path: fingerprint(self.tensors[path]) for path in self.own},
            "generators": digests(generators()),
        }

    def divide(self, notes: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None) -> None:
        """Settles what this rank writes, and what stands beside that."""
        rank = 0 if group is None else group.rank()
        for path in self.own:
            holders = [each["own"][path] for each in notes if path in each["own"]]
            first = next(place for place, each in enumerate(notes) if path in each["own"])
            if rank == first:
                continue
            tensor = self.tensors.pop(path)
            if notes[rank]["own"][path] != holders[0]:
                self.tensors[("rank", str(rank), *path)] = tensor
        blob = torch.frombuffer(bytearray(as_bytes(generators())), dtype=torch.uint8)
        self.tensors[("rank", str(rank), "generators")] = blob
        self.beside |= {"world": len(notes), "generators": [each["generators"] for each in notes]}
        if len({each["names"] for each in notes}) > 1:
            assert group is not None
            sides: list[Any] = [None] * group.size()
            dist.all_gather_object(sides, self.beside, group=group)
            self.beside = merged(sides)


def collect(
    model: nn.Module, optimizer: optim.Optimizer | None, scheduler: Any, loss_scale: Any, given: dict[str, Any]
) -> Part:
    """Collects a rank's part, in the memory in which training has it."""
    saved_names.refuse_model(model)
    saved_names.refuse_not_finite(model)
    names = Names(saved_names.bare(model))
    plain = {**given, "objects": names.objects(), "optimizer": None, "slice": saved_names.slice_of(names.model)}
    part = Part(names.tensors(), plain, set(names.own))
    part.beside["names"] = [name for name, value in names.values.items() if isinstance(value, Tensor)]
    if optimizer is not None:
        states = States(names, optimizer)
        part.tensors |= states.tensors
        part.own |= states.own
        kind, groups = type(optimizer).__name__, names.groups(optimizer)
        part.beside["optimizer"] = {"kind": kind, "groups": groups, "tensors": states.known, "values": states.values}
    part.beside["scheduler"] = [each.state_dict() for each in as_list(scheduler)]
    part.beside["loss_scale"] = None if loss_scale is None else loss_scale.state_dict()
    as_bytes(part.beside)
    return part


def as_list(scheduler: Any) -> list[Any]:
    if isinstance(scheduler, (list, tuple)):
        return list(scheduler)
    return [] if scheduler is None else [scheduler]


def merged(sides: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What stands beside the tensors where ranks hold different parts of a model, such as the stages of a pipeline."""
    first = sides[0]
    names = list(dict.fromkeys(name for side in sides for name in side["names"]))
    objects = {name: value for side in reversed(sides) for name, value in side["objects"].items()}
    joined: dict[str, Any] | None = None
    for optimizer in (side["optimizer"] for side in sides):
        if optimizer is None:
            continue
        joined = joined or {"kind": optimizer["kind"], "groups": [], "tensors": {}, "values": {}}
        known = {name for group in joined["groups"] for name in group["params"]}
        for group in optimizer["groups"]:
            if new := [name for name in group["params"] if name not in known]:
                joined["groups"].append({**group, "params": new})
        for kind in ("tensors", "values"):
            joined[kind] |= optimizer[kind]
    return {**first, "names": names, "objects": objects, "optimizer": joined}


def nested(part: Part) -> dict[str, Any]:
    """The tensors as torch.distributed.checkpoint takes them, and the optimizer's options as torch saves them there."""
    tree: dict[str, Any] = {}
    for path, tensor in part.tensors.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = tensor
    if part.beside["optimizer"] is not None:
        tree.setdefault(GROUPS[0], {})[GROUPS[1]] = part.beside["optimizer"]["groups"]
    return tree
