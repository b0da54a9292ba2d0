"""A model on the meta device is made module by module, with the values it would have had whole."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn as nn

from tests.distributed.ranks import Net, has, message, on_ranks, rows, same, sharded, square, whole
from zerofx.materialise import Materialiser


class Tied(nn.Module):
    """A head of its own bias on the embedding's weight, and a BatchNorm with buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mid = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 11)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mid(self.tokens(ids))))


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 5))


class Forgetful(Silent):
    def reset_parameters(self) -> None:
        pass


def on_meta(make: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def initialised(make: type[nn.Module]) -> nn.Module:
    """The whole model, its modules initialised in their order; a tied weight keeps the values of its first place."""
    model = make().to_empty(device="cpu")
    if make is Tied:
        model.head.weight = model.tokens.weight
    torch.manual_seed(7)
    for name, module in model.named_modules():
        kept = model.tokens.weight.detach().clone() if name == "head" else None
        if name and hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if kept is not None:
            model.tokens.weight.data.copy_(kept)
    return model


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_values_are_those_of_the_whole_model(stage: int) -> None:
    torch.manual_seed(7)
    model = sharded(on_meta(Tied), stage=stage)
    same(whole(model), initialised(Tied).state_dict())
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")
    model(torch.arange(4)).sum().backward()


@on_ranks(3)
def test_every_rank_starts_from_the_first_ranks_values() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    ours = whole(sharded(on_meta(Tied)))
    torch.manual_seed(0)
    theirs = whole(sharded(on_meta(Tied)))
    same(ours, theirs)


@on_ranks(2)
def test_only_one_module_is_whole_at_a_time() -> None:
    most, make = [0], Materialiser.__call__

    def watched(self: Materialiser, prefix: str, module: nn.Module) -> None:
        make(self, prefix, module)
        alive = [made() for _, made in self.made.values()]
        most[0] = max(most[0], sum(t.numel() for t in alive if isinstance(t, nn.Parameter)))

    deep = lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])  # noqa: E731
    with mock.patch.object(Materialiser, "__call__", watched):
        sharded(on_meta(deep))
    assert most[0] == 8 * 8 + 8


@on_ranks(2)
def test_init_fn_writes_modules_that_cannot_do_it() -> None:
    model = sharded(on_meta(Silent), init_fn=lambda module: nn.init.constant_(module.weight, 2.0))
    assert whole(model)["weight"].unique().tolist() == [2.0]


@on_ranks(2)
def test_what_nothing_writes_is_refused_by_name() -> None:
    has(message(lambda: sharded(on_meta(Silent)), ValueError), ["'weight' is on the meta device", "init_fn"])
    has(message(lambda: sharded(on_meta(Forgetful)), ValueError), ["'weight'", "nothing has written it", "Forgetful"])
    quiet = {"init_fn": lambda module: None}
    has(message(lambda: sharded(on_meta(Silent), **quiet), ValueError), ["nothing has written it: write it in init_fn"])


@on_ranks(2)
def test_real_tensors_beside_meta_ones_keep_their_values() -> None:
    model = nn.Linear(7, 13)
    with torch.device("meta"):
        model.weight = nn.Parameter(torch.empty(13, 7))
    with torch.no_grad():
        model.bias.fill_(3.0)
    assert whole(sharded(model))["bias"].unique().tolist() == [3.0]
    assert square(sharded(on_meta(Net), init_fn=fill), 0).isfinite()


def fill(module: nn.Module) -> None:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            tensor.copy_(rows(0, *tensor.shape))
