"""`python -m zerofx plan`: plans a preset, or a model of one's own, and prints, saves and draws what will happen."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zerofx.config import ConfigError, ModelError
from zerofx.pipeline import SCHEDULES, Pipeline
from zerofx.planning import hardware, presets
from zerofx.planning.plan import plan
from zerofx.planning.show import draw, front, matplotlib, tables
from zerofx.reporting.console import console_for

Found = tuple[Callable[[], Any], Sequence[Any]]
"""What makes the model, and the batch of one rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--preset", metavar="NAME", help="a preset, or module:function, which returns model_fn, batch")
    parser.add_argument("--world", type=int, help="ranks in all")
    parser.add_argument("--hardware", default="h100-8x400g", help=f"{', '.join(hardware.names())}, or a TOML file")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO's, 0 to 3 (default 3)")
    parser.add_argument("--precision", default=None, help="fp32, bf16 or fp16; default: bf16, fp16 where there is none")
    parser.add_argument(
        "--batch", type=int, default=None, help="sequences of one rank in a step; default: micro-batches"
    )
    parser.add_argument("--sequence", type=int, default=None, help="tokens of a sequence; default: the preset's")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pipeline", type=int, default=1, metavar="STAGES")
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES)
    parser.add_argument("--recompute", type=float, default=0.0, help="the share of activations, 0 to 1")
    parser.add_argument("--bucket-mb", type=float, default=None)
    parser.add_argument("--search", action="store_true", help="find the best layouts, for --batch rows a rank")
    parser.add_argument("--json", type=Path, help="where the plan is written as JSON")
    parser.add_argument("--png", type=Path, help="where the memory over time is drawn")


def run(given: argparse.Namespace) -> int:
    """Plans what the arguments ask for; returns the exit status, 1 for what cannot be planned."""
    console = console_for(sys.stdout)
    if not given.preset or given.world is None:
        print(f"python -m zerofx plan needs --preset and --world: presets are {', '.join(names())}", file=sys.stderr)
        return 1
    try:
        _look_ahead(given)
        machine = hardware.load(given.hardware)
        precision = given.precision or ("bf16" if "bf16" in machine.peak else "fp16")
        model_fn, batch = _find(given)
        if given.search:
            best = plan(model_fn, batch, world=given.world, precision=precision, hardware=machine, search=True)
            console.print(front(best))
            return 0 if best.front else 1
        pipeline = None
        if given.pipeline != 1:
            pipeline = Pipeline(given.pipeline, given.schedule, given.microbatches)
        with Console(stderr=True).status(f"planning {given.preset} on {given.world:,} ranks"):
            found = plan(
                model_fn,
                batch,
                world=given.world,
                stage=given.stage,
                precision=precision,
                microbatches=given.microbatches,
                pipeline=pipeline,
                tensor=given.tensor,
                recompute=given.recompute,
                hardware=machine,
                bucket_mb=given.bucket_mb,
            )
        console.print(tables(found))
        if given.json:
            given.json.write_text(found.to_json())
        if given.png:
            draw(found, given.png)
    except (ConfigError, ModelError, hardware.HardwareError, RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _look_ahead(given: argparse.Namespace) -> None:
    """Raises for what would only be missed when the plan is made."""
    if given.png:
        matplotlib()
    for path in (given.json, given.png):
        if path and (not path.absolute().parent.is_dir() or path.is_dir()):
            raise ConfigError(f"{path} cannot be written: give the name of a file in a folder that is there")
    for name in ("batch", "sequence"):
        count = getattr(given, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name} {count} is not possible: give 1 or more")


def names() -> list[str]:
    """The presets."""
    return sorted(presets.PRESETS)


def _find(given: argparse.Namespace) -> Found:
    if ":" not in given.preset:
        return _preset(given)
    module, _, name = given.preset.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{given.preset!r} names no function: {error}") from None
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise ConfigError(f"{given.preset} must return (model_fn, batch), a function and one rank's batch")
    return made[0], made[1]


def _preset(given: argparse.Namespace) -> Found:
    if given.preset not in presets.PRESETS:
        raise ConfigError(f"there is no preset {given.preset!r}: take one of {', '.join(names())}, or module:function")
    preset = presets.PRESETS[given.preset]
    rows, length = given.batch or given.microbatches, given.sequence or preset.shape.sequence
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    return preset.build, (ids, ids)
