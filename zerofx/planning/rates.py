"""The roofline: how long kernels take by their FLOP and bytes. Numbers may be numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from zerofx.planning.hardware import Hardware


PRODUCT, ATTENTION, CONVOLUTION = "product", "attention", "convolution"
"""Kinds of ops that have a rate of their own; what has no FLOP counts as a product."""


def flops_per_second(hardware: Hardware, dtype: torch.dtype | str, op: str = PRODUCT) -> float:
    """FLOP/s that an op of that kind reaches; a dtype without a rate of its own is taken for fp32."""
    products = hardware.achievable.get(_short(dtype), hardware.achievable["fp32"])
    own = {ATTENTION: hardware.attention, CONVOLUTION: hardware.convolution}.get(op, {})
    return own.get(_short(dtype), products)


def peak(hardware: Hardware, dtype: torch.dtype | str) -> float:
    """FLOP/s as the vendor states them, the denominator of MFU (model FLOP utilisation)."""
    return hardware.peak.get(_short(dtype), hardware.peak["fp32"])


def kernel_seconds(hardware: Hardware, flops: Any, nbytes: Any, dtype: torch.dtype | str, op: str = PRODUCT) -> Any:
    """The launch, and the larger of FLOP / achievable FLOP/s and bytes / achievable bytes/s.

    Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", 2009.
    """
    computing = flops / flops_per_second(hardware, dtype, op)
    return hardware.launch + np.maximum(computing, memory_seconds(hardware, nbytes))


def update_seconds(hardware: Hardware, nbytes: Any) -> Any:
    """An optimizer's fused kernel that reads and writes so many bytes in all."""
    moved = nbytes / hardware.update_bandwidth if hardware.update_bandwidth else memory_seconds(hardware, nbytes)
    return hardware.launch + moved


def memory_seconds(hardware: Hardware, nbytes: Any) -> Any:
    """Bytes to and from memory over achievable bytes/s, without a launch."""
    return nbytes / (hardware.memory_bandwidth * hardware.memory_share)


def _short(dtype: torch.dtype | str) -> str:
    if isinstance(dtype, str):
        return dtype
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(dtype, "fp32")
