"""Writes the record of a run while a model is compiled, on every rank into the same folder."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx.config import Config, ConfigError
from zerofx.layout import Layout
from zerofx.reporting.recording import Head, RankRecord, clear, clear_beyond, graph_record, write_graph, write_head
from zerofx.stage_report import PipelineReport

if TYPE_CHECKING:
    from zerofx.capture import Capture
    from zerofx.engine import Engine


class Recorder:
    """What one rank of a run writes. Once it cannot write it warns, and leaves training alone."""

    def __init__(self, folder: Path, head: Head) -> None:
        self.folder, self.head, self.broken = folder, head, False

    def begin(self, facts: Mapping[str, Any], problem: Exception | None) -> None:
        """Writes what the rank was asked for, before ranks compare it, so that a difference can be looked at."""
        self.head.facts = {name: _written(value) for name, value in facts.items()}
        self.head.problem = "" if problem is None else f"{type(problem).__name__}: {problem}"
        self._write()

    def placed(self, engine: Engine) -> None:
        """Adds where the rank is, how parameters are stored, and the pipeline."""
        fill(self.head, engine)
        self._write()

    def graph(self, index: int, capture: Capture, device: str) -> None:
        """Adds a graph that has been compiled for devices of that type."""
        if not self.broken:
            try:
                write_graph(self.folder, self.head.rank, graph_record(index, capture, device))
            except OSError as error:
                self._give_up(error)

    def _write(self) -> None:
        try:
            write_head(self.folder, self.head)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.broken = True
        warnings.warn(f"the record in {self.folder} ends here, it cannot be written: {error}", stacklevel=2)


def recorder(folder: object, model: nn.Module, config: Config) -> Recorder:
    """For the folder that zerofx.compile was given. Raises ConfigError for one that cannot be written to."""
    if not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(
            f"zerofx.compile(record={folder!r}) is not possible: record must be the name of a folder, or None"
        )
    path, head = Path(folder), head_of(model, config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        clear(path, head.rank)
        if head.rank == 0:
            clear_beyond(path, head.world)
        write_head(path, head)
    except OSError as error:
        raise ConfigError(
            f"zerofx.compile(record={str(folder)!r}) is not possible, it cannot be written: {error}"
        ) from None
    return Recorder(path, head)


def head_of(model: nn.Module, config: Config) -> Head:
    """What is known before the model is sharded."""
    ready = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    versions = {"torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    settings = {name: _written(value) for name, value in config.facts().items()}
    return Head(rank=rank, world=world, model=type(model).__name__, config=settings | versions)


def fill(head: Head, engine: Engine) -> None:
    """Adds what is known once the model is sharded."""
    head.place, head.params = dict(engine.parallel.coordinates) | {"dp": engine.rank}, params_of(engine.layout)
    if engine.pipelined is not None:
        head.place = {"pp": engine.pipelined.where.place, "dp": engine.pipelined.where.replica}
        head.pipeline = pipeline_of(engine.pipelined.plan.report)


def rank_record(engine: Engine, model: nn.Module, captures: Sequence[Capture]) -> RankRecord:
    """What this rank would have recorded so far."""
    head = head_of(model, engine.config)
    fill(head, engine)
    device = engine.device.type
    return RankRecord(head, tuple(graph_record(index, each, device) for index, each in enumerate(captures)))


def params_of(layout: Layout) -> list[dict[str, Any]]:
    """The parameters as JSON."""
    return [
        {
            "name": param.name,
            "size": list(param.size),
            "dtype": str(param.dtype).removeprefix("torch."),
            "dim": param.dim,
            "bytes": param.whole_bytes,
            "trained": param.requires_grad,
            "tied": list(param.tied),
        }
        for param in layout
    ]


def pipeline_of(report: PipelineReport) -> dict[str, Any]:
    """The report on a pipeline as JSON: its stages, and when each rank computes what."""
    asked, simulated = report.pipeline, report.simulated
    return {
        "schedule": asked.schedule,
        "microbatches": asked.microbatches,
        "ranks": asked.ranks,
        "places": asked.places,
        "machine": report.machine,
        "limit": report.limit,
        "imbalance": report.imbalance,
        "bubble": simulated.bubble,
        "expected": simulated.expected,
        "seconds": simulated.seconds,
        "stages": [asdict(stage) for stage in report.stages],
        "chart": [[[*each.action, each.start, each.end] for each in rank] for rank in simulated.placed],
    }


def _written(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
