"""DeepSpeed's learning-rate schedules as factors for torch's LambdaLR: their maximum is the optimizer's `lr`."""

from __future__ import annotations

import math
from collections.abc import Callable

Factor = Callable[[int], float]


def warmup(low: float, steps: int, log: bool = True) -> Factor:
    """WarmupLR: from `low` to 1 in that many steps, along a logarithm or a line; the first two steps are alike."""

    def factor(step: int) -> float:
        done = max(step - 1, 0)
        share = math.log(done + 1) / math.log(max(2, steps)) if log else done / max(1, steps)
        return low + (1 - low) * min(1.0, share)

    return factor


def warmup_decay(low: float, steps: int, total: int, log: bool = True) -> Factor:
    """WarmupDecayLR: and then along a line to `low` at `total` steps."""
    rise = warmup(low, steps, log)

    def factor(step: int) -> float:
        left = max(0.0, (total - step + 1) / max(1, total - steps))
        return rise(step) if step <= steps else low + (1 - low) * left

    return factor


def warmup_cosine(low: float, steps: int, total: int, end: float = 0.0001, log: bool = True) -> Factor:
    """WarmupCosineLR: and then along a half cosine to `end` at `total` steps."""
    rise = warmup(low, steps, log)

    def factor(step: int) -> float:
        done = min(1.0, (step - steps) / max(1, total - steps))
        return rise(step) if step <= steps else end + (1 - end) * (1 + math.cos(math.pi * done)) / 2

    return factor
