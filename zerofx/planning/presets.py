"""Models by name: their shapes, and functions that build them as plain modules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerofx.planning.shapes import Shape

GPT_VOCABULARY = 50_304
"""GPT-2's 50,257 tokens, padded to a multiple of 128."""
LLAMA_VOCABULARY = 128_256


def _gpt(layers: int, hidden: int, heads: int, sequence: int = 1024, tied: bool = True) -> Shape:
    return Shape(layers, hidden, heads, GPT_VOCABULARY, sequence, tied=tied)


_LLAMA = Shape(
    layers=32,
    hidden=4096,
    heads=32,
    vocabulary=LLAMA_VOCABULARY,
    sequence=8192,
    ffn=14_336,
    kv_heads=8,
    gated=True,
    biases=False,
    positions=False,
    tied=False,
    dropout=False,
)


@dataclass(frozen=True)
class Preset:
    """A model: its shape and where that comes from."""

    name: str
    shape: Shape
    source: str

    def build(self) -> nn.Module:
        """The model; `model(ids)` gives logits, `model(ids, targets)` the mean loss."""
        return Transformer(self.shape)


_RADFORD = "Radford et al., 'Language models are unsupervised multitask learners', 2019"
_DUBEY = "Llama team, 'The Llama 3 herd of models', 2024, table 3"
PRESETS = {
    each.name: each
    for each in (
        Preset("gpt2", _gpt(12, 768, 12), _RADFORD),
        Preset("gpt2-medium", _gpt(24, 1024, 16), _RADFORD),
        Preset("gpt2-large", _gpt(36, 1280, 20), _RADFORD),
        Preset("gpt2-xl", _gpt(48, 1600, 25), _RADFORD),
        Preset(
            "turing-nlg-17b",
            _gpt(78, 4256, 28, tied=False),
            "Microsoft, 'Turing-NLG: a 17-billion-parameter language model', 2020; vocabulary and untied head assumed",
        ),
        Preset(
            "gpt-100b",
            _gpt(125, 8192, 64),
            "ZeRO, section 3: 125 layers of width 8,192 are 'a 100 billion parameter GPT-like model'",
        ),
        Preset(
            "gpt-1t",
            _gpt(128, 25_600, 160, sequence=2048),
            "Narayanan et al., 'Efficient large-scale language model training on GPU clusters', 2021, table 1",
        ),
        Preset("llama-3-8b", _LLAMA, _DUBEY),
        Preset("llama-3-70b", replace(_LLAMA, layers=80, hidden=8192, heads=64, ffn=28_672), _DUBEY),
        Preset("llama-3-405b", replace(_LLAMA, layers=126, hidden=16_384, heads=128, ffn=53_248), _DUBEY),
    )
}


def preset(name: str) -> Preset:
    """The model of that name; raises ValueError for others."""
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}: take one of {', '.join(PRESETS)}")
    return PRESETS[name]


class Transformer(nn.Module):
    """The decoder-only transformer of a shape: a GPT's with biases and learned positions, otherwise Llama's.

    `model(ids)` returns logits `[batch, sequence, vocabulary]`, `model(ids, targets)` the mean cross-entropy.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden) if shape.positions else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.tokens(ids)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.ffn is not None
        self.shape = shape
        self.first, self.second = _norm(shape), _norm(shape)
        self.qkv = nn.Linear(shape.hidden, shape.inner + shape.key_value, bias=shape.biases)
        self.out = nn.Linear(shape.inner, shape.hidden, bias=shape.biases)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.biases)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=shape.biases) if shape.gated else None
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.biases)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.first(hidden))
        normed = self.second(hidden)
        inner = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        result: Tensor = hidden + self.down(inner)
        return result

    def _attention(self, hidden: Tensor) -> Tensor:
        shape, each = self.shape, self.shape.key_value // 2
        parts = self.qkv(hidden).split([shape.inner, each, each], -1)
        q, k, v = (part.unflatten(-1, (-1, shape.head_width)).transpose(1, 2) for part in parts)
        if not shape.positions:
            q, k = _rotated(q), _rotated(k)
        grouped = shape.kv_heads != shape.heads
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.hidden) if shape.biases else nn.RMSNorm(shape.hidden, eps=1e-5)


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021), halves of a head's width as pairs, base 500,000 as in Llama 3."""
    half = x.shape[-1] // 2
    rates = 500_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
