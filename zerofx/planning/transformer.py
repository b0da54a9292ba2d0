"""Plans transformers by closed forms: memory, bytes and time of many layouts at once, without tracing anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zerofx.planning import rates
from zerofx.planning.hardware import Hardware
from zerofx.planning.hardware import load as load_hardware
from zerofx.planning.shapes import Layouts, Shape
from zerofx.planning.software import ZEROFX, Software
from zerofx.planning.transformer_memory import memory
from zerofx.planning.transformer_time import costs


@dataclass(frozen=True)
class Forecast:
    """What each of the layouts takes: arrays in bytes, seconds and FLOP, one place a layout.

    `memory` is by use, of the rank that holds most; `sent` by axis (`dp`, `tp`, `pp`), of one rank and step. `exposed`
    is communication that computation waits for, `flops` those of the model, without what is computed again.
    """

    layouts: Layouts
    hardware: Hardware
    memory: dict[str, Any]
    flops: Any
    sent: dict[str, Any]
    compute: Any
    communication: Any
    exposed: Any
    bubble: Any
    step: Any
    tokens: Any
    dtype: str

    @property
    def peak(self) -> Any:
        """Bytes that the rank holds that holds most."""
        return sum(self.memory.values())

    @property
    def fits(self) -> Any:
        return self.peak <= self.hardware.memory_bytes

    @property
    def tokens_per_second(self) -> Any:
        return self.tokens / self.step

    @property
    def flops_per_rank(self) -> Any:
        """FLOP/s of the model, of each rank."""
        return self.flops / self.step / self.layouts.world

    @property
    def mfu(self) -> Any:
        """Model FLOP utilisation: the share of the vendor's peak."""
        return self.flops_per_rank / rates.peak(self.hardware, self.dtype)


def model_flops(shape: Shape, sequences: Any) -> Any:
    """FLOP of a forward and backward: 72 B s L h^2 (1 + s/(6h) + V/(12 L h)) for a GPT.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021, appendix, which
    counts one more forward, as full recomputation takes. All of attention's scores are counted, masked or not.
    """
    each = shape.layers * (shape.matrices + 2 * shape.sequence * shape.inner) + shape.hidden * shape.vocabulary
    return 6 * sequences * shape.sequence * each


def foresee(
    shape: Shape, layouts: Layouts, hardware: str | Hardware, software: Software = ZEROFX, dtype: str = "bf16"
) -> Forecast:
    """Memory, bytes and time of each layout."""
    machine = load_hardware(hardware)
    took = costs(shape, layouts, machine, software, dtype)
    sequences = layouts.dp * layouts.microbatch * layouts.microbatches
    return Forecast(
        layouts=layouts,
        hardware=machine,
        memory=memory(shape, layouts, software),
        flops=model_flops(shape, np.asarray(sequences, dtype=float)),
        sent=took.sent,
        compute=took.compute,
        communication=took.communication,
        exposed=took.exposed,
        bubble=took.bubble,
        step=took.step,
        tokens=sequences * shape.sequence,
        dtype=dtype,
    )
