"""Tiny, randomly initialised models of transformers, beside those of `tests.models`, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from tests.models import (
    ROWS,
    SEQ,
    VOCAB,
    Batch,
    Case,
    generator,
    gpt2,
    labelled_text,
    own_loss,
    own_loss_uncached,
    resnet,
)

LABELS = 7
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}


def _decoder(model_class: str, config_class: str, **options: Any) -> Case:
    """A language model made of its config, in training mode."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(config).train()
    model.loss_type = "ForCausalLM"  # without it transformers logs a warning in the forward, which breaks the graph
    return Case(model, labelled_text, own_loss_uncached)


def llama() -> Case:
    """Grouped-query attention and rotary buffers that are in no state dict."""
    return _decoder("LlamaForCausalLM", "LlamaConfig", **SIZES, **TOKENS, num_key_value_heads=2)


class Adapter(nn.Module):
    """A frozen linear layer with a trainable product of two thin matrices beside it, at first zero."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def lora_llama() -> Case:
    """Llama, frozen, with adapters on its query and value projections."""
    case = llama()
    case.model.requires_grad_(False)
    torch.manual_seed(0)
    for layer in case.model.get_submodule("model.layers").children():
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    return case


def mistral() -> Case:
    """Attention within a sliding window of fewer tokens than the batch has."""
    return _decoder("MistralForCausalLM", "MistralConfig", **SIZES, **TOKENS, num_key_value_heads=2, sliding_window=8)


def qwen3() -> Case:
    """Tied head, and norms of the queries and keys whose weights have the size of one head."""
    options = SIZES | TOKENS | {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    return _decoder("Qwen3ForCausalLM", "Qwen3Config", **options)


def gpt_neox() -> Case:
    """Attention and MLP side by side, and rotation of only a quarter of each head."""
    options = SIZES | TOKENS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    return _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", **options)


def opt() -> Case:
    """Tied head behind a projection from a narrower embedding."""
    options = {key: SIZES[key] for key in SIZES if key != "intermediate_size"}
    options |= TOKENS | {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0}
    return _decoder("OPTForCausalLM", "OPTConfig", **options)


def _masked_text(rank: int, step: int) -> Batch:
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=generator(rank, step))
    mask, labels = torch.ones(ROWS, SEQ, dtype=torch.long), ids.clone()
    mask[1, -4 - rank :] = 0
    labels[:, ::3] = -100
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2, "labels": labels}


def bert() -> Case:
    """Weight and bias of the head tied, an integer buffer, and padding that differs by rank."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Case(BertForMaskedLM(config).train(), _masked_text, own_loss)


def _translation(rank: int, step: int) -> Batch:
    numbers = generator(rank, step)
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=numbers)
    return {"input_ids": ids, "labels": torch.randint(3, VOCAB, (ROWS, 7), generator=numbers)}


def t5() -> Case:
    """One embedding for encoder, decoder and head; a position bias of the first layer serves all."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Case(T5ForConditionalGeneration(config).train(), _translation, own_loss_uncached)


def _images(side: int) -> Callable[[int, int], Batch]:
    def batch(rank: int, step: int) -> Batch:
        numbers = generator(rank, step)
        pixels = torch.randn(4, 3, side, side, generator=numbers)
        return {"pixel_values": pixels, "labels": torch.randint(0, LABELS, (4,), generator=numbers)}

    return batch


def vit() -> Case:
    """A class token and position embeddings that are used by broadcasting, and parameters of one row."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=LABELS,
        problem_type="single_label_classification",
    )
    return Case(ViTForImageClassification(config).train(), _images(16), own_loss)


def convnext() -> Case:
    """Whole samples dropped at random, depthwise convolutions, and a scale of one row on each layer."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(0)
    config = ConvNextConfig(
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        num_labels=LABELS,
        drop_path_rate=0.2,
        problem_type="single_label_classification",
    )
    return Case(ConvNextForImageClassification(config).train(), _images(32), own_loss)


ARCHITECTURES: dict[str, Callable[[], Case]] = {
    builder.__name__: builder
    for builder in (gpt2, llama, lora_llama, mistral, qwen3, gpt_neox, opt, bert, t5, vit, resnet, convnext)
}
