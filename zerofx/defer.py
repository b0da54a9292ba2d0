"""Whether the gradients of a step's micro-batches wait for its last one, or are reduced with each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofx.config import ConfigError

if TYPE_CHECKING:
    from zerofx.engine import Engine

CHOICES = ("auto", "defer", "reduce")


def defers(engine: Engine, accumulate: str) -> bool:
    """What `accumulate` means for a model: every rank answers alike.

    `auto` defers at stages 0 and 1, whose policy that is, and otherwise where `memory` was given and leaves room for
    whole gradients beside the peak that was foreseen at the first training graph; before that nothing is known to fit.

    Raises ConfigError for another value than `auto`, `defer` and `reduce`.
    """
    if accumulate not in CHOICES:
        allowed = ", ".join(map(repr, CHOICES))
        raise ConfigError(f"accumulate={accumulate!r} is not possible: it must be one of {allowed}")
    if accumulate != "auto":
        return accumulate == "defer"
    if engine.config.stage < 2:
        return True
    settled, world = engine.settled, engine.mesh.axis("dp").size
    if settled is None or settled.allowed is None:
        return False
    whole = sum(param.padded_bytes(world) for param in engine.layout if param.requires_grad)
    return settled.peak + whole <= settled.allowed
