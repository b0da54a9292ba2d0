"""Presets have the parameters that their papers say, and are models that can be trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zerofx.planning.presets import PRESETS, Transformer, preset
from zerofx.planning.shapes import Shape

PARAMETERS = {
    "gpt2": 124.4e6,
    "gpt2-xl": 1.558e9,
    "turing-nlg-17b": 17.4e9,
    "gpt-100b": 100e9,
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.6e9,
    "llama-3-405b": 406e9,
    "gpt-1t": 1008e9,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert preset(name).shape.parameters == pytest.approx(PARAMETERS[name], rel=0.012)
    assert preset(name).source


@pytest.mark.parametrize("name", PRESETS)
def test_a_built_model_has_the_parameters_of_its_shape(name: str) -> None:
    shape = replace(preset(name).shape, layers=2)
    with torch.device("meta"):
        model = Transformer(shape)
    assert sum(param.numel() for param in model.parameters()) == shape.parameters
    assert sum(p.numel() for p in model.blocks[0].parameters()) == shape.layer


def small(name: str) -> Shape:
    ratio = preset(name).shape.heads // (preset(name).shape.kv_heads or 1)
    widths = {"hidden": 32, "ffn": 64, "head_width": 8, "heads": 4, "kv_heads": max(1, 4 // ratio)}
    return replace(preset(name).shape, layers=2, vocabulary=11, sequence=16, **widths)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_a_model_sees_the_past_only_and_learns(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(small(name))
    ids = torch.randint(11, (4, 16))
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % 11
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax((0, 2)).min() > 0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    targets = torch.roll(ids, -1, 1)
    losses = []
    for _ in range(30):
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_positions_of_llama_are_relative() -> None:
    """The score of two tokens depends on their distance."""
    from zerofx.planning.presets import _rotated

    one = torch.randn(8).expand(12, 8)
    turned = _rotated(one)
    scores = turned @ turned.T
    for distance in range(4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(turned.norm(dim=1), one.norm(dim=1))


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no preset is called 'gpt3': take one of gpt2, "):
        preset("gpt3")
