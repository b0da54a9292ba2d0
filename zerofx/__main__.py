"""The command line: `python -m zerofx passes` prints the table of passes, `tune` measures the process group."""

from __future__ import annotations

import argparse
import importlib
import os

import torch.distributed as dist

from zerofx.config import STAGES, Config
from zerofx.manager import Pass
from zerofx.recipe import recipe
from zerofx.tune import tune

BACKENDS = ("nccl", "gloo")


def pass_table() -> str:
    """The default passes of all stages and backends, and of `reduce_dtype`, in their order, as a Markdown table."""
    stages: dict[str, set[int]] = {}
    backends: dict[str, set[str]] = {}
    passes: list[Pass] = []
    for backend in BACKENDS:
        for stage in reversed(STAGES):
            place = 0
            for step in recipe(Config(stage=stage, reduce_dtype="bf16"), backend):
                if step.name not in stages:
                    passes.insert(place, step)
                place = [known.name for known in passes].index(step.name) + 1
                stages.setdefault(step.name, set()).add(stage)
                backends.setdefault(step.name, set()).add(backend)
    rows = ["| pass | level | stages | on | needs | ensures | what it does |", "|---|---|---|---|---|---|---|"]
    for step in passes:
        needs, ensures = (", ".join(sorted(i.name for i in kind)) or "-" for kind in (step.requires, step.ensures))
        does = (importlib.import_module(type(step).__module__).__doc__ or "").strip()
        where = "all" if len(backends[step.name]) == len(BACKENDS) else ", ".join(backends[step.name])
        numbers = ", ".join(map(str, sorted(stages[step.name])))
        rows.append(f"| `{step.name}` | {step.level.value} | {numbers} | {where} | {needs} | {ensures} | {does} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zerofx", description=__doc__)
    parser.add_argument("command", choices=["passes", "tune"])
    command = parser.parse_args().command
    if command == "passes":
        print(pass_table())
    elif "RANK" not in os.environ:
        parser.error("tune runs on every rank: python -m torch.distributed.run --nproc-per-node 2 -m zerofx tune")
    else:
        tune()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
