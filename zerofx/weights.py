"""`python -m zerofx export` and `import`: a model's weights between checkpoints, safetensors and plain state dicts."""

from __future__ import annotations

import json
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from zerofx import publish
from zerofx.checkpoint_files import Reader
from zerofx.loading import Saved
from zerofx.manifest import CheckpointError
from zerofx.parts import Part
from zerofx.saved_names import MODEL
from zerofx.saving import Job

PLAIN = (".pt", ".pth", ".bin")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWNLOAD = "copy or download it once more"
FILE_BYTES = 4 * 2**30
"""The most that one file of safetensors holds, and so what an export holds at a time, but for larger tensors."""


def safetensors() -> Any:
    """The library, which is an extra of zerofx."""
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError("safetensors is not installed: pip install 'zerofx[safetensors]'") from None
    return safetensors


def export_weights(checkpoint: Path, out: Path, file_bytes: int = FILE_BYTES) -> list[Path]:
    """Writes the weights of a checkpoint, and returns the files: a plain state dict if `out` ends in .pt, .pth or .bin.

    Otherwise `out` becomes a folder of safetensors as Hugging Face's libraries write them, in files of at most
    `file_bytes`, of which one is in memory at a time; a plain state dict is in memory whole.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already: export under another name")
    saved = Saved.read(checkpoint.absolute(), None)
    names = saved.beside["names"]
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = out.absolute().with_name(f".{out.name}.{secrets.token_hex(4)}{publish.PARTIAL}")
    if out.suffix in PLAIN:
        torch.save(read_weights(saved, names) | saved.beside["objects"], partial)
        partial.rename(out)
        return [out]
    library = safetensors()
    partial.mkdir()
    try:
        written = _write_files(saved, _files(saved, names, file_bytes), partial, library)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return [out / name for name in written]


def _write_files(saved: Saved, files: list[list[str]], folder: Path, library: Any) -> list[str]:
    names = (
        [WHOLE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    )
    total = 0
    for name, held in zip(names, files, strict=True):
        tensors = read_weights(saved, held)
        total += sum(tensor.nbytes for tensor in tensors.values())
        library.torch.save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(files) == 1:
        return names
    places = {key: name for name, held in zip(names, files, strict=True) for key in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1))
    return [*names, INDEX]


def _files(saved: Saved, names: list[str], most: int) -> list[list[str]]:
    """The names by the files that hold them."""
    files, left = list[list[str]]([[]]), most
    for name in names:
        found = saved.size_of((*MODEL, name))
        assert found is not None
        size = found.size.numel() * found.properties.dtype.itemsize
        if size > left and files[-1]:
            files.append([])
            left = most
        files[-1].append(name)
        left -= size
    return files


def read_weights(saved: Saved, names: list[str]) -> dict[str, Tensor]:
    """The model's tensors of these names, whole. Raises CheckpointError."""
    targets = dict[str, Tensor]()
    for name in names:
        found = saved.size_of((*MODEL, name))
        if found is None:
            raise CheckpointError(f"{saved.folder} has no {name!r}: export another checkpoint")
        targets[".".join((*MODEL, name))] = torch.empty(found.size, dtype=found.properties.dtype)
    reader = Reader(saved.folder, saved.manifest.files)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_loader.load(targets, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{saved.folder} cannot be read: {error}; export another checkpoint") from None
    start = len(MODEL[0]) + 1
    return {name[start:]: tensor for name, tensor in targets.items()}


def import_weights(source: Path, checkpoint: Path) -> int:
    """Makes a checkpoint of weights, and returns how many tensors it has.

    `source` is a file of safetensors or of a plain state dict, or a folder with Hugging Face's names. Its files are
    mapped into memory, so that only the tensor that is being written is in it. Nothing in them is executed.
    """
    tensors = weights_of(source)
    target = checkpoint.absolute()
    publish.refuse_target(target, overwrite=False)
    folder = publish.begin(target)
    beside: dict[str, Any] = {"step": None, "extra": None, "objects": {}, "optimizer": None, "names": list(tensors)}
    beside |= {"scheduler": [], "loss_scale": None, "world": 1, "generators": []}
    part = Part({(*MODEL, name): tensor for name, tensor in tensors.items()}, beside)
    Job(part, folder, target, None).run()
    return len(tensors)


def weights_of(source: Path) -> Mapping[str, Tensor]:
    """The tensors of a file or folder, by name. Raises CheckpointError."""
    tensors = dict[str, Tensor]()
    for file, wanted in _sources(source):
        found = _read_safetensors(file) if file.suffix == ".safetensors" else _read_plain(file)
        if lost := set(wanted or ()) - found.keys():
            raise CheckpointError(f"{file} does not have {min(lost)!r}, which the index says it has: {DOWNLOAD}")
        tensors |= {name: found[name] for name in wanted or found}
    return tensors


def _sources(source: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The files of a source, each with the names that are to be read; None for all."""
    if source.is_file():
        yield source, None
        return
    for whole in (WHOLE, "pytorch_model.bin"):
        if (source / whole).is_file():
            yield source / whole, None
            return
    for index in (INDEX, "pytorch_model.bin.index.json"):
        if (source / index).is_file():
            try:
                places: dict[str, str] = json.loads((source / index).read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{source / index} is no index of weights: {error!r}; {DOWNLOAD}") from None
            for file in dict.fromkeys(places.values()):
                yield source / Path(file).name, [name for name, place in places.items() if place == file]
            return
    found = "has no weights" if source.exists() else "is not there"
    raise CheckpointError(f"{source} {found}: give a .safetensors, .pt, .pth or .bin file, or a folder of {WHOLE}")


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    library = safetensors()
    try:
        with library.safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, library.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; {DOWNLOAD}") from None


def _read_plain(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        raise CheckpointError(f"{file} cannot be read: {(str(error).splitlines() or [''])[0]}; {DOWNLOAD}") from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{file} is not a state dict of tensors: save model.state_dict() alone")
    return {str(name): value for name, value in found.items()}
