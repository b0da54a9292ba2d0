"""The roofline: how long kernels take by their FLOP and bytes. Numbers may be numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from zerofx.planning.hardware import Hardware


def flops_per_second(hardware: Hardware, dtype: torch.dtype | str) -> float:
    """FLOP/s that matrix products reach; a dtype without a rate of its own is taken for fp32."""
    return hardware.achievable.get(_short(dtype), hardware.achievable["fp32"])


def peak(hardware: Hardware, dtype: torch.dtype | str) -> float:
    """FLOP/s as the vendor states them, the denominator of MFU (model FLOP utilisation)."""
    return hardware.peak.get(_short(dtype), hardware.peak["fp32"])


def kernel_seconds(hardware: Hardware, flops: Any, nbytes: Any, dtype: torch.dtype | str) -> Any:
    """The launch, and the larger of FLOP / achievable FLOP/s and bytes / achievable bytes/s.

    Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", 2009.
    """
    return hardware.launch + np.maximum(flops / flops_per_second(hardware, dtype), memory_seconds(hardware, nbytes))


def memory_seconds(hardware: Hardware, nbytes: Any) -> Any:
    """Bytes to and from memory over achievable bytes/s, without a launch."""
    return nbytes / (hardware.memory_bandwidth * hardware.memory_share)


def _short(dtype: torch.dtype | str) -> str:
    if isinstance(dtype, str):
        return dtype
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(dtype, "fp32")
