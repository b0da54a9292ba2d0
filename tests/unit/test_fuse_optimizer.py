"""What a backward hands over has the bits of the gradients that it would return, and nothing is read behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.goldens import GOLDEN
from zerofx.config import STAGES, Config
from zerofx.layout import Layout
from zerofx.manager import run
from zerofx.passes.fuse_optimizer import FuseOptimizer
from zerofx.program import Program, output_tags, placeholders, tag
from zerofx.recipe import recipe
from zerofx.simulate import feed, simulate
from zerofx.testing import Golden
from zerofx.testing.meaning import assert_same_bits, random_inputs
from zerofx.updating import RECEIVING

WORLDS = (2, 3, 4)
SEVERAL = GOLDEN / "choose_layout" / "several_parameters.txt"
Handed = dict[str, list[Tensor]]


def simulated(program: Program) -> tuple[list[list[Tensor | None]], Handed]:
    """The outputs of each rank, and what they hand over; what is handed over spoils what is stored."""
    inputs = feed(program, *random_inputs(program))
    stored = {
        known.params[0]: values
        for node, values in zip(placeholders(next(iter(program.graphs.values()))), inputs, strict=False)
        if (known := tag(node)) is not None and known.role in ("shard", "replica")
    }
    handed, ranks = Handed(), Counter[str]()

    def receive(names: Sequence[str], grads: Sequence[Tensor]) -> None:
        for name, grad in zip(names, grads, strict=True):
            handed.setdefault(name, []).append(grad.clone())
            if name in stored:
                stored[name][ranks[name]].fill_(torch.nan)
            ranks[name] += 1

    with RECEIVING.by(receive):
        return simulate(program, inputs), handed


def check(before: Program, after: Program) -> None:
    """Outputs and gradients are those from before, which are output there."""
    expected, nothing = simulated(before)
    found, handed = simulated(after)
    assert not nothing and handed
    places = gradients(before)
    for rank, outputs in enumerate(found):
        for name, grads in handed.items():
            assert outputs[places[name]] is None
            outputs[places[name]] = grads[rank]
    assert_same_bits(found, expected)


def gradients(program: Program) -> dict[str, int]:
    """The places of gradients among the outputs that `simulate` gives."""
    tags = [known for graph in program.graphs.values() for known in output_tags(graph)]
    tags = [known for known in tags if known is None or known.role != "saved"]
    return {known.params[0]: place for place, known in enumerate(tags) if known is not None and known.role == "grad"}


@pytest.mark.parametrize("path", sorted((GOLDEN / "fuse_optimizer").glob("*.txt")), ids=lambda path: path.stem)
def test_the_golden_program_hands_over_what_the_one_above_it_returns(path: Path) -> None:
    golden = Golden.read(path)
    program = golden.program()
    run(program, [golden.step])
    check(golden.program(), program)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_hands_over_the_gradients_that_it_returns_without(stage: int, world: int) -> None:
    def made(params: tuple[str, ...]) -> Program:
        program = Golden.read(SEVERAL).at(world).program()
        for step in recipe(Config(stage=stage, persist_below=6, bucket_mb=2**-14)):
            program.level = step.level
            run(program, [FuseOptimizer(params) if isinstance(step, FuseOptimizer) else step])
        return program

    before = made(())
    layout: Layout = before.layout
    check(before, made(tuple(param.name for param in layout if param.requires_grad)))
