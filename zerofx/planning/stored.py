"""What a rank stores of parameters, gradients and AdamW's states, by ZeRO's stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from zerofx.layout import ParamLayout

MOMENTS = 2
"""Tensors of a parameter's size that Adam and AdamW keep for each parameter."""
UPDATE = 7
"""Passes over a part of a parameter in a fused AdamW's update: four reads and three writes."""


@dataclass(frozen=True)
class Stored:
    """Bytes: the first data-parallel rank's parts of parameters and of those that are trained; whole ones, and whole
    ones of those that are stored in parts.
    """

    params: int
    trained: int
    whole: int
    whole_trained: int
    gathered: int

    @property
    def states(self) -> int:
        return MOMENTS * self.trained

    @classmethod
    def of(cls, params: Iterable[ParamLayout], world: int, tensor: int = 1) -> Stored:
        """Those of parameters over `world` data-parallel ranks, matrices sliced over `tensor` ranks before."""
        parts = [0, 0, 0, 0, 0]
        for param in params:
            slices = tensor if len(param.size) > 1 else 1
            local = prod(param.local_size(world, 0)) * param.dtype.itemsize // slices
            whole = param.whole_bytes // slices
            parts = [
                parts[0] + local,
                parts[1] + local * param.requires_grad,
                parts[2] + whole,
                parts[3] + whole * param.requires_grad,
                parts[4] + whole * (param.dim is not None),
            ]
        return cls(*parts)
