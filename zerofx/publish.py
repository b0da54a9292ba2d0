"""Makes a written folder appear under its name in one move, and finds and removes the checkpoints of a folder."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from zerofx.manifest import NAME, CheckpointError, Manifest

PARTIAL = ".partial"
REPLACED = ".replaced"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux's constants of renameat2."""


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint among those that `zerofx.save` has put into the folder, or None.

    Whole ones have a right manifest and all files with their sizes; what a save that was killed has left is passed
    over. Newest is the one saved last. Contents are compared with their checksums as they are loaded.
    """
    found = whole(Path(folder))
    return found[-1] if found else None


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints in the folder, oldest first."""
    dated = list[tuple[float, Path]]()
    for place in folder.iterdir() if folder.is_dir() else ():
        if place.name.startswith(".") or not (place / NAME).is_file():
            continue
        try:
            manifest = Manifest.read(place)
            manifest.check_sizes(place)
        except CheckpointError:
            continue
        dated.append((manifest.time, place))
    return [place for _, place in sorted(dated)]


def refuse_target(path: Path, overwrite: bool) -> None:
    """Raises CheckpointError where a checkpoint may not be put under that name."""
    if not path.name:
        raise CheckpointError(f"{path} is not the name of a checkpoint: give one of its own, such as {path}/step-1")
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link: give the name of the folder itself")
    if not path.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{path} exists already: save under another name, or pass overwrite=True to replace it")
    if not (path / NAME).is_file():
        raise CheckpointError(f"{path} is no checkpoint of zerofx.save, and is not replaced: save under another name")


def begin(path: Path) -> Path:
    """Makes the folder, beside the checkpoint's place, in which it is written. What a killed save has left there goes.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.iterdir():
        if left.name.startswith(f".{path.name}.") and left.name.endswith(PARTIAL):
            shutil.rmtree(left, ignore_errors=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    partial.mkdir()
    return partial


def publish(partial: Path, path: Path, overwrite: bool) -> None:
    """Gives a folder, whose files are on the disk, its name; what has the name goes with `overwrite`.

    At no moment is there less than one of both, whole; without a way to exchange two folders at once, the old one is
    for a moment under its name with `.replaced` behind it, where `latest` finds it, too. Raises OSError.
    """
    sync_folder(partial)
    if not (overwrite and path.exists()):
        partial.rename(path)
        sync_folder(path.parent)
        return
    if _exchange(partial, path):
        sync_folder(path.parent)
        shutil.rmtree(partial, ignore_errors=True)
        return
    old = path.with_name(path.name + REPLACED)
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    partial.rename(path)
    sync_folder(path.parent)
    remove(old)


def refuse_keep(keep: int | None, slices: bool) -> None:
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r} is not possible: pass how many checkpoints to keep, at least 1")
    if keep is not None and slices:
        raise CheckpointError(
            f"keep={keep} is not possible where each slice of a model has a folder of its own: leave keep out, and "
            "remove old checkpoints with all of their slices"
        )


def prune(path: Path, keep: int) -> None:
    """Removes whole checkpoints but for the newest `keep`, of those named like `path` but for numbers. Raises OSError.

    Others beside it, such as imported weights or one that was saved as the best so far, are nobody's to remove.
    """
    series = [place for place in whole(path.parent) if _without_numbers(place) == _without_numbers(path)]
    for place in series[:-keep]:
        remove(place)


def _without_numbers(path: Path) -> str:
    return re.sub(r"\d+", "0", path.name.removesuffix(REPLACED))


def remove(place: Path) -> None:
    """Removes a checkpoint; it has lost its name before its first file goes."""
    doomed = place.with_name(f".{place.name}.{secrets.token_hex(4)}{PARTIAL}")
    place.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one move; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
