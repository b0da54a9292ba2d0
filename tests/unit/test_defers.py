"""Whether whole gradients wait for the last micro-batch follows from the stage, and from what memory is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerofx.config import Config
from zerofx.decide import NOTHING_DECIDED, Settled
from zerofx.layout import Layout, ParamLayout
from zerofx.mesh import Mesh
from zerofx.step_arguments import defers

LAYOUT = Layout(
    (
        ParamLayout("a", (9, 10), torch.float32, 0),
        ParamLayout("b", (10,), torch.bfloat16, None),
        ParamLayout("frozen", (1000,), torch.float32, 0, requires_grad=False),
    )
)
WHOLE = 10 * 10 * 4  # with the row that pads it; that of the replicated one is counted as stored


def engine(stage: int, memory: int | None = None, peak: int | None = None) -> Any:
    settled = None if peak is None else Settled(NOTHING_DECIDED, 0, memory, deferred=peak)
    return SimpleNamespace(
        config=Config(stage=stage, memory=memory), layout=LAYOUT, settled=settled, mesh=Mesh.of(dp=2)
    )


@pytest.mark.parametrize(("stage", "expected"), [(0, True), (1, True), (2, False), (3, False)])
def test_without_memory_the_stage_decides(stage: int, expected: bool) -> None:
    assert defers("auto", engine(stage)) is expected
    assert defers("defer", engine(stage)) is True and defers("reduce", engine(stage)) is False


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_memory_whole_gradients_must_fit_into_the_rest(stage: int) -> None:
    assert defers("auto", engine(stage, 10_000, 10_000 - WHOLE)) is True
    assert defers("auto", engine(stage, 10_000, 10_001 - WHOLE)) is False
    assert defers("auto", engine(stage, 10_000)) is False


def test_at_stage_0_gradients_are_whole_anyway() -> None:
    assert defers("auto", engine(0, 10_000, 10_000)) is True
