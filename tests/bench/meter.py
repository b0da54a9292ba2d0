"""Memory of a process: the heap's bytes by a preloaded shim, resident memory by the kernel."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("heap_meter.c")
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def build(folder: Path, compiler: str = "gcc") -> Path:
    """Compiles the shim into `folder` and returns its path, for LD_PRELOAD."""
    folder.mkdir(parents=True, exist_ok=True)
    library = (folder / "heap_meter.so").resolve()
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


@dataclass(frozen=True)
class Heap:
    """Bytes in heap blocks: all of them, and those in blocks of at least 64 KiB."""

    live: int
    peak: int
    large_live: int
    large_peak: int


class HeapMeter:
    """The shim that was preloaded into this process; RuntimeError where there is none."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "heap_meter_read"):
            raise RuntimeError("no heap meter in this process: start it with LD_PRELOAD set to the built shim")

    def read(self) -> Heap:
        out = (ctypes.c_long * 4)()
        self._library.heap_meter_read(out)
        return Heap(*out)

    def reset_peak(self) -> None:
        self._library.heap_meter_reset_peak()


def resident() -> tuple[int, int]:
    """The resident bytes of this process, now and at most since `reset_resident_peak`."""
    now, most = (re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    if now is None or most is None:
        raise RuntimeError(f"{STATUS} has no VmRSS and VmHWM: the benchmark needs Linux")
    return int(now[1]) * 1024, int(most[1]) * 1024


def reset_resident_peak() -> bool:
    """Makes the peak what is resident now; False where the kernel does not offer it and the peak is the process's."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
