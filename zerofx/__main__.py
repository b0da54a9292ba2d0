"""The command line of zerofx: `python -m zerofx --help`."""

from __future__ import annotations

import argparse
import importlib
import math
import os
from pathlib import Path

import torch.distributed as dist

from zerofx.config import STAGES, Config
from zerofx.doctor import SECONDS, doctor
from zerofx.manager import Pass
from zerofx.manifest import CheckpointError
from zerofx.planning import command as plan_command
from zerofx.planning.measured import measured, write
from zerofx.planning.report import PlanError, read_plan
from zerofx.recipe import recipe
from zerofx.reporting.html import write_report
from zerofx.reporting.recording import RecordError, read_ranks
from zerofx.reporting.terminal import show_run
from zerofx.tune import tune
from zerofx.weights import export_weights, import_weights

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


def seconds(text: str) -> float:
    """A time to try something for, from the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: pass a number of seconds above 0")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zerofx")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("passes", help="print the table of passes")
    looks = commands.add_parser("doctor", help="print versions and backends, and try all-reduces")
    looks.add_argument("--seconds", type=seconds, default=SECONDS, help="how long to try; default: %(default)g")
    tuning = commands.add_parser("tune", help="measure the process group, on every rank of it")
    tuning.add_argument("--out", type=Path, help="also measure kernels, and write a hardware file to plan for")
    out = commands.add_parser("export", help="write a checkpoint's weights as safetensors or as a plain state dict")
    out.add_argument("checkpoint", type=Path)
    out.add_argument("out", type=Path, help="a folder for safetensors; a name in .pt, .pth or .bin for a state dict")
    into = commands.add_parser("import", help="make a checkpoint of safetensors or of a plain state dict")
    into.add_argument("source", type=Path, help="a file, or a folder of Hugging Face's")
    into.add_argument("checkpoint", type=Path)
    plan_command.add_arguments(commands.add_parser("plan", help="foresee memory, traffic and time on a cluster"))
    report = commands.add_parser("report", help="write a recorded run as one HTML file")
    report.add_argument("run", type=Path, help="the folder given as zerofx.compile(..., record=...)")
    report.add_argument("--plan", type=Path, help="a plan to compare with, as `plan --json` writes it")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"))
    show = commands.add_parser("inspect", help="print a recorded run: passes, programs, collectives, memory")
    show.add_argument("run", type=Path, help="the folder given as zerofx.compile(..., record=...)")
    show.add_argument("--rank", type=int, default=0)
    show.add_argument("--graph", type=int, default=0)
    show.add_argument("--step", metavar="NAME", help="print the program after this pass, or after that of a number")
    show.add_argument("--diff", nargs=2, metavar=("A", "B"), help="print how the programs of two steps differ")
    show.add_argument("--collectives", action="store_true", help="print each collective with its bytes")
    show.add_argument("--memory", action="store_true", help="print what is alive at the peak")
    arguments = parser.parse_args()
    command = arguments.command
    try:
        if command == "export":
            print("\n".join(map(str, export_weights(arguments.checkpoint, arguments.out))))
        elif command == "import":
            print(f"{import_weights(arguments.source, arguments.checkpoint)} tensors in {arguments.checkpoint}")
        elif command == "report":
            plan = None if arguments.plan is None else read_plan(arguments.plan)
            print(write_report(arguments.output, read_ranks(arguments.run), plan))
        elif command == "inspect":
            wanted = {name: getattr(arguments, name) for name in ("step", "diff", "collectives", "memory")}
            show_run(arguments.run, arguments.rank, arguments.graph, wanted)
    except (CheckpointError, RecordError, PlanError, OSError) as error:
        parser.exit(1, f"{error}\n")
    if command in ("export", "import", "report", "inspect"):
        return
    if command == "plan":
        parser.exit(plan_command.run(arguments))
    if command == "passes":
        print(pass_table())
    elif command == "doctor":
        parser.exit(doctor(arguments.seconds))
    elif "RANK" not in os.environ:
        parser.error("tune runs on every rank: python -m torch.distributed.run --nproc-per-node 2 -m zerofx tune")
    else:
        link = tune()
        if arguments.out:
            write(measured(link, arguments.out.stem), arguments.out)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
