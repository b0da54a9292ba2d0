"""Looks at the processes of ranks on the same host, and opens the store through which ranks of all hosts tell."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from zerofx._torch import TCPStore
from zerofx.verdict import GONE, RUNNING, STOPPED, UNKNOWN

PROC = Path("/proc")
LIMIT = timedelta(seconds=20)


@dataclass(frozen=True)
class Offer:
    """Where the group's first rank hosts the store, and how many times the group has compiled; `port` 0: nowhere."""

    host: str
    address: str
    port: int
    epoch: int


def host_store(keys: Iterable[str]) -> tuple[TCPStore, Offer]:
    """A store on a free port of this host, in which the keys have empty values."""
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    for key in keys:
        store.set(key, "")
    return store, Offer(this_host(), _address(), store.port, 0)


def connect(offer: Offer, host: str) -> TCPStore:
    """The store that was offered, from a rank on `host`."""
    where = "127.0.0.1" if offer.host == host else offer.address
    return TCPStore(where, offer.port, timeout=LIMIT, wait_for_workers=False)


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


def _address() -> str:
    """An address of this host that other hosts reach: that on the way to torchrun's master, if there is one."""
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return socket.gethostname()
    if dist.get_rank() == 0:
        return master
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, 9))  # sends nothing
            return str(way.getsockname()[0])
    except OSError:
        return socket.gethostname()
