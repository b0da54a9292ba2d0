"""What planning itself takes: CPU seconds, seconds and resident memory, imports included.

python -m tests.bench.planning gpt-100b gpt-1t --world 1024
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table


def measured(preset: str, world: int) -> tuple[float, float, int]:
    """Seconds, CPU seconds and the largest resident bytes of `python -m zerofx plan` in a process of its own."""
    command = [sys.executable, "-m", "zerofx", "plan", "--preset", preset, "--world", str(world)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.planning", description=__doc__)
    parser.add_argument("presets", nargs="+", help="names of presets, or module:function")
    parser.add_argument("--world", type=int, default=1024)
    given = parser.parse_args()
    table = Table("preset", "seconds", "CPU seconds", "largest RSS, MiB")
    for preset in given.presets:
        seconds, cpu, resident = measured(preset, given.world)
        table.add_row(preset, f"{seconds:.1f}", f"{cpu:.1f}", f"{resident / 2**20:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
