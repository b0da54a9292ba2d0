"""Models that torch.compile cannot put into one graph have the gradients of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.distributed.ranks import Net, backward, both, has, message, on_ranks, rows, same, sharded, square, trained
from tests.training import full


class Broken(Net):
    """Leaves the graph twice, the second time for a branch on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        torch._dynamo.graph_break()
        y = self.norm(y)
        if y.sum() > 1e9:
            y = y * 2
        return self.b(F.gelu(y))


class PartlyDisabled(Net):
    @torch.compiler.disable
    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.first(x)))


class Repeated(Net):
    """Applies its modules three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = super().forward(x)
        return x


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if self.reentrant else x
        return self.b(checkpoint(lambda y: F.gelu(self.norm(self.a(y))), x, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


class Noisy(Net):
    """Drops out in a checkpointed region: the backward must draw the same numbers again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(lambda y: F.dropout(self.norm(self.a(y)), 0.5), x, use_reentrant=False))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(7, 5, 2, batch_first=True), nn.GRU(5, 3, batch_first=True)
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(self.gru(self.lstm(x)[0])[0][:, -1])[0]


def sequences(model: nn.Module, rank: int) -> torch.Tensor:
    return model(rows(rank, 2, 4, 7)).square().mean()


def slowly(caught: list[Any]) -> list[str]:
    return [str(each.message) for each in caught if "outside of compiled graphs" in str(each.message)]


@pytest.mark.parametrize("make", [Broken, Repeated, Checkpointed])
@on_ranks(2)
def test_gradients_are_those_of_one_process(make: type[Net]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        trained(make)
    assert slowly(caught) == []


@pytest.mark.parametrize("backend", ["interpreter", "eager"])
@on_ranks(2)
def test_a_checkpointed_region_draws_its_random_numbers_again(backend: str) -> None:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        return square(model, rank)

    model, plain = trained(Noisy, loss, backend=backend)
    backward(model, plain, loss)


@pytest.mark.parametrize("make", [Net, Broken, PartlyDisabled, Repeated, Checkpointed, Reentrant])
@on_ranks(2)
def test_the_eager_backend_has_the_gradients_of_one_process(make: type[Net]) -> None:
    model, plain = trained(make, backend="eager")
    backward(model, plain)


@on_ranks(2)
def test_disabled_pieces_train_and_warn_once_with_modules_and_reason() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, plain = trained(PartlyDisabled)
        backward(model, plain)
    (text,) = slowly(caught)
    has(text, ["Linear.weight, Linear.bias, LayerNorm.weight, LayerNorm.bias", "torch.compiler.disable", "fullgraph"])


@on_ranks(2)
def test_fullgraph_makes_a_break_an_error() -> None:
    for make in (Broken, PartlyDisabled):
        model = sharded(make(), fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model(rows(0))


@on_ranks(2)
def test_recurrent_modules_train_load_and_convert() -> None:
    model, plain = trained(Recurrent, sequences)
    model.load_state_dict(plain.state_dict())
    backward(model, plain, sequences)
    for each in (model, plain):
        each.double()
    assert torch.allclose(model(rows(0, 2, 4, 7).double()), plain(rows(0, 2, 4, 7).double()))


@on_ranks(2)
def test_batches_of_changing_and_unequal_size_need_few_graphs() -> None:
    model, plain = both(Net)
    for step in range(3):
        backward(model, plain, lambda model, rank, step=step: square_of(model, rows(rank, 3 + 2 * step + rank, 7)))
    assert len(zerofx.inspect(model).graphs) <= 2
    assert zerofx.inspect(model).collectives().bytes_sent > 0


def square_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@on_ranks(2)
def test_dynamic_shapes_from_the_start_need_one_graph() -> None:
    model, plain = both(Net, dynamic=True)
    for count in (4, 9):
        backward(model, plain, lambda model, rank, count=count: square_of(model, rows(rank, count, 7)))
    assert len(zerofx.inspect(model).graphs) == 1


@on_ranks(2)
def test_evaluation_between_steps_sees_the_trained_values() -> None:
    model, plain = trained(Net)
    for context in (torch.inference_mode, torch.no_grad):
        for each in (model, plain):
            each.eval()
        with context():
            assert torch.allclose(model(rows(5)), plain(rows(5)), atol=1e-6)
        for each in (model.train(), plain.train()):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        backward(model, plain)


@on_ranks(2)
def test_gradients_with_respect_to_inputs_are_local() -> None:
    model, plain = both(Net)
    found = []
    for each in (model, plain):
        x = rows(dist.get_rank()).requires_grad_()
        square_of(each, x).backward()
        found.append({"x": x.grad})
    same(*found)


@on_ranks(2)
def test_autograd_grad_returns_stored_parts_of_the_mean() -> None:
    model, plain = both(Net)
    ours = torch.autograd.grad(square(model, dist.get_rank()), list(model.parameters()))
    mean = [torch.autograd.grad(square(plain, rank), list(plain.parameters())) for rank in range(2)]
    names = [name for name, _ in plain.named_parameters()]
    expected = {name: (a + b) / 2 for name, a, b in zip(names, *mean, strict=True)}
    same({name: full(grad) for name, grad in zip(names, ours, strict=True)}, expected)


@on_ranks(2)
def test_a_gradient_penalty_trains_on_the_eager_backend_and_is_refused_by_graphs() -> None:
    def penalty(model: nn.Module, rank: int) -> torch.Tensor:
        x = rows(rank).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum()

    trained(Net, penalty, backend="eager")
    model = sharded(Net())
    has(message(lambda: penalty(model, 0).backward(), RuntimeError), ["does not currently support double backward"])
