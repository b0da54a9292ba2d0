"""The random number generators of a rank: Python's, NumPy's, torch's, and that of the rank's GPU."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Generators = dict[str, Any]


def generators() -> Generators:
    """Their states, in plain values; NumPy's only where it is imported, the GPU's only where it is in use."""
    found: Generators = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), *map(float, rest))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def digests(states: Generators) -> dict[str, str]:
    """What tells whether two ranks have the same state."""
    return {kind: hashlib.sha256(_bytes(state)).hexdigest() for kind, state in states.items()}


def resume(states: Generators) -> None:
    """Gives the generators the states."""
    if "python" in states:
        random.setstate(states["python"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        name, keys, place, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), int(place), int(has_gauss), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def spread(states: Generators, of_ranks: Sequence[Mapping[str, str]], rank: int) -> None:
    """Gives the generators states where the ranks are others than those that saved: `states` are the first rank's.

    A generator that was in one state on all ranks is so again; others are seeded by the first rank's state and by the
    rank's number, so that ranks differ, and differ in the same way each time.
    """
    shared = {kind: state for kind, state in states.items() if len({each.get(kind) for each in of_ranks}) == 1}
    resume(shared)
    for kind in states.keys() - shared.keys():
        seed = int.from_bytes(hashlib.sha256(_bytes(states[kind]) + f" {rank}".encode()).digest()[:8])
        if kind == "python":
            random.seed(seed)
        elif kind == "torch":
            torch.default_generator.manual_seed(seed % 2**63)
        elif kind == "numpy" and (numpy := sys.modules.get("numpy")):
            numpy.random.seed(seed % 2**32)
        elif kind == "cuda" and torch.cuda.is_available():
            torch.cuda.manual_seed(seed % 2**63)


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, tuple):
        return b"".join(map(_bytes, state))
    return repr(state).encode()
