"""How long a step of a transformer takes, in seconds, for many layouts at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zerofx.planning import networks, rates
from zerofx.planning.hardware import Hardware
from zerofx.planning.shapes import FULL, SCHEDULES, Layouts, Shape
from zerofx.planning.software import Software
from zerofx.planning.transformer_memory import defers, elements

FORWARD_OPS, BACKWARD_OPS = 14, 28
"""Kernels of a layer: six products and eight elementwise ones, and twice that in the backward."""
UPDATE = 30
"""Bytes that AdamW moves of a parameter: gradient (2), twice for the norm, master and moments (24), parameter (2)."""


class Pass(NamedTuple):
    """Seconds of one micro-batch in one layer, on one rank; `scores` are what selective recomputation repeats."""

    forward: Any
    backward: Any
    scores: Any


class Costs(NamedTuple):
    """Seconds of a step. `communication` is all of it, `exposed` what computation waits for; bubbles are apart."""

    step: Any
    compute: Any
    communication: Any
    exposed: Any
    bubble: Any
    sent: dict[str, Any]


def costs(shape: Shape, layouts: Layouts, hardware: Hardware, software: Software, dtype: str) -> Costs:
    """Seconds of a step, and bytes that a rank sends, by axis.

    Each stage of a pipeline runs its micro-batches one after another; the slowest one, which has the head, sets the
    pace, and the others' first and last micro-batches are the bubble: (p-1)/m for 1F1B and GPipe, 1/v of that
    interleaved (Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021), nothing for
    zero-bubble V (Qi et al., 2024).
    """
    layer = layer_seconds(shape, layouts, hardware, software, dtype)
    again = np.choose(layouts.recompute, [0, layer.scores, layer.forward])
    depth, k = shape.layers / layouts.pp, layouts.microbatches
    sliced, tp_sent = _tensor(shape, layouts, hardware)
    sends, pp_sent = _sends(shape, layouts, hardware, software)
    head = _head(shape, layouts, hardware, software, dtype)
    forward, backward = depth * layer.forward, depth * (layer.backward + again)
    stage = forward + backward + depth * sliced + sends
    shared, exposed, dp_sent = _data(shape, layouts, hardware, software, (forward + depth * sliced / 3, backward))
    update = _update(shape, layouts, hardware, software)
    parts = np.where(layouts.schedule == SCHEDULES.index("interleaved-1f1b"), layouts.chunks, 1)
    bubble = np.where(layouts.schedule == SCHEDULES.index("zbv"), 0, (layouts.pp - 1) * stage / parts)
    compute = k * (forward + backward + head) + update
    waited = k * (depth * sliced + sends) + exposed
    sent = {"dp": dp_sent, "tp": k * depth * tp_sent, "pp": k * pp_sent}
    return Costs(compute + waited + bubble, compute, k * (depth * sliced + sends) + shared, waited, bubble, sent)


def layer_seconds(shape: Shape, layouts: Layouts, hardware: Hardware, software: Software, dtype: str) -> Pass:
    """One layer and micro-batch: products by the roofline, elementwise kernels by their bytes, and each op's launch."""
    tokens, t = layouts.microbatch * shape.sequence, layouts.tp
    rate = rates.flops_per_second(hardware, dtype)
    products = 2 * tokens * shape.matrices / t / rate
    flops = 4 * tokens * shape.sequence * shape.inner / t / (2 if software.fused_attention else 1)
    square = 0 if software.fused_attention else shape.heads * shape.sequence
    moved = 2 * tokens * (2 * square + 2 * shape.inner + shape.key_value) / t
    attention = np.maximum(flops / rate, rates.memory_seconds(hardware, software.traffic * moved))
    once, twice, score = _elementwise(shape, layouts, square)
    op = hardware.launch + software.call

    def bytes_seconds(each: Any) -> Any:
        return rates.memory_seconds(hardware, software.traffic * tokens * each)

    forward = products + attention + bytes_seconds(once) + FORWARD_OPS * op
    backward = 2 * (products + attention) + bytes_seconds(twice) + BACKWARD_OPS * op
    return Pass(forward, backward, attention + bytes_seconds(score) + 4 * op)


def _elementwise(shape: Shape, layouts: Layouts, square: int) -> tuple[Any, Any, Any]:
    """Bytes that elementwise kernels move of one token in a forward, in a backward and for scores, in 16 bits.

    A norm reads and writes h elements and its backward reads two and writes one, twice over for its weights; bias,
    dropout and residual read two, write one and a mask; GELU, and its product with the gate, read and write the MLP's
    width; what attention reads is laid out anew; scores are scaled, masked, normalised and dropped in two kernels.
    """
    assert shape.ffn is not None
    h, t = shape.hidden, layouts.tp
    across = np.where(layouts.sequence_parallel, t, 1)
    laid_out = 4 * (2 * shape.inner + shape.key_value)
    activation = (3 if shape.gated else 2) * 2 * shape.ffn
    biases = 2 * (shape.inner + shape.key_value + shape.ffn) if shape.biases else 0
    score = 9 * square / t
    forward = 22 * h / across + (laid_out + activation) / t + score
    backward = 42 * h / across + (laid_out + activation + 2 * shape.ffn + biases) / t + 11 * square / t
    return forward, backward, score


def _head(shape: Shape, layouts: Layouts, hardware: Hardware, software: Software, dtype: str) -> Any:
    """The head's product, forward and backward, and the loss in fp32."""
    logits = layouts.microbatch * shape.sequence * shape.vocabulary / layouts.tp
    flops = 3 * 2 * shape.hidden * logits / rates.flops_per_second(hardware, dtype)
    return flops + rates.memory_seconds(hardware, software.traffic * 20 * logits)


def _tensor(shape: Shape, layouts: Layouts, hardware: Hardware) -> tuple[Any, Any]:
    """Seconds of a layer's all-reduces, and bytes: two forward, two backward, two where the forward runs again.

    Source: Shoeybi et al., "Megatron-LM", 2019; with sequence parallelism each is a reduce-scatter and an all-gather.
    """
    whole = 2 * layouts.microbatch * shape.sequence * shape.hidden
    count = np.where(layouts.recompute == FULL, 6, 4)
    seconds = networks.collective_seconds(hardware, "all_reduce", whole, layouts.tp)
    return count * seconds, count * networks.ring_bytes("all_reduce", whole, layouts.tp)


def _sends(shape: Shape, layouts: Layouts, hardware: Hardware, software: Software) -> tuple[Any, Any]:
    """Seconds and bytes of a micro-batch's ways to the next stage and back, for each stage of a rank."""
    parts = layouts.tp if software.split_sends else np.where(layouts.sequence_parallel, layouts.tp, 1)
    message = 2 * layouts.microbatch * shape.sequence * shape.hidden / parts
    ways = np.where(layouts.pp > 1, 2 * layouts.chunks, 0)
    seconds = networks.send_seconds(hardware, message, layouts.dp * layouts.tp)
    return ways * seconds, ways * message


def _update(shape: Shape, layouts: Layouts, hardware: Hardware, software: Software) -> Any:
    """The optimizer, and what adds each micro-batch's gradients to those before: two are read and one is written."""
    held, dp = elements(shape, layouts, "first"), layouts.dp
    update = UPDATE * held / np.where(layouts.stage >= 1, dp, 1)
    added = held / np.where((layouts.stage >= 2) & ~defers(layouts), dp, 1)
    moved = update + (layouts.microbatches - 1) * 3 * software.gradient_bytes * added
    return rates.memory_seconds(hardware, moved)


def _data(
    shape: Shape, layouts: Layouts, hardware: Hardware, software: Software, compute: tuple[Any, Any]
) -> tuple[Any, Any, Any]:
    """Seconds of data-parallel collectives in a step, those that computation waits for, and bytes.

    Stage 0 reduces once; 1 reduces and gathers once; 2 reduces each micro-batch; 3 gathers each micro-batch's forward
    and backward and reduces. What runs beside a forward or backward is waited for as far as it takes longer, and its
    first or last layer's share always, since nothing is left to compute beside it.
    """
    held, depth = elements(shape, layouts, "first"), shape.layers / layouts.pp
    n, k, stage = layouts.dp, layouts.microbatches, layouts.stage

    def seconds(kind: str, nbytes: Any) -> Any:
        begin = np.where(n > 1, (depth - 1) * networks.collective_seconds(hardware, kind, 0.0, n, layouts.tp), 0)
        return networks.collective_seconds(hardware, kind, nbytes, n, layouts.tp) + (begin if software.overlap else 0)

    gather = seconds("all_gather", software.parameter_bytes * held)
    scatter = seconds("reduce_scatter", software.gradient_bytes * held)
    reduce = np.where(stage == 0, seconds("all_reduce", software.gradient_bytes * held), scatter)
    reductions = np.where(defers(layouts), 1, k)
    gathers = np.choose(stage, [0, 1, 1, 2 * k])
    total = gathers * gather + reductions * reduce
    sent = networks.ring_bytes("all_gather", held, n) * (
        gathers * software.parameter_bytes + reductions * software.gradient_bytes * np.where(stage == 0, 2, 1)
    )
    if not software.overlap:
        return total, total, sent
    forward, backward = compute

    def waited(seconds: Any, beside: Any) -> Any:
        return np.maximum(seconds - beside, seconds / depth)

    ahead = np.where(stage > 0, waited(gather, forward), 0) * np.where(stage == 3, k, 1)
    both = np.where(stage == 3, gather, 0)
    behind = reductions * waited(reduce + both, backward)
    without = np.where(stage == 3, k - reductions, 0) * waited(both, backward)
    return total, ahead + behind + without, sent
