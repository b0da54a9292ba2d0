"""What `accumulate` means follows from the stage, and from the memory that the forecast leaves."""

from __future__ import annotations

import pytest
import torch

from zerofx.config import Config, ConfigError
from zerofx.decide import NOTHING_DECIDED, Settled
from zerofx.defer import defers
from zerofx.engine import Engine
from zerofx.layout import Layout, ParamLayout
from zerofx.mesh import Mesh

PARAMS = ParamLayout("w", (5, 4), torch.float32, 0), ParamLayout("frozen", (50, 4), torch.float32, 0, False)
WHOLE = 6 * 4 * 4  # of the trained parameter, with the row that pads it


def engine(stage: int, settled: Settled | None = None) -> Engine:
    made = Engine(Config(stage=stage), (), Mesh.of(dp=2), Layout(PARAMS), rank=0)
    made.settled = settled
    return made


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_asked_for_is_done(stage: int) -> None:
    assert (engine(stage).defers("defer"), engine(stage).defers("reduce")) == (True, False)


@pytest.mark.parametrize(("stage", "found"), [(0, True), (1, True), (2, False), (3, False)])
def test_without_a_limit_of_memory_it_is_the_stages_policy(stage: int, found: bool) -> None:
    assert engine(stage).defers("auto") is found
    assert engine(stage, Settled(NOTHING_DECIDED, 1000, None)).defers("auto") is found


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_gradients_wait_where_they_fit_beside_the_peak(stage: int) -> None:
    fits, too_much = (Settled(NOTHING_DECIDED, 1000 + more, 1000 + WHOLE) for more in (0, 1))
    assert (engine(stage, fits).defers("auto"), engine(stage, too_much).defers("auto")) == (True, False)


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accumulate='later' is not possible: .*'auto', 'defer', 'reduce'"):
        defers(engine(3), "later")
