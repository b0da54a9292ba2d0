"""Inside full_params parameters are whole, and what is written to them is kept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.distributed.ranks import Net, backward, both, has, message, on_ranks, rows, same, sharded, whole


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_writes_of_all_ranks_alike_are_kept(stage: int) -> None:
    model, plain = both(Net, stage=stage)
    with torch.no_grad(), zerofx.full_params(model):
        for net in (model, plain):
            net.a.weight.mul_(2)
            net.norm.bias.data.fill_(0.5)
            nn.init.zeros_(net.b.bias)
    assert isinstance(model.get_parameter("a.weight"), DTensor)
    same(whole(model), plain.state_dict())
    backward(model, plain)


@on_ranks(2)
def test_writes_of_one_rank_reach_the_others() -> None:
    model = sharded(Net())
    with zerofx.full_params(model, from_rank=1):
        model.a.weight.fill_(dist.get_rank() + 5.0)
    assert whole(model)["a.weight"].unique().tolist() == [6.0]


@on_ranks(2)
def test_a_tied_weight_is_whole_in_both_places_and_stored_once() -> None:
    def tied() -> nn.Module:
        net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
        net[1].weight = net[0].weight
        return net

    model = sharded(tied())
    with zerofx.full_params(model):
        assert model[0].weight is model[1].weight
        model[1].weight.fill_(3.0)
    assert model.get_parameter("0.weight") is model.get_parameter("1.weight")
    assert whole(model)["0.weight"].unique().tolist() == [3.0]


@on_ranks(2)
def test_forwards_inside_gather_nothing() -> None:
    model, plain = both(Net)
    with torch.no_grad(), zerofx.full_params(model):
        same({"out": model(rows(0))}, {"out": plain(rows(0))})
    assert [graph.kind for graph in zerofx.inspect(model).graphs] == ["inference"]
    assert zerofx.inspect(model).collectives().rows == ()
    backward(model, plain)


@on_ranks(2)
def test_an_error_inside_restores_the_parameters_and_keeps_the_writes() -> None:
    model = sharded(Net())

    def fail() -> None:
        with zerofx.full_params(model):
            model.b.bias.fill_(4.0)
            raise KeyError("inside")

    assert "inside" in message(fail, KeyError)
    assert whole(model)["b.bias"].unique().tolist() == [4.0]


@on_ranks(2)
def test_entering_twice_or_a_plain_model_is_refused() -> None:
    model = sharded(Net())

    def twice() -> None:
        with zerofx.full_params(model), zerofx.full_params(model):
            pass

    has(message(twice, RuntimeError), ["already", "leave it first"])
    assert isinstance(model.get_parameter("a.weight"), DTensor)
    has(message(zerofx.full_params(Net()).__enter__, TypeError), ["zerofx.compile"])
