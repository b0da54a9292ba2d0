"""Gathers the parameters of a stage for each of its computations, and releases them behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zerofx import _torch
from zerofx.planning.hardware import H100
from zerofx.stage_report import PipelineReport

Gather = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Gathers parameters by their names."""


class Released:
    """Whole parameters that have memory while a stage that reads them computes.

    What autograd has kept of one between forward and backward is the same memory, and is there again.
    """

    def __init__(self, gather: Gather, wholes: Mapping[str, Tensor]) -> None:
        self.gather, self.wholes = gather, wholes
        self.storages = {name: whole.untyped_storage() for name, whole in wholes.items()}
        self.sizes = {name: storage.nbytes() for name, storage in self.storages.items()}
        self.ids = {_torch.storage_id(whole): name for name, whole in wholes.items()}
        for storage in self.storages.values():
            storage.resize_(0)

    @contextmanager
    def there(self, names: Sequence[str]) -> Iterator[None]:
        """The time in which these are gathered; those that are stored whole are left out."""
        wanted = [name for name in names if name in self.wholes]
        with torch.no_grad():
            for name, value in self.gather(wanted).items() if wanted else ():
                self.storages[name].resize_(self.sizes[name])
                self.wholes[name].data.copy_(value)  # past the version that autograd compares
        try:
            yield
        finally:
            for name in wanted:
                self.storages[name].resize_(0)


def warn_of_traffic(report: PipelineReport, stages: Sequence[int], ranks: int) -> None:
    """Warns of stages that gather longer than they compute, by the cost model."""
    for place in stages:
        stage = report.stages[place]
        seconds = 2 * H100.collective_seconds("all_gather_into_tensor", stage.params, ranks)
        if seconds > stage.seconds:
            warnings.warn(
                f"zerofx.Pipeline(gather='always'): for each micro-batch stage {place} gathers for {seconds * 1e6:.3g} "
                f"us and computes for {stage.seconds * 1e6:.3g} us, by the cost model of {H100.name}, so that the "
                "traffic cannot hide: give micro-batches more rows, or take gather='once'",
                stacklevel=2,
            )
