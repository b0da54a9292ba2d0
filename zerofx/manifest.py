"""The manifest of a checkpoint: its files with sizes and checksums. A folder without a right one is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

NAME = "manifest.json"
FORMAT = "zerofx checkpoint"
VERSION = 1
ANOTHER = "load another checkpoint"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, is damaged or foreign, or is not that of the model."""


class Entry(NamedTuple):
    """One file: its bytes, and the SHA-256 of its content in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        files: by name, all files of the folder but the manifest.
        step: the number that `zerofx.save` was given.
        world: how many ranks have saved.
        time: when, in seconds since 1970.
        torch: the version of torch that has written it.
    """

    files: Mapping[str, Entry]
    step: int | None
    world: int
    time: float
    torch: str = torch.__version__

    def write(self, folder: Path) -> None:
        """Writes the manifest, and waits until it is on the disk."""
        facts = asdict(self) | {"format": FORMAT, "version": VERSION}
        facts["files"] = {name: [entry.bytes, entry.sha256] for name, entry in sorted(self.files.items())}
        with (folder / NAME).open("w") as file:
            json.dump(facts | {"sha256": _digest(facts)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError where the folder is no checkpoint, or its manifest is not what was written."""
        place = folder / NAME
        if not folder.is_dir():
            raise CheckpointError(f"there is no checkpoint {folder}: zerofx.latest(folder) finds those in a folder")
        try:
            facts = json.loads(place.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a checkpoint of zerofx.save: it has no {NAME}; zerofx.latest(folder) "
                "finds those in a folder"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place} cannot be read: {error}; {ANOTHER}") from None
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise CheckpointError(f"{place} is not the manifest of a checkpoint of zerofx.save: {ANOTHER}")
        if facts.get("version") != VERSION:
            raise CheckpointError(
                f"{place} has version {facts.get('version')!r} of the format and this zerofx reads {VERSION}: load it "
                "with the zerofx that wrote it"
            )
        written = facts.pop("sha256", None)
        if written != _digest(facts):
            raise CheckpointError(f"{place} is damaged: its content does not have its checksum; {ANOTHER}")
        files = {name: Entry(*entry) for name, entry in facts["files"].items()}
        return cls(files, facts["step"], facts["world"], facts["time"], facts["torch"])

    def check_sizes(self, folder: Path) -> None:
        """Raises CheckpointError for a file that is missing, or longer or shorter than it was written."""
        for name, entry in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"{folder / name} is missing or cannot be read: {error.strerror}; {ANOTHER}"
                ) from None
            if size != entry.bytes:
                raise CheckpointError(
                    f"{folder / name} is damaged: it has {size:,} bytes and not {entry.bytes:,}; {ANOTHER}"
                )

    def check_contents(self, folder: Path, names: Iterable[str]) -> None:
        """Reads these files, and raises CheckpointError for one that is not what was written."""
        for name in names:
            try:
                with (folder / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}; {ANOTHER}") from None
            if found != self.files[name].sha256:
                raise CheckpointError(f"{folder / name} is damaged: its content does not have its checksum; {ANOTHER}")


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
