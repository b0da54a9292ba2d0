"""Looks at the processes of ranks on the same host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from zerofx.verdict import GONE, RUNNING, STOPPED, UNKNOWN

PROC = Path("/proc")


def this_host() -> str:
    """Names the host and what tells process ids apart on it: containers may share its name, not its processes."""
    try:
        space = (PROC / "self/ns/pid").readlink()
    except OSError:
        space = Path()
    return f"{socket.gethostname()} {space}"


def born(pid: int) -> str:
    """When a process began, so that another one with its id is not taken for it; empty where that is not known."""
    fields = _fields(pid)
    return fields[19] if fields else ""


def process_state(pid: int, birth: str) -> str:
    """How a process of this host is."""
    if not birth:
        return UNKNOWN
    fields = _fields(pid)
    if not fields or fields[19] != birth or fields[0] in "ZX":
        return GONE
    return STOPPED if fields[0] in "Tt" else RUNNING


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: the state, and as the twentieth of them the start time."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def address(first_rank: bool) -> str:
    """An address of this host that other hosts reach: that on the way to torchrun's master, if there is one."""
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return socket.gethostname()
    if first_rank:
        return master
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, 9))  # sends nothing
            return str(way.getsockname()[0])
    except OSError:
        return socket.gethostname()
