"""Keeps the recorded steps beside the compile cache, since a graph that comes from the cache runs no pass."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from zerofx import _torch
from zerofx.capture import Capture
from zerofx.manager import Step
from zerofx.origins import origins_of


@functools.cache
def source() -> str:
    """A hash of the source of zerofx and its passes."""
    here = Path(__file__).parent
    files = sorted([*here.glob("*.py"), *(here / "passes").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def key(gm: GraphModule, inputs: Sequence[Any], params: Mapping[int, str], digest: str) -> str:
    """Names a captured graph: its code, its inputs and all that decides what the passes make of it."""
    told = [torch.__version__, digest, str(gm.graph), repr(sorted(params.items())), *map(_describe, inputs)]
    devices = sorted({value.device.type for value in inputs if isinstance(value, Tensor)})
    told += [repr((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(_autocast, devices)))]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _autocast(device: str) -> tuple[str, bool, torch.dtype] | None:
    if not torch.amp.is_autocast_available(device):
        return None
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    shape = list(map(str, value.shape))
    return f"{type(value).__name__} {value.dtype} {value.device.type} {value.requires_grad} {shape}"


def shapes_key(key: str, inputs: Sequence[Any], steady: int) -> str:
    """Names a captured graph together with the values of its sizes, and with what torch is set to."""
    sizes = [[_torch.hint(size) for size in value.shape] for value in inputs if isinstance(value, Tensor)]
    sizes += [[_torch.hint(value)] for value in inputs if isinstance(value, torch.SymInt)]
    return hashlib.sha256(repr((key, steady, sizes, _torch.settings())).encode()).hexdigest()


def forecasts(name: str) -> dict[str, Any]:
    """What was foreseen for a graph with each decision that was thought of; nothing where there is no whole record."""
    try:
        return dict(read_json(_path(name)))
    except (OSError, EOFError, ValueError):
        return {}


def save_forecasts(name: str, told: dict[str, Any]) -> None:
    """Writes them, as `save` does."""
    _write(name, told)


def save(name: str, capture: Capture) -> None:
    """Writes the steps; a record that cannot be written is only missed by a later process."""
    steps = [asdict(step) for step in capture.steps]
    _write(name, {"kind": capture.kind, "steps": steps, "origins": capture.origins})


def _write(name: str, told: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        write_json(_path(name), told)


def write_json(path: Path, told: Any) -> None:
    """Writes compressed JSON, which a reader finds whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(gzip.compress(json.dumps(told).encode(), 6))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def read_json(path: Path) -> Any:
    """Reads what `write_json` wrote. Raises OSError, EOFError or ValueError."""
    return json.loads(gzip.decompress(path.read_bytes()))


def keep(name: str, capture: Capture) -> None:
    """Saves the steps, or fills in those that were saved where the graph came from the compile cache."""
    if capture.steps:
        save(name, capture)
    else:
        load(name, capture)


def load(name: str, capture: Capture) -> bool:
    """Fills the capture with recorded steps; False where there is no whole record."""
    try:
        told = read_json(_path(name))
    except (OSError, EOFError, ValueError):
        return False
    capture.kind = told["kind"]
    capture.steps = [Step(**step) for step in told["steps"]]
    capture.origins = origins_of(told["origins"])
    return True


def _path(name: str) -> Path:
    return Path(_torch.inductor_cache_dir()) / "zerofx" / f"{name}.json.gz"
