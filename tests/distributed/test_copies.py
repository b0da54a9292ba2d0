"""Copies and pickles of a compiled model are compiled models of their own."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import zerofx
from tests.distributed.ranks import Net, backward, message, on_ranks, rows, same, trained, whole


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, saved_and_loaded])
@on_ranks(2)
def test_a_copy_trains_alone_and_is_compiled(make_copy: Callable[[Any], Any]) -> None:
    model, plain = trained(Net)
    before = whole(model)
    other, plain_copy = make_copy(model), copy.deepcopy(plain)
    assert "call the model once" in message(lambda: zerofx.inspect(other), ValueError)
    for each in (other, plain_copy):
        each.zero_grad()
    backward(other, plain_copy)
    assert [graph.kind for graph in zerofx.inspect(other).graphs] == ["train"]
    for each in (other, plain_copy):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same(whole(other), whole(plain_copy))
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    assert isinstance(other, Net) and type(other.a) is type(model.a)


@on_ranks(2)
def test_a_shallow_copy_shares_parameters_and_may_end_first() -> None:
    model, plain = trained(Net)
    other = copy.copy(model)
    assert other.get_parameter("a.weight") is model.get_parameter("a.weight")
    assert torch.equal(other(rows(0)), model(rows(0)))
    del other
    gc.collect()
    backward(model, plain, lambda model, rank: model(rows(rank, 9, 7)).square().mean())


@on_ranks(2)
def test_a_copied_submodule_works_without_the_model() -> None:
    model, plain = trained(Net, backend="eager")
    part, plain_part = copy.deepcopy(model.a), copy.deepcopy(plain.a)
    del model
    for each in (part, plain_part):
        each.zero_grad()  # torch copies the gradient of a DTensor, and not that of a plain parameter
    backward(part, plain_part)
    assert torch.equal(pickled(part)(rows(0)), part(rows(0)))
