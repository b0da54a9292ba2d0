"""Graphs send the bytes of the stage's closed form and the padding of uneven rows, on paper and when they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from math import prod

import pytest

from tests.architectures import llama, t5
from tests.distributed.runs import NONE, Builder, interpreted, run
from tests.models import gpt, gpt2
from tests.pool import Pool

F32 = 4
# A backward reads the factors of products: weights of linear layers and norms. Of a LayerNorm it also reads the bias,
# which aten's backward op takes. It does not read what is looked up or added: embeddings, biases, T5's position biases.
READ_IN_BACKWARD = {
    "Linear": ("weight",),
    "Conv1D": ("weight",),
    "LayerNorm": ("weight", "bias"),
    "LlamaRMSNorm": ("weight",),
    "T5LayerNorm": ("weight",),
}
QUICK = {*product((gpt,), (2, 3), (0, 3)), *product((gpt2,), (2,), (0, 1, 2, 3)), (gpt, 4, 3)}
CASES = [
    pytest.param(
        *case,
        id=f"{case[0].__name__}-world{case[1]}-stage{case[2]}",
        marks=() if case in QUICK else pytest.mark.full,
    )
    for case in product((gpt, gpt2, llama, t5), (2, 3, 4), (0, 1, 2, 3))
]


def travels(builder: Builder, stage: int) -> Counter[str]:
    """How often each parameter or its gradient crosses the wire in a step, in units of (N-1)/N of its bytes."""
    model = builder().model
    names = {id(param): name for name, param in model.named_parameters()}
    if stage < 3:  # stage 0 all-reduces, 1 and 2 gather once and reduce-scatter once
        return Counter(dict.fromkeys(names.values(), 2))
    again = {
        names[id(getattr(module, part))]
        for module in model.modules()
        for part in READ_IN_BACKWARD.get(type(module).__name__, ())
        if getattr(module, part) is not None
    }
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    return Counter([*names.values(), *again, *trainable])


def sent(size: tuple[int, ...], dim: int | None, world: int, times: int) -> int:
    """Bytes that a rank sends when a parameter travels in equal chunks of rows."""
    if dim is None:
        return times * prod(size) * F32 * (world - 1) // world
    rows = -(-size[dim] // world)
    return times * rows * (prod(size) // size[dim]) * F32 * (world - 1)


@pytest.mark.parametrize(("builder", "world", "stage"), CASES)
def test_bytes_are_the_closed_form_and_padding(
    pool: Callable[[int], Pool], builder: Builder, world: int, stage: int
) -> None:
    if builder is not gpt:
        pytest.importorskip("transformers")
    times = travels(builder, stage)
    for rank in run(pool, interpreted(builder, world, stage, NONE)):
        assert rank.stored.keys() == times.keys()
        bound = sum(times[name] * prod(size) * F32 * (world - 1) / world for name, (size, _) in rank.stored.items())
        total = sum(sent(size, dim, world, times[name]) for name, (size, dim) in rank.stored.items())
        assert bound - len(times) * 3 < rank.collectives.bound <= bound  # whole bytes for each travel
        assert rank.collectives.bytes_sent == rank.bytes_of_a_step
        assert rank.bytes_of_a_step == total


@pytest.mark.parametrize("stage", [0, 3])
def test_tied_weights_travel_once(pool: Callable[[int], Pool], stage: int) -> None:
    pytest.importorskip("transformers")
    rows = run(pool, interpreted(gpt2, 2, stage, NONE))[0].collectives.rows
    counts = Counter((row.part, row.kind) for row in rows if "transformer.wte.weight" in row.params)
    once = {0: [("backward", "all_reduce")], 3: [("forward", "all_gather_into_tensor")]}[stage]
    once += [("backward", "all_gather_into_tensor"), ("backward", "reduce_scatter_tensor")] if stage else []
    assert counts == dict.fromkeys(once, 1)
    assert not any("lm_head.weight" in row.params for row in rows)
