"""The example's int8 gathers on two real ranks train as one process does whose weights are rounded alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from examples.custom_pass import LEVELS, error_bound, model_of_seed, quantized
from tests.distributed.ranks import gradients, on_ranks, rows, same, sharded, whole


def rounded(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / LEVELS
    return (weight / scale).round() * scale


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    x = rows(rank, 8, 64)
    return F.mse_loss(model(x), x)


@pytest.mark.parametrize("backend", ["interpreter", pytest.param("inductor", marks=pytest.mark.inductor)])
@on_ranks(2)
def test_gradients_are_those_of_rounded_weights(backend: str) -> None:
    model, plain = sharded(model_of_seed(), passes=quantized, backend=backend), model_of_seed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mine = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        exact = {name: param.detach().clone() for name, param in plain.named_parameters()}
        with torch.no_grad():
            for param in plain.parameters():
                if param.dim() > 1:
                    param.copy_(rounded(param))
        for rank in range(2):
            (loss(plain, rank) / 2).backward()
        loss(model, torch.distributed.get_rank()).backward()
        same(gradients(model), gradients(plain))
        with torch.no_grad():
            for name, param in plain.named_parameters():
                assert bool(((param - exact[name]).abs() <= error_bound(exact[name].reshape(len(param), -1))).all())
                param.copy_(exact[name])
        for each in (optimizer, mine):
            each.step()
            each.zero_grad()
    same(whole(model), dict(plain.state_dict()))


@on_ranks(2)
def test_the_pass_is_seen_and_a_quarter_of_the_bytes_is_gathered() -> None:
    model = sharded(model_of_seed(), passes=quantized)
    loss(model, 0).backward()
    seen = zerofx.inspect(model)
    names = [step.name for step in seen.graphs[0].steps]
    assert names.index("quantize-all-gathers") == names.index("insert-all-gather") + 1
    assert "aten.round.default" in seen.diff("insert-all-gather", "quantize-all-gathers")
    gathered = [row for row in seen.collectives().rows if row.role == "unshard" and row.dtype == "i8"]
    forward, backward = 128 * 68 + 32 * 260, 32 * 260  # no gradient of the input is asked for
    expected = [(("0.weight", "2.weight"), forward), (("2.weight",), backward)]
    assert [(row.params, row.bytes_sent) for row in gathered] == expected
    assert "below the bound" in str(seen.collectives())
