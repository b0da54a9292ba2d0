"""The files of a checkpoint: written with their checksums by torch.distributed.checkpoint, and read without code."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from zerofx.manifest import ANOTHER, CheckpointError, Entry

METADATA = ".metadata"
CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}
"""What the pickle of a checkpoint's metadata may name, beside the dtypes of torch: plain records, which run nothing."""


class Hashed:
    """A file that is written once, from its start; it takes the checksum of what passes."""

    def __init__(self, file: IO[bytes], told: Callable[[int], None] = lambda count: None) -> None:
        self.file, self.hash, self.bytes, self.told = file, hashlib.sha256(), 0, told
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        """Keeps what goes wrong, such as a full disk, of which torch.save's own error tells nothing."""
        try:
            count = self.file.write(data)
            self.hash.update(data)
            self.told(count)
        except Exception as error:
            self.error = error
            raise
        self.bytes += count
        return count

    def entry(self) -> Entry:
        return Entry(self.bytes, self.hash.hexdigest())

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


class Files(FileSystem):
    """A folder's files, with an entry for each that was written. `told` hears of the bytes as they are."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.told = told
        self.entries: dict[str, Entry] = {}
        self.error: Exception | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        place = Path(path)
        try:
            with place.open(mode) as file:
                hashed = Hashed(cast("IO[bytes]", file), self.told)
                try:
                    yield cast("io.IOBase", hashed)
                finally:
                    self.error = self.error or hashed.error
        except OSError as error:
            self.error = self.error or error
            raise
        self.entries[place.name] = hashed.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes a rank's tensors into one file, and on the first rank the metadata; both are on the disk behind it."""

    def __init__(self, folder: Path, told: Callable[[int], None]) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self.files = self.fs = Files(told)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the folder's name while it is written is nobody's concern


class Reader(FileSystemReader):
    """Reads tensors of the files that the manifest lists."""

    def __init__(self, folder: Path, files: Mapping[str, Entry]) -> None:
        super().__init__(folder)
        self.folder, self.known = folder, files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(self.folder)
        for info in metadata.storage_data.values():
            if info.relative_path not in self.known or info.transform_descriptors:
                raise CheckpointError(
                    f"{self.folder / METADATA} names {info.relative_path!r}, and the manifest does not; {ANOTHER}"
                )
        return metadata


def failure_of(error: CheckpointException, rank: int) -> BaseException | None:
    """What torch.distributed.checkpoint says that went wrong on this rank; None where it was another one."""
    mine = next((found for place, (found, _) in error.failures.items() if place == rank), None)
    return mine if error.failures else CheckpointError(str(error))


class PlainUnpickler(pickle.Unpickler):
    """Makes the records of a checkpoint's metadata, and refuses whatever else a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        if name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """Where each tensor of a checkpoint is. Raises CheckpointError for what is no such record."""
    place = folder / METADATA
    try:
        with place.open("rb") as file:
            metadata = PlainUnpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"{place} is not the metadata of a checkpoint: {error}; {ANOTHER}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(
            f"{place} is not the metadata of a checkpoint: it holds {type(metadata).__name__}; {ANOTHER}"
        )
    return metadata


def write_plain(state: Any, place: Path) -> Entry:
    """Writes a tree of plain values, and waits until it is on the disk. Raises OSError."""
    with place.open("wb") as file:
        hashed = Hashed(file)
        hashed.write(as_bytes(state))
        hashed.flush()
        os.fsync(hashed.fileno())
    return hashed.entry()


def as_bytes(state: Any) -> bytes:
    """A tree of plain values in the format of torch.save.

    Raises CheckpointError for what torch.load would not load with `weights_only`, for that would run code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        reason = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).partition(" was not an allowed")[0]
        raise CheckpointError(
            f"what is to be saved cannot be loaded without running code ({reason.splitlines()[0]}): "
            "give numbers, strings, tensors, and lists, tuples and dicts of them"
        ) from None
    return buffer.getvalue()


def read_plain(place: Path) -> Any:
    """What `write_plain` wrote; nothing in it is executed. Raises CheckpointError."""
    try:
        return torch.load(place, map_location="cpu", weights_only=True)
    except (OSError, pickle.PickleError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{place} cannot be read: {str(error).splitlines()[0]}; {ANOTHER}") from None
