"""Closed forms with sympy, each with its source: what plans are checked against.

Psi are parameters, N data-parallel ranks, k micro-batches, p pipeline stages, v stages of each rank, t tensor-parallel
ranks, s tokens of a sequence, b sequences of a micro-batch, B sequences of a step, h the width, a heads, L layers,
V the vocabulary, K bytes of optimizer state of a parameter, w bytes of an element that is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy as sp

Psi, N, k, p, v, t, s, b, B, h, a, L, V, K, w = SYMBOLS = sp.symbols("Psi N k p v t s b B h a L V K w", positive=True)
BY_NAME = {str(symbol): symbol for symbol in SYMBOLS}


def model_states(stage: int) -> sp.Expr:
    """Bytes of parameters, gradients and states in mixed precision: 2 Psi + 2 Psi + K Psi, K = 12 for Adam.

    At stage 1 the states are divided by N, at 2 gradients, too, at 3 all.

    Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, section 5.
    """
    parts = ((2, 3), (2, 2), (K, 1))
    return sp.Add(*(size * Psi / (N if stage >= first else 1) for size, first in parts))


def activations(recompute: str = "none", sequence_parallel: bool = False, fused_attention: bool = False) -> sp.Expr:
    """Bytes that a layer saves of a micro-batch on one of t tensor-parallel ranks, in 16 bits with dropout.

    sbh (10 + 24/t + 5as/(ht)); the first term is divided by t, too, with sequence parallelism; the last one is
    not there with selective recomputation, or where attention is fused; with full recomputation 2sbh are left.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, table 2.
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute is 'none', 'selective' or 'full', not {recompute!r}")
    across = t if sequence_parallel else sp.Integer(1)
    if recompute == "full":
        return 2 * s * b * h / across
    scores = 0 if recompute == "selective" or fused_attention else 5 * a * s / (h * t)
    return s * b * h * (10 / across + 24 / t + scores)


def parameters() -> sp.Expr:
    """Parameters of a GPT: 12 L h^2 (1 + 13/(12h) + (V+s)/(12Lh)).

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021,
    section 5.1.
    """
    return 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))


def flops(recompute: bool = False) -> sp.Expr:
    """FLOP of a step of a GPT: 72 B s L h^2 (1 + s/(6h) + V/(12Lh)); 96 and V/(16Lh) where the forward runs twice.

    Source: Narayanan et al., 2021, appendix.
    """
    passes, head = (96, 16) if recompute else (72, 12)
    return passes * B * s * L * h**2 * (1 + s / (6 * h) + V / (head * L * h))


def bubble(schedule: str = "1f1b") -> sp.Expr:
    """Idle time of a pipeline over the time in which it computes, forward and backward of all stages alike.

    (p-1)/k for GPipe and 1F1B, 1/v of that for the interleaved schedule, none for zero-bubble V.

    Sources: Narayanan et al., 2021, section 2.2; Qi et al., "Pipeline parallelism with controllable memory", 2024.
    """
    known = {"gpipe": (p - 1) / k, "1f1b": (p - 1) / k, "interleaved-1f1b": (p - 1) / (v * k), "zbv": sp.Integer(0)}
    if schedule not in known:
        raise ValueError(f"schedule is one of {', '.join(known)}, not {schedule!r}")
    return known[schedule]


def data_bytes(stage: int, deferred: bool = False) -> sp.Expr:
    """Bytes that a data-parallel rank sends in a step of k micro-batches, w bytes an element.

    2 (N-1)/N Psi w at stages 0 and 1, (k+1) at stage 2, 3k at stage 3; where gradients are reduced once a step
    (`deferred`), 2 and 2k+1.

    Sources: Rajbhandari et al., 2020, section 7; Patarasuk and Yuan, 2009, for (N-1)/N.
    """
    gathers = [1, 1, 1, 2 * k][stage]
    reductions = 1 if stage < 2 or deferred else k
    return (gathers + reductions) * (N - 1) / N * Psi * w


def tensor_bytes(recompute: bool = False) -> sp.Expr:
    """Bytes that a tensor-parallel rank sends in a layer of a micro-batch: 4 all-reduces of bsh, 6 with recomputation.

    Source: Shoeybi et al., "Megatron-LM", 2019; Narayanan et al., 2021, section 3.2.
    """
    return (6 if recompute else 4) * 2 * (t - 1) / t * b * s * h * w


def pipeline_bytes() -> sp.Expr:
    """Bytes over one boundary of a pipeline in a step, there and back: 2 k b s h w.

    Source: Narayanan et al., 2021, section 3.2.
    """
    return 2 * k * b * s * h * w


def evaluate(formula: sp.Expr, values: Mapping[str, float]) -> float:
    """The formula's number, such as for `{"Psi": 7.5e9, "N": 64, "K": 12}`.

    Raises ValueError for symbols that are left without a value.
    """
    unknown = set(values) - set(BY_NAME)
    if unknown:
        raise ValueError(f"formulas have no {', '.join(sorted(unknown))}: name {', '.join(BY_NAME)}")
    found = sp.sympify(formula).subs({BY_NAME[name]: value for name, value in values.items()})
    if found.free_symbols:
        left = ", ".join(sorted(map(str, found.free_symbols)))
        raise ValueError(f"the formula still has {left}: give each a value")
    return float(found)
