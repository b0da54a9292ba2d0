"""A step that is traced without processes sends what the ranks of a compiled model send, in the same order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import zerofx
from tests.models import gpt
from tests.pool import Pool
from zerofx.config import Config
from zerofx.manager import Pass
from zerofx.recipe import recipe
from zerofx.text import show
from zerofx.textgraph import read
from zerofx.trace import trace

WORLD = 2
Sent = list[tuple[str, str, tuple[str, ...], str, list[int]]]


def config(stage: int) -> Config:
    return Config(stage=stage, persist_below=100, bucket_mb=2**-7)


def sent(text: str) -> Sent:
    """Half, kind, parameters, dtype and elements of each collective of a program, in the order of issue."""
    program = read(text)
    return [
        (part.name, line.collective, line.params, line.dtype, list(line.numels))
        for part in program.graphs
        for line in part.sent
    ]


def compiled(stage: int) -> Sent:
    """What two real ranks send, with the passes of a group that overlaps."""
    wanted = config(stage)

    def overlapping(_: tuple[Pass, ...]) -> tuple[Pass, ...]:
        return recipe(wanted, "nccl")

    torch.manual_seed(0)
    case = gpt()
    options = {"persist_below": wanted.persist_below, "bucket_mb": wanted.bucket_mb, "passes": overlapping}
    zerofx.compile(case.model, stage=stage, backend="interpreter", **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = case.model(case.batch(0, 0)["ids"])
    found.sum().backward()
    return sent(zerofx.inspect(case.model).graphs[0].steps[-1].text)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_traced_step_sends_what_real_ranks_send(pool: Callable[[int], Pool], stage: int) -> None:
    ids = gpt().batch(0, 0)["ids"]
    program = trace(lambda: gpt().model, (ids,), config(stage), WORLD, autocast=torch.bfloat16)
    for real in pool(WORLD).run(compiled, stage):
        assert sent(show(program)) == real
