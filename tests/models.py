"""Small models with odd sizes, each with its deterministic batches and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

Batch = dict[str, torch.Tensor]

VOCAB = 101
SEQ = 16
ROWS = 2


@dataclass(frozen=True)
class Case:
    """A seeded model in training mode, `batch(rank, step)` and the scalar `loss(model, batch)`."""

    model: nn.Module
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


def generator(rank: int, step: int) -> torch.Generator:
    """The random numbers of one rank's micro-batch."""
    return torch.Generator().manual_seed(1000 * step + rank)


class OddMLP(nn.Module):
    """Linear 7 -> 13 -> 5 -> 1 with a LayerNorm: no dim but 1 divides by another, and one layer has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 5, bias=False)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.gelu(self.first(x)))
        return self.last(torch.tanh(self.second(x)))


def _regression(rank: int, step: int) -> Batch:
    numbers = generator(rank, step)
    return {"x": torch.randn(3, 7, generator=numbers), "y": torch.randn(3, 1, generator=numbers)}


def _regression_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def mlp_odd() -> Case:
    """A small MLP of odd sizes on random regression."""
    torch.manual_seed(0)
    return Case(OddMLP(), _regression, _regression_loss)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens to next-token logits, with learned positions and an untied head."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(SEQ, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _text(rank: int, step: int) -> Batch:
    tokens = torch.randint(3, VOCAB, (ROWS, SEQ + 1), generator=generator(rank, step))
    return {"ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _text_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


def gpt() -> Case:
    """A two-layer GPT whose vocabulary divides by no world size."""
    torch.manual_seed(0)
    return Case(GPT(), _text, _text_loss)


def labelled_text(rank: int, step: int) -> Batch:
    """Tokens that are their own labels, as transformers' language models shift them."""
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=generator(rank, step))
    return {"input_ids": ids, "labels": ids.clone()}


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model returns for a batch with labels."""
    return model(**batch).loss


def own_loss_uncached(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same without the keys and values that a decoder would keep for the next token."""
    return model(**batch, use_cache=False).loss


def gpt2() -> Case:
    """GPT-2 of transformers: head tied to the embedding, weights stored transposed, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # without it transformers logs a warning in the forward, which breaks the graph
    return Case(model, labelled_text, own_loss_uncached)


def _images(rank: int, step: int) -> Batch:
    numbers = generator(rank, step)
    images = 16  # the last BatchNorm sees one value of each: fewer would amplify rounding beyond any tolerance
    return {
        "pixel_values": torch.randn(images, 3, 32, 32, generator=numbers),
        "labels": torch.randint(0, 7, (images,), generator=numbers),
    }


def resnet() -> Case:
    """ResNet of transformers: BatchNorm buffers, one of them an integer, change in every forward."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 40],
        depths=[1, 1, 2, 1],
        layer_type="basic",
        num_labels=7,
        problem_type="single_label_classification",  # otherwise set by the first forward, which changes the graph
    )
    return Case(ResNetForImageClassification(config).train(), _images, own_loss)
