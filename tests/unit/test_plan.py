"""A plan is right where it can be computed by hand, and from a few blocks what the whole model's graph says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import zerofx
from tests.bench.gpt import GPT, Size
from zerofx.config import Config, ConfigError, ModelError
from zerofx.need import need_of
from zerofx.planning.capture import Asked, Shapes
from zerofx.planning.hardware import load
from zerofx.planning.repeats import find_repeats
from zerofx.planning.report import Plan, size
from zerofx.planning.tape import BYTES, FLOPS, DepthError, Track, tape_of
from zerofx.timeline import timeline

SMALL = Size(layers=7, width=256, heads=4, context=64, vocabulary=1000, micro_batch=2)
WORLD = 16
H100 = load("h100-8x400g")


def batch(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(rows, SMALL.context, dtype=torch.long, device="meta")
    return ids, ids


def gpt(layers: int = SMALL.layers) -> Callable[[], nn.Module]:
    return lambda: GPT(replace(SMALL, layers=layers))


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes(gpt(), batch())


@pytest.fixture(scope="module", params=[0, 3])
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(Config(stage=request.param, precision="bf16", bucket_mb=1), WORLD, "nccl")


def test_what_blocks_add_gives_the_graph_of_the_whole_model(shapes: Shapes, asked: Asked) -> None:
    program = shapes.program(asked, SMALL.layers)
    told, whole = shapes.tape(asked), tape_of(program)
    for ours, theirs in ((told.forward, whole.forward), (told.backward, whole.backward)):
        assert len(ours.memory.keys) == len(theirs.memory.keys)
        np.testing.assert_allclose(
            ours.time.rows[:, [FLOPS, BYTES]].sum(0), theirs.time.rows[:, [FLOPS, BYTES]].sum(0), rtol=1e-9
        )
        assert ours.curve().sum(1).max() == pytest.approx(theirs.curve().sum(1).max(), rel=2e-3)
    need = need_of(program, 0)
    peak = max(half.curve().sum(1).max() for half in (whole.forward, whole.backward))
    assert peak == need.peak


def test_a_whole_tape_runs_as_the_timeline_of_its_program(shapes: Shapes) -> None:
    from zerofx.planning.replay import Streams

    program = shapes.program(Asked(Config(precision="bf16"), WORLD, "nccl"), 3)
    tape, streams, found = tape_of(program), Streams(H100, WORLD), timeline(program, H100)
    streams.run(tape.forward)
    streams.run(tape.backward)
    assert streams.compute == pytest.approx(found.compute)
    assert streams.communication == pytest.approx(found.communication)
    assert streams.now == pytest.approx(max(s.end for s in found.spans if s.stream == "compute"), rel=1e-6)


def test_a_track_without_a_row_that_a_smaller_one_has_is_refused() -> None:
    short = Track((("a",), ("b",)), np.zeros((2, 4)))
    with pytest.raises(DepthError, match="lacks"):
        short.deeper(Track((("a",),), np.zeros((1, 4))), 3)


def planned(**options: Any) -> Plan:
    return zerofx.plan(gpt(3), batch(options.pop("rows", 2)), persist_below=0, **{"world": WORLD, **options})


@pytest.mark.parametrize(("stage", "share"), [(0, 1), (3, 1 / WORLD)])
def test_what_is_stored_is_zeros_formula(stage: int, share: float) -> None:
    found = planned(stage=stage)
    memory = found.fullest.curve[-2].memory
    psi = 4 * found.elements  # bytes, of parameters in fp32
    assert memory.parameters == pytest.approx(share * psi, rel=0.02)
    assert memory.gradients == pytest.approx(share * psi, rel=0.02)
    assert memory.states == pytest.approx(2 * share * psi, rel=0.02)
    assert found.fullest.curve[-1].memory.gradients == 0


@pytest.mark.parametrize(("stage", "copies", "again"), [(0, 2, 0), (1, 2, 0), (2, 4, 0), (3, 6, 3)])
def test_three_micro_batches_send_what_the_stages_send(stage: int, copies: int, again: int) -> None:
    found = planned(stage=stage, microbatches=3, rows=6, precision="fp32")
    sent = sum(each.nbytes for each in found.fullest.traffic)
    params = dict(gpt(3)().named_parameters())
    psi = sum(param.nbytes for param in params.values())
    in_backward = sum(p.nbytes for n, p in params.items() if p.dim() > 1 and not n.startswith(("tokens", "positions")))
    expected = (copies * psi + again * in_backward) * (WORLD - 1) / WORLD  # no gradient depends on what is looked up
    assert sent == pytest.approx(expected, rel=0.01)


class Stack(nn.Module):
    """Layers in a row, of which each may be the same one; a strict one cannot do with fewer."""

    def __init__(self, count: int, shared: bool = False, strict: bool = False) -> None:
        super().__init__()
        one = nn.Linear(64, 64)
        self.layers = nn.ModuleList(one if shared else nn.Linear(64, 64) for _ in range(count))
        self.count = count if strict else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.count in (None, len(self.layers))
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


@pytest.mark.parametrize("kind", ["shared", "strict"])
def test_a_model_whose_blocks_are_one_or_all_needed_is_planned_as_its_whole_graph(kind: str) -> None:
    found = zerofx.plan(lambda: Stack(9, **{kind: True}), (torch.zeros(8, 64),), world=2, precision="fp32")
    assert found.flops == 9 * 3 * 2 * (2 * 8 * 64 * 64)  # forward and twice that, on two ranks
    assert found.elements == (1 if kind == "shared" else 9) * (64 * 64 + 64)


def test_the_work_of_planning_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    once = Shapes.program

    def counted(shapes: Shapes, asked: Asked, blocks: int) -> Any:
        program = once(shapes, asked, blocks)
        made.append(sum(len(graph.nodes) for graph in program.graphs.values()))
        return program

    monkeypatch.setattr(Shapes, "program", counted)
    nodes = []
    for count in (9, 300):
        made.clear()
        zerofx.plan(lambda count=count: Stack(count), (torch.zeros(8, 64),), world=2, precision="fp32")
        nodes.append(tuple(made))
    assert len(nodes[0]) == 2 and nodes[0] == nodes[1]


def test_what_does_not_fit_is_said_with_the_bytes() -> None:
    tight = replace(H100, memory_bytes=1000)
    found = planned(hardware=tight)
    assert not found.fits
    assert found.verdict.startswith(f"It does not fit: a rank needs {size(found.peak)} of 1000 B, ")
    assert planned().verdict.startswith("It fits: ")


def test_a_pipeline_has_the_bubble_of_its_schedule() -> None:
    pipeline = zerofx.Pipeline(3, "1f1b", 12)
    found = zerofx.plan(gpt(6), batch(12), world=12, stage=1, pipeline=pipeline)
    counts = [stage.blocks for stage in found.stages]
    assert sum(counts) == 6
    assert counts[-1] == min(counts)  # it has the head as well
    assert 2 / 14 <= found.bubble < 0.7
    assert dict(found.ranks) == {"dp": 4, "tp": 1, "pp": 3}
    first, second, last = (max(each.memory.activations for each in stage.curve) for stage in found.stages)
    assert first > second > last > 0  # of three, two and one micro-batch in flight


def test_slices_of_layers_take_their_share() -> None:
    whole, half = planned(stage=1), planned(stage=1, tensor=2, world=2 * WORLD)
    assert half.fullest.peak.activations == pytest.approx(whole.fullest.peak.activations / 2, rel=0.05)
    assert {each.axis for each in half.fullest.traffic} == {"dp", "tp"}


def test_equal_blocks_are_found_and_others_are_not() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]
    found = find_repeats(nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2)))
    assert found is not None and (found.start, found.period, found.count) == (1, 1, 4)
    assert find_repeats(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))) is None
    turns = [nn.Linear(4, 4) if turn % 2 else nn.LayerNorm(4) for turn in range(8)]
    found = find_repeats(nn.Sequential(*turns))
    assert found is not None and (found.period, found.count) == (2, 4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"world": 0}, "world must be an int, 1 or more"),
        ({"world": 6, "tensor": 4}, "world must be a multiple of 4"),
        ({"microbatches": 3}, "microbatches must be a divisor of the batch's 2 rows"),
        ({"stage": 4}, "stage must be one of 0, 1, 2, 3"),
        ({"precision": "fp8"}, "precision must be one of"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        zerofx.plan(gpt(1), batch(), **{"world": WORLD, **options})


def test_a_step_without_a_loss_is_refused() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum()

    with pytest.raises(ModelError, match="has no backward"):
        zerofx.plan(Frozen, (torch.zeros(2, 4),), world=2)


def own() -> tuple[Callable[[], nn.Module], Any]:
    """For the command line."""
    return gpt(2), batch()


def test_the_command_plans_a_function_and_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "zerofx", "plan", "--preset", "tests.unit.test_plan:own", "--world", "8"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "It fits: a rank holds" in done.stdout
    told = json.loads(out.read_text())
    assert told["elements"] == sum(p.numel() for p in GPT(replace(SMALL, layers=2)).parameters())
    assert {moment["part"] for moment in told["stages"][0]["curve"]} >= {"forward 0", "backward 0", "update"}
