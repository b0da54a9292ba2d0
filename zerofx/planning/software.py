"""What a training system makes of a transformer: which kernels are fused, what is stored, what runs side by side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """Habits of a training system that costs depend on, beside the layout.

    Attributes:
        name: the system's.
        fused_attention: scores are never written to memory, and what a causal mask covers is not computed.
        traffic: bytes that elementwise kernels move, over those counted: inputs and outputs of fused kernels.
        call: seconds that each op takes on top of the hardware's launch: Python, and the ramps of small kernels.
        parameter_bytes, gradient_bytes, state_bytes: of a parameter; states are what the optimizer alone holds, a
            master copy among them (ZeRO's K).
        overlap: data-parallel collectives run beside computation.
        split_sends: tensor-parallel ranks send a part each of what goes to the next stage of a pipeline.
    """

    name: str
    fused_attention: bool
    traffic: float = 1.0
    call: float = 0.0
    parameter_bytes: int = 2
    gradient_bytes: int = 2
    state_bytes: int = 12
    overlap: bool = True
    split_sends: bool = False


ZEROFX = Software("zerofx", fused_attention=True)
"""bf16 in the sense of ZeRO's mixed precision: 2 + 2 + 12 bytes a parameter, attention that is fused."""

MEGATRON = Software("Megatron-LM, 2021", False, traffic=1.507, call=24.1e-6, overlap=False, split_sends=True)
"""Attention whose scores are written, each collective waited for. `traffic` and `call` are fitted by
`python -m tests.bench.fit_vtrain` to vTrain's 82 steps of models of up to 39e9 parameters on 64 to 512 A100.
"""
