"""Compiled graphs serve later processes and neighbouring ranks, but never a parameter of another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters

import zerofx
from tests.models import mlp_odd
from tests.pool import ENVIRONMENT, Pool
from tests.training import State, compare, full

Processes = dict[str, dict[str, list[Any]]]
pytestmark = pytest.mark.inductor


class Told(NamedTuple):
    """What one rank of one process saw of a compile: cache hits and the recorded steps."""

    graph_hits: int
    autograd_hits: int
    steps: list[tuple[str, str]]


def compile_and_count() -> Told:
    """Compiles a training graph and an inference graph."""
    counters.clear()
    case = mlp_odd()
    zerofx.compile(case.model, persist_below=0)
    case.loss(case.model, case.batch(dist.get_rank(), 0)).backward()
    with torch.no_grad():
        case.loss(case.model, case.batch(dist.get_rank(), 0))
    steps = [(step.name, step.text) for graph in zerofx.inspect(case.model).graphs for step in graph.steps]
    return Told(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"], steps)


class Layer(nn.Module):
    """A linear layer whose code is a graph of its own."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(7, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.tanh(x)


class Layers(nn.Module):
    """Layers side by side that share their code but not their size."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(each) for each in rows)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def outputs_and_gradients(model: Layers) -> tuple[list[torch.Tensor], State]:
    """For the same batch on every rank, so that one process can say what is right."""
    outputs = model(torch.linspace(-1, 1, 21).view(3, 7))
    sum((output * torch.arange(output.shape[1])).sum() for output in outputs).backward()
    return outputs, {name: full(param.grad) for name, param in model.named_parameters()}


def build(rows: tuple[int, ...]) -> Layers:
    torch.manual_seed(0)
    return Layers(*rows)


def compiled_outputs_and_gradients(*models: tuple[int, ...]) -> list[tuple[list[torch.Tensor], State]]:
    return [outputs_and_gradients(zerofx.compile(build(rows), persist_below=0)) for rows in models]


class Twin(Layer):
    """The same program in a class of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.tanh(x)


def recorded_parameters() -> list[set[str]]:
    """The parameters that each graph's record names, where two graphs differ in nothing else."""
    model = Layers(13)
    model.layers.append(Twin(13))
    zerofx.compile(model, persist_below=0)
    model(torch.ones(3, 7))
    inspected = zerofx.inspect(model)
    rows = inspected.collectives().rows
    return [{name for row in rows if row.graph == graph.index for name in row.params} for graph in inspected.graphs]


def run_all(folder: Path) -> dict[str, list[Any]]:
    """All programs of this file in new processes whose ranks share one cache folder."""
    with mock.patch.dict(ENVIRONMENT, TORCHINDUCTOR_CACHE_DIR=str(folder)):
        pool = Pool(2)
        try:
            return {
                "counted": pool.run(compile_and_count, timeout=500),
                "uneven": pool.run(compiled_outputs_and_gradients, (13,), timeout=500),
                "names": pool.run(recorded_parameters, timeout=500),
                "sizes": pool.run(compiled_outputs_and_gradients, (13, 14), (13,), (14,), timeout=500),
            }
        finally:
            pool.close()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    """The results of a process that found the cache empty, and of one that found what the first had left."""
    folder = tmp_path_factory.mktemp("inductor")
    return {"cold": run_all(folder), "warm": run_all(folder)}


def test_a_second_process_hits_both_caches(processes: Processes) -> None:
    for told in processes["warm"]["counted"]:
        assert (told.autograd_hits, told.graph_hits) == (2, 3)  # forward, backward and the graph without a backward


def test_a_second_process_shows_the_steps_that_the_first_recorded(processes: Processes) -> None:
    cold, warm = processes["cold"]["counted"], processes["warm"]["counted"]
    for first, second in zip(cold, warm, strict=True):
        assert [name for name, _ in first.steps].count("insert-all-gather") == 2
        assert second.steps == first.steps


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_a_record_names_the_parameters_of_its_own_graph(processes: Processes, cache: str) -> None:
    each = [{f"layers.{place}.linear.weight", f"layers.{place}.linear.bias"} for place in (0, 1)]
    assert [[names for names in rank if names] for rank in processes[cache]["names"]] == [each, each]


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize(("program", "models"), [("uneven", [(13,)]), ("sizes", [(13, 14), (13,), (14,)])])
def test_every_rank_and_size_has_its_own_graph(
    processes: Processes, cache: str, program: str, models: list[tuple[int, ...]]
) -> None:
    for rank in processes[cache][program]:
        for (outputs, grads), rows in zip(rank, models, strict=True):
            expected_outputs, expected_grads = outputs_and_gradients(build(rows))
            assert [output.shape for output in outputs] == [output.shape for output in expected_outputs]
            for output, expected in zip(outputs, expected_outputs, strict=True):
                torch.testing.assert_close(output, expected)
            assert compare(grads, expected_grads, rtol=1e-5) == {}
