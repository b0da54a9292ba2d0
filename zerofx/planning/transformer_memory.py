"""What a rank holds of a transformer while it trains, in bytes, for many layouts at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerofx.planning.shapes import FULL, NONE, SCHEDULES, SELECTIVE, Layouts, Shape
from zerofx.planning.software import Software

GATHERED = 2
"""Layers that are whole at a time at stage 3: the one in use, and the one ahead."""


def memory(shape: Shape, layouts: Layouts, software: Software) -> dict[str, Any]:
    """Bytes of the rank that holds most, by what they are for.

    Parameters, gradients and states are those of ZeRO's stages (Rajbhandari et al., 2020, section 5); activations are
    Korthikanti et al.'s ("Reducing activation recomputation in large transformer models", 2022, table 2) for the
    micro-batches that the schedule has in flight. The first stage of a pipeline, which has most in flight, and the last
    one, which has the head and the logits, are compared.
    """
    first, last = (_of_stage(shape, layouts, software, place) for place in ("first", "last"))
    larger = sum(first.values()) >= sum(last.values())
    return {name: np.where(larger, first[name], last[name]) for name in first}


def elements(shape: Shape, layouts: Layouts, place: str) -> Any:
    """Parameters of one tensor-parallel rank of the first or the last stage of a pipeline."""
    layers = shape.layers / layouts.pp * layer_elements(shape, layouts)
    embedding = shape.embedding / layouts.tp
    head = shape.head / layouts.tp
    copy = shape.hidden * shape.vocabulary / layouts.tp if shape.tied else 0
    alone = layouts.pp == 1
    if place == "first":
        return layers + embedding + np.where(alone, head, 0)
    return layers + np.where(alone, embedding + head, head + copy)


def layer_elements(shape: Shape, layouts: Layouts) -> Any:
    """Parameters of a layer on one tensor-parallel rank: matrices and their first biases are sliced."""
    return shape.matrices / layouts.tp + (shape.layer - shape.matrices)


def defers(layouts: Layouts) -> Any:
    """Whether gradients are added up whole and reduced once a step: at stages 0 and 1, and in pipelines."""
    return (layouts.stage < 2) | (layouts.pp > 1)


def _of_stage(shape: Shape, layouts: Layouts, software: Software, place: str) -> dict[str, Any]:
    held, dp, stage = elements(shape, layouts, place), layouts.dp, layouts.stage
    width, wide = software.parameter_bytes, software.gradient_bytes
    layer = layer_elements(shape, layouts)
    tokens = layouts.microbatch * shape.sequence
    is_last = (layouts.pp == 1) | (place == "last")
    logits = tokens * shape.vocabulary / layouts.tp * (width + 8) * is_last
    gathered = np.where(stage == 3, GATHERED * layer * width, 0) * (dp > 1)
    reduced = np.where(stage >= 2, GATHERED * layer * wide, 0) * (dp > 1)
    return {
        "parameters": width * held / np.where(stage == 3, dp, 1),
        "gradients": wide * held / np.where((stage >= 2) & ~defers(layouts), dp, 1),
        "states": software.state_bytes * held / np.where(stage >= 1, dp, 1),
        "activations": activations(shape, layouts, software) * in_flight(layouts, place) * shape.layers / layouts.pp,
        "buckets": gathered + reduced,
        "workspace": np.maximum(logits, _recomputed(shape, layouts, software)),
    }


def activations(shape: Shape, layouts: Layouts, software: Software) -> Any:
    """Bytes of a layer that wait for the backward of one micro-batch, on one rank.

    Per token, in 16 bits with masks of one byte: sbh (10 + 24/t + 5as/(ht)) for a GPT; the last term is not there with
    fused attention or selective recomputation, 10 is divided by t as well with sequence parallelism, and with full
    recomputation 2sbh are left (Korthikanti et al., table 2).
    """
    return np.where(layouts.recompute == FULL, _inputs(shape, layouts), _saved(shape, layouts, software))


def _inputs(shape: Shape, layouts: Layouts) -> Any:
    tokens = layouts.microbatch * shape.sequence
    return 2 * tokens * shape.hidden / np.where(layouts.sequence_parallel, layouts.tp, 1)


def _saved(shape: Shape, layouts: Layouts, software: Software) -> Any:
    assert shape.ffn is not None
    masks = 2 * shape.hidden if shape.dropout else 0
    whole = 8 * shape.hidden + masks
    sliced = 2 * (2 * shape.inner + shape.key_value) + 2 * (3 if shape.gated else 2) * shape.ffn
    scores = 5 if shape.dropout else 2
    quadratic = 0 if software.fused_attention else scores * shape.heads * shape.sequence
    kept = np.where(layouts.recompute == SELECTIVE, 0, quadratic)
    tokens = layouts.microbatch * shape.sequence
    return tokens * (whole / np.where(layouts.sequence_parallel, layouts.tp, 1) + (sliced + kept) / layouts.tp)


def _recomputed(shape: Shape, layouts: Layouts, software: Software) -> Any:
    """Bytes of the layer whose activations were computed again."""
    again = np.where(layouts.recompute == FULL, _saved(shape, layouts, software), 0)
    if software.fused_attention:
        return again
    scores = 5 if shape.dropout else 2
    tokens = layouts.microbatch * shape.sequence
    quadratic = tokens * scores * shape.heads * shape.sequence / layouts.tp
    return np.where(layouts.recompute == NONE, 0, np.maximum(again, quadratic))


def in_flight(layouts: Layouts, place: str) -> Any:
    """Micro-batches whose activations are held at once, in those of all of a rank's layers.

    1F1B has as many as stages are behind; GPipe all of them; the interleaved schedule 1 + (p-1)/(pv) times those of
    1F1B (Korthikanti et al., section 4.2.3); zero-bubble V as many as 1F1B, on each rank (Qi et al., 2024).
    """
    p, k = layouts.pp, layouts.microbatches
    behind = p if place == "first" else np.ones_like(p)
    interleaved = behind + (p - 1) / layouts.chunks
    by_schedule = {"1f1b": behind, "gpipe": k, "interleaved-1f1b": interleaved, "zbv": p}
    return np.minimum(k, np.choose(layouts.schedule, [by_schedule[name] for name in SCHEDULES]))
