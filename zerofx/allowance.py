"""How many bytes `memory` allows one rank."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
LIMIT = Path("/sys/fs/cgroup/memory.max")
Memory = str | int | float


def is_memory(value: object) -> bool:
    """Whether it is a number of bytes, bytes with a unit, or a fraction of a device's memory."""
    if isinstance(value, str):
        return _parsed(value) is not None
    return (type(value) is int and value > 0) or (isinstance(value, float) and 0 < value <= 1)


def allowed_bytes(memory: Memory, device: torch.device) -> int:
    """Bytes; a fraction is one of what one rank has of the device's memory.

    That is all of a GPU, and on the CPU the host's memory, or the container's limit, divided by the ranks on the host.
    """
    if isinstance(memory, str):
        found = _parsed(memory)
        assert found is not None
        return found
    return int(memory * device_bytes(device)) if isinstance(memory, float) else memory


def device_bytes(device: torch.device) -> int:
    """What one rank has of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if LIMIT.exists() and (limit := LIMIT.read_text().strip()).isdigit():
        total = min(total, int(limit))
    everyone = dist.get_world_size() if dist.is_initialized() else 1
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", everyone))


def _parsed(text: str) -> int | None:
    """The bytes of a text like 20GiB or 1.5 GB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", text)
    if found is None or found[2] not in UNITS:
        return None
    return int(float(found[1]) * UNITS[found[2]]) or None
