"""ZeRO against tensor parallelism alone on 384 V100, by the cost model: `python -m tests.bench.zero_speedup`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from zerofx.planning.hardware import Hardware, load
from zerofx.planning.shapes import FULL, Layouts, Shape
from zerofx.planning.software import MEGATRON, Software
from zerofx.planning.transformer import foresee

RANKS, HEADS = 384, 64  # ZeRO's figure 2 is of up to 400 ranks, which 64 slices do not divide
SHAPES = {
    "40B": (88, 6144),
    "60B": (132, 6144),
    "80B": (100, 8192),
    "100B": (125, 8192),
}  # layers, width: ZeRO, table 4
DGX2 = load("v100-dgx2")
ONE_CARD = replace(DGX2, ring_bandwidth=12e9)
DEEPSPEED = replace(MEGATRON, name="DeepSpeed with Megatron-LM, 2020", overlap=True)


@dataclass(frozen=True)
class Best:
    """The fastest of the layouts that fit: FLOP/s of a rank, and the tensor-parallel degree and micro-batch."""

    flops: float
    tensor: int
    microbatch: int


def best(name: str, stage: int, hardware: Hardware, software: Software, widest: int) -> Best:
    """Of all tensor-parallel degrees up to `widest` and micro-batches up to 64, one in a step, layers recomputed."""
    layers, hidden = SHAPES[name]
    degrees = [tp for tp in (1, 2, 4, 8, 16, 32, 64) if tp <= widest]
    tp, micro = (grid.flatten() for grid in np.meshgrid(degrees, np.arange(1, 65)))
    layouts = Layouts(dp=RANKS // tp, tp=tp, stage=stage, microbatch=micro, recompute=FULL)
    found = foresee(Shape(layers, hidden, HEADS, 50_304, 1024), layouts, hardware, software, "fp16")
    place = int(np.argmax(np.where(found.fits, found.flops_per_rank, 0)))
    return Best(float(found.flops_per_rank[place]), int(tp[place]), int(micro[place]))


def baseline(name: str, hardware: Hardware = DGX2) -> Best:
    """Megatron-LM: replicas of a model that is sliced over as many ranks as it takes, beyond the node if need be."""
    return best(name, 0, hardware, MEGATRON, 64)


def zero(name: str, hardware: Hardware = DGX2, software: Software = DEEPSPEED) -> Best:
    """ZeRO-100B: stage 2 over slices of one node."""
    return best(name, 2, hardware, software, hardware.ranks_per_node)


def main() -> None:
    cases = {
        "all cards of a node": (DGX2, DEEPSPEED),
        "a ring uses one card": (ONE_CARD, DEEPSPEED),
        "all cards, nothing overlapped": (DGX2, MEGATRON),
        "a card of 100 Gb/s for each rank": (replace(DGX2, inter=replace(DGX2.inter, bandwidth=12e9)), DEEPSPEED),
    }
    for case, (hardware, software) in cases.items():
        print(case)
        for name in SHAPES:
            old, new = baseline(name, hardware), zero(name, hardware, software)
            print(
                f"  {name}: {old.flops / 1e12:.1f} TFLOP/s (tp {old.tensor}, micro-batch {old.microbatch}) and "
                f"{new.flops / 1e12:.1f} (tp {new.tensor}, micro-batch {new.microbatch}): {new.flops / old.flops:.2f} x"
            )


if __name__ == "__main__":
    main()
