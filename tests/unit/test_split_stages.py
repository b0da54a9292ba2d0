"""A forward is cut into stages that balance, and the stages compute what the model does."""

from __future__ import annotations

import functools
import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from tests.models import GPT, gpt2
from tests.stage_models import WIDTH, InPlace, Tied, UNet, line_of, run_stages, simulated, text_of
from zerofx.passes.split_stages import SplitStages, choose_cuts
from zerofx.pipeline import Pipeline, PipelineError
from zerofx.planning.hardware import H100
from zerofx.schedule_check import check_schedule
from zerofx.schedules import order_of
from zerofx.stage_check import StageError, check_stages
from zerofx.stage_graphs import Stage, stages_of
from zerofx.stage_line import Line
from zerofx.stage_report import PipelineReport, report_of

GOLDEN = Path(__file__).parents[1] / "golden_stages"
IDS = torch.arange(32).reshape(2, 16)
ROWS = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


def _gpt2() -> nn.Module:
    return gpt2().model


MODELS: dict[str, Any] = {
    "unet": (UNet, (ROWS,), {}, 3),
    "tied": (Tied, (IDS,), {}, 2),
    "in_place": (InPlace, (ROWS,), {}, 3),
    "gpt2": (_gpt2, (), {"input_ids": IDS, "labels": IDS, "use_cache": False}, 4),
}


@functools.cache
def cut(name: str) -> tuple[nn.Module, Line, list[int]]:
    make, args, kwargs, stages = MODELS[name]
    torch.manual_seed(0)
    model = make()
    line = line_of(model, *args, **kwargs)
    return model, line, SplitStages(stages, 4)(line)


def report(model: nn.Module, pipeline: Pipeline, *args: Any) -> PipelineReport:
    simulated = check_schedule(pipeline, order_of(pipeline))
    line = line_of(model, *args)
    return report_of(line, choose_cuts(line, pipeline, simulated.in_flight), pipeline, simulated)


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_turn_compute_the_bits_of_the_model_and_its_gradients(name: str) -> None:
    _, args, kwargs, stages = MODELS[name]
    model, line, cuts = cut(name)
    made = stages_of(line, cuts)
    results = list[dict[str, torch.Tensor]]()
    for run in (lambda: model(*args, **kwargs), lambda: run_stages(model, line.whole, made, *args, **kwargs)):
        model.zero_grad()
        out = run()
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.square().mean().backward()
        results.append({"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()})
    assert len(made) == stages
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", ["unet", "in_place", "gpt2", "tied"])
def test_stages_in_turn_are_the_whole_graph_bit_for_bit_over_several_micro_batches(name: str) -> None:
    """A tied weight's gradients are added up stage by stage, and so in another order."""
    _, args, kwargs, _ = MODELS[name]
    model, line, cuts = cut(name)
    numbers = torch.Generator().manual_seed(1)
    parts = [tree_map_only(torch.Tensor, lambda t: t[torch.randperm(len(t), generator=numbers)], (args, kwargs))] * 3
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    results = list[list[torch.Tensor]]()
    for stages in (None, stages_of(line, cuts)):
        for n, buffer in model.named_buffers():
            buffer.data.copy_(buffers[n])
        results.append(simulated(model, line.whole, stages, parts))
    ties = sum("tokens.weight" in stage.names("param") for stage in stages_of(line, cuts)) > 1 or name == "gpt2"
    assert len(results[0]) == len(results[1]) > len(parts)
    for whole, staged in zip(*results, strict=True):
        torch.testing.assert_close(staged, whole, rtol=1e-5 if ties else 0, atol=1e-6 if ties else 0)
    assert all(torch.equal(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True))


def left_out(stages: list[Stage]) -> None:
    """The last stage returns what its last computation reads."""
    graph = stages[-1].module.graph
    (end,) = graph.find_nodes(op="output")
    (last,) = end.args[0]
    end.args = ((last.all_input_nodes[0],),)
    graph.erase_node(last)


def passed_over(stages: list[Stage]) -> None:
    """A computation is left out of its stage, and the next one reads what it read."""
    graph = stages[1].module.graph
    node = next(n for n in graph.nodes if n.op == "call_function" and n.users and n.all_input_nodes)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)


def repeated(stages: list[Stage]) -> None:
    stages[1:1] = [stages[1]]


def swapped(stages: list[Stage]) -> None:
    stages[:] = [stages[1], stages[0], *stages[2:]]


def forgotten(stages: list[Stage]) -> None:
    """What the next stage receives is not sent."""
    (end,) = stages[0].module.graph.find_nodes(op="output")
    end.args = (end.args[0][1:],)


def reordered(stages: list[Stage]) -> None:
    (end,) = stages[0].module.graph.find_nodes(op="output")
    end.args = (end.args[0][::-1],)


def other_source(stages: list[Stage]) -> None:
    """A computation reads another value than in the model."""
    graph = stages[-1].module.graph
    tanh = graph.find_nodes(op="call_function", target=torch.tanh)
    first = next(n for n in graph.nodes if n.op == "placeholder" and n.name != tanh[-1].all_input_nodes[0].name)
    tanh[-1].args = (first,)


def undeclared(stages: list[Stage]) -> None:
    stages[0] = replace(stages[0], inputs=stages[0].inputs[1:])


BROKEN: dict[Any, str] = {
    left_out: "computed in no stage",
    passed_over: "and in the model",
    repeated: "and again in stage 2",
    swapped: "which stage 1 computes",
    forgotten: "stage 0 returns",
    reordered: "stage 0 returns",
    other_source: "and in the model",
    undeclared: "stage 0 is given",
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda each: each.__name__)
def test_stages_that_are_not_the_model_are_found(breaks: Any) -> None:
    line = line_of(UNet(), ROWS)
    stages = stages_of(line, SplitStages(3, 4)(line))
    check_stages(line, stages)
    breaks(stages)
    with pytest.raises(StageError, match=BROKEN[breaks]):
        check_stages(line, stages)


def test_a_stage_that_writes_to_what_it_receives_is_found() -> None:
    _, line, _ = cut("in_place")
    writes = next(p for p, n in enumerate(line.nodes) if getattr(n.target, "__name__", "") == "iadd")
    with pytest.raises(StageError, match="writes to what the stage receives"):
        check_stages(line, stages_of(line, [writes - 1]))


@pytest.mark.parametrize("name", ["unet", "tied", "in_place"])
def test_each_stage_is_what_its_golden_file_says(name: str, request: pytest.FixtureRequest) -> None:
    _, line, cuts = cut(name)
    text, path = text_of(stages_of(line, cuts)), GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-goldens"):
        path.write_text(text)
    assert text == path.read_text()


def test_what_a_far_stage_reads_is_handed_on_and_batches_go_straight_to_their_reader() -> None:
    _, line, cuts = cut("unet")
    first, middle, last = stages_of(line, cuts)
    assert {each.name for each in middle.receives} & {each.name for each in middle.sends}
    assert first.names("param") and not last.names("batch") and not middle.names("batch")
    _, line, cuts = cut("gpt2")
    kinds = [[each.kind for each in stage.inputs if each.kind == "batch"] for stage in stages_of(line, cuts)]
    assert kinds == [["batch"], [], [], ["batch"]]  # token ids, and labels


def test_tied_weights_are_read_by_both_stages() -> None:
    _, line, cuts = cut("tied")
    assert all("tokens.weight" in stage.names("param") for stage in stages_of(line, cuts))


def test_no_cut_is_between_a_result_and_what_writes_to_it_and_tables_are_computed_in_each_stage() -> None:
    _, line, cuts = cut("in_place")
    stages = stages_of(line, cuts)
    for stage in stages:
        received = {node.name for node in stage.module.graph.find_nodes(op="placeholder")}
        written = [n for n in stage.module.graph.nodes if getattr(n.target, "__name__", "") in ("iadd", "setitem")]
        assert not any(node.args[0].name in received for node in written)
    tables = [sum("setitem" in str(getattr(n.target, "__name__", "")) for n in s.module.graph.nodes) for s in stages]
    assert sum(tables) >= 2


@pytest.mark.parametrize(("layers", "width", "stages", "parts"), [(8, 512, 4, 16), (24, 256, 8, 32)])
def test_a_gpt_is_cut_evenly(layers: int, width: int, stages: int, parts: int) -> None:
    with torch.device("meta"):
        model = GPT(layers, width, 8)
    found = report(model, Pipeline(stages, "1f1b", parts), IDS)
    assert found.imbalance <= 1.05 or "which cannot be cut" in found.limit


def test_a_report_names_the_layer_that_cannot_be_cut() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 8))
    found = report(model, Pipeline(3, "1f1b", 8), torch.zeros(512, 8))
    assert "limited by 2 (" in found.limit and "cannot be cut" in str(found)
    assert [stage.params for stage in found.stages] == [4 * 72, 4 * 9 * 4096, 4 * (4096 * 4097 + 8 * 4097)]


def fake_line(count: int, seed: int) -> Any:
    """A line of random costs, as far as SplitStages looks at one."""
    numbers = random.Random(seed)
    seconds = list(itertools.accumulate((numbers.random() for _ in range(count + 1)), initial=0.0))
    crossing = [numbers.choice([1, 2, 3, 8]) for _ in range(count + 1)]
    line = SimpleNamespace(
        first=0, last=count, seconds=seconds, crossing_bytes=crossing, legal=[True] * count + [False]
    )
    line.compute = lambda start, end: seconds[end + 1] - seconds[start + 1]
    line.send = lambda place: 0.02 * crossing[place] if 0 <= place < count else 0.0
    return line


@pytest.mark.parametrize("seed", range(6))
def test_the_cuts_are_the_best_of_all(seed: int) -> None:
    count, stages, parts = 11, 3, 5
    line = fake_line(count, seed)

    def seconds(cuts: tuple[int, ...]) -> float:
        ends = [-1, *cuts, count]
        takes = [line.compute(a, b) + line.send(a) + line.send(b) for a, b in itertools.pairwise(ends)]
        return (parts - 1) * max(takes) + sum(takes)

    best = min(itertools.combinations(range(count - 1), stages - 1), key=seconds)
    assert seconds(tuple(SplitStages(stages, parts)(line))) == pytest.approx(seconds(best))


def test_1200_nodes_are_cut_within_75_milliseconds() -> None:
    line = fake_line(1200, 0)
    took = []
    for _ in range(3):
        start = time.process_time()
        SplitStages(8, 32)(line)
        took.append(time.process_time() - start)
    assert min(took) < 0.075


def test_a_stage_is_kept_within_the_memory_cap() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    line = line_of(model, torch.zeros(2, 64))
    bytes_of_two = 2 * 4 * 4 * 64 * 65
    (place,) = SplitStages(2, 4, cap=2 * bytes_of_two, in_flight=(2, 1))(line)
    assert len(line.inputs_of(line.first - 1, place)) == 1 + 6
    with pytest.raises(PipelineError, match="stages of at most"):
        SplitStages(2, 4, cap=bytes_of_two, in_flight=(2, 1))(line)


def test_modules_that_are_named_begin_stages() -> None:
    _, line, _ = cut("tied")
    first, second = stages_of(line, choose_cuts(line, Pipeline(2, split_at=["blocks.1"]), (2, 1)))
    assert all(not name.startswith("blocks.1.") for name in first.names("param"))
    assert second.names("param")[0] != "blocks.0.norm1.weight" and "blocks.1.norm1.weight" in second.names("param")


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x


class Masked(nn.Module):
    """Reads a tensor that it keeps as a plain attribute, and takes its input in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(4, 4), torch.tensor([0.0, 1.0, 0.0, 1.0])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch["x"] if isinstance(batch, dict) else batch.x) * self.mask


def test_a_plain_attribute_is_read_as_it_was_and_a_tensor_hidden_from_the_batch_is_refused() -> None:
    model, x = Masked(), torch.ones(2, 4)
    line = line_of(model, {"x": x})
    made = run_stages(model, line.whole, stages_of(line, SplitStages(2, 1)(line)), {"x": 2 * x})
    assert torch.equal(made, model({"x": 2 * x}))
    with pytest.raises(PipelineError, match="hand it over as one of these"):
        line_of(model, SimpleNamespace(x=x))


@pytest.mark.parametrize(
    ("model", "pipeline", "told"),
    [
        (nn.Linear(4, 4), Pipeline(3), "at most 1 stages"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Pipeline(2, split_at=["2"]), "names no module"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Pipeline(2, split_at=["0"]), "nothing can be cut before"),
        (Breaks(), Pipeline(2), "torch.compile makes no single graph"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, pipeline: Pipeline, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        choose_cuts(line_of(model, torch.zeros(2, 4)), pipeline, (1,) * pipeline.stages)


def test_the_machine_of_the_cost_model_is_named() -> None:
    assert H100.name in str(report(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Pipeline(2), torch.zeros(2, 4)))
