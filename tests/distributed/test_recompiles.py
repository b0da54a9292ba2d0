"""Graphs are captured as often as torch.compile needs them: not per layer, per step, per batch size or per model."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import zerofx
from tests.distributed.runs import Builder
from tests.models import Batch, Case, gpt, gpt2, mlp_odd, resnet
from tests.pool import Pool
from tests.training import State, compare, reference, sgd, train

SIZES = (2, 3, 5, 4, 7)
MODELS = 10


def graphs(model: nn.Module) -> int:
    return len(zerofx.inspect(model).graphs)


def compiled(builder: Builder) -> Case:
    case = builder()
    zerofx.compile(case.model, persist_below=0, backend="interpreter")
    return case


def counts_by_step(builder: Builder) -> list[int]:
    case = compiled(builder)
    optimizer, counts = sgd(case.model.parameters()), []
    for step in range(6):
        optimizer.zero_grad()
        case.loss(case.model, case.batch(dist.get_rank(), step)).backward()
        optimizer.step()
        counts.append(graphs(case.model))
    return counts


@pytest.mark.parametrize("builder", [mlp_odd, gpt, gpt2, resnet])
def test_steps_of_one_shape_share_a_graph(pool: Callable[[int], Pool], builder: Builder) -> None:
    if builder in (gpt2, resnet):
        pytest.importorskip("transformers")
    assert pool(2).run(counts_by_step, builder) == [[1] * 6] * 2


def resized(batch: Batch, rows: int) -> Batch:
    return {name: value[:1].repeat(rows, *[1] * (value.dim() - 1)) for name, value in batch.items()}


def counts_by_size(builder: Builder) -> list[int]:
    case = compiled(builder)
    counts = []
    for step, rows in enumerate(SIZES):
        case.loss(case.model, resized(case.batch(dist.get_rank(), step), rows)).backward()
        counts.append(graphs(case.model))
    return counts


@pytest.mark.parametrize("builder", [mlp_odd, gpt, pytest.param(gpt2, marks=pytest.mark.full)])
def test_a_changing_batch_size_costs_one_more_graph(pool: Callable[[int], Pool], builder: Builder) -> None:
    if builder is gpt2:
        pytest.importorskip("transformers")
    assert pool(2).run(counts_by_size, builder) == [[1, 2, 2, 2, 2]] * 2


def counts_by_mode() -> list[int]:
    case, counts = compiled(gpt), []
    for training, grad in [(True, True), (False, True), (False, False), (True, False)] * 3:
        case.model.train(training)
        with torch.set_grad_enabled(grad):
            case.loss(case.model, case.batch(dist.get_rank(), 0))
        counts.append(graphs(case.model))
    return counts


def test_modes_that_were_seen_alternate_without_recompiling(pool: Callable[[int], Pool]) -> None:
    for counts in pool(2).run(counts_by_mode):
        assert counts[3] <= 4
        assert counts[3:] == [counts[3]] * 9


class Broken(nn.Module):
    """A residual block that no graph can hold in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(hidden)


class Whole(Broken):
    """The same block in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Equal blocks, with graph breaks between them if so wished."""

    def __init__(self, kind: type[nn.Module], layers: int, breaks_between: bool) -> None:
        super().__init__()
        self.blocks, self.breaks_between = nn.ModuleList(kind() for _ in range(layers)), breaks_between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.breaks_between:
                torch._dynamo.graph_break()
        return x


def stack(kind: type[nn.Module], layers: int, breaks_between: bool) -> Case:
    torch.manual_seed(0)
    model = Stack(kind, layers, breaks_between)
    data = mlp_odd()
    return Case(model, data.batch, lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean())


def broken_stack(layers: int) -> Case:
    return stack(Broken, layers, breaks_between=False)


def parted_stack(layers: int) -> Case:
    return stack(Whole, layers, breaks_between=True)


def eager_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [text for each in caught if "outside of compiled" in (text := str(each.message))]


def train_broken(builder: Callable[[int], Case], layers: int) -> tuple[int, State, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = compiled(lambda: builder(layers))
        state = train(case, sgd, 2, dist.get_rank()).state
    return graphs(case.model), state, eager_warnings(caught)


@pytest.mark.parametrize("builder", [broken_stack, parted_stack])
def test_equal_blocks_under_graph_breaks_share_their_graphs(
    pool: Callable[[int], Pool], builder: Callable[[int], Case]
) -> None:
    few = pool(2).run(train_broken, builder, 3)
    many = pool(2).run(train_broken, builder, 12)
    expected = reference(lambda: builder(12), sgd, 2, world=2).state
    for (few_graphs, _, _), (many_graphs, state, eager) in zip(few, many, strict=True):
        assert many_graphs == few_graphs
        assert eager == []
        assert compare(state, expected, rtol=1e-5) == {}


def train_many(builder: Builder) -> tuple[list[int], list[str], list[float]]:
    cases = [compiled(builder) for _ in range(MODELS)]
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            for case in cases:
                loss = case.loss(case.model, case.batch(dist.get_rank(), step))
                loss.backward()
                losses.append(loss.item())
    return [graphs(case.model) for case in cases], eager_warnings(caught), losses


def sequential() -> Case:
    data = mlp_odd()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 1))
    return Case(model, data.batch, data.loss)


def broken() -> Case:
    return broken_stack(3)


@pytest.mark.parametrize("builder", [mlp_odd, sequential, broken])
def test_ten_models_in_one_process_all_stay_compiled(pool: Callable[[int], Pool], builder: Builder) -> None:
    for counts, eager, losses in pool(2).run(train_many, builder):
        assert counts == [counts[0]] * MODELS
        assert eager == []
        assert losses == [losses[0]] * MODELS + [losses[MODELS]] * MODELS
