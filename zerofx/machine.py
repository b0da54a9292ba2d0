"""What a machine can do, and how long one kernel or collective takes on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerofx.cost import Link


@dataclass(frozen=True)
class Machine:
    """One rank's accelerator and its way to the others.

    `peak` has FLOP/s by dtype and `memory` is in bytes/s, both as the vendor states them; kernels reach the shares
    `compute_share` and `memory_share` of them. `launch` is what each kernel takes besides, in seconds. `link` carries
    what a rank sends; its bandwidth is that of one direction.
    """

    name: str
    peak: tuple[tuple[torch.dtype, float], ...]
    memory: float
    compute_share: float
    memory_share: float
    launch: float
    link: Link

    def kernel_seconds(self, flops: float, nbytes: float, dtype: torch.dtype) -> float:
        """The launch, and the larger of FLOP / achieved FLOP/s and bytes / achieved bytes/s.

        This is the roofline (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
        multicore architectures", 2009). A dtype that is not in `peak` is taken for float32.
        """
        peak = dict(self.peak)
        arithmetic = flops / (peak.get(dtype, peak[torch.float32]) * self.compute_share)
        return self.launch + max(arithmetic, nbytes / (self.memory * self.memory_share))

    def collective_seconds(self, kind: str, nbytes: int, ranks: int) -> float:
        """Latency and the time to send what a rank sends of whole tensors of `nbytes` bytes."""
        return self.link.seconds(ring_bytes(kind, nbytes, ranks))


def ring_bytes(kind: str, nbytes: int, ranks: int) -> float:
    """Bytes that each of N ranks sends for a collective on whole tensors of `nbytes` bytes.

    (N-1)/N of them in an all-gather or a reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; the "bus bandwidth" of nccl-tests).
    """
    sent = nbytes * (ranks - 1) / ranks
    return 2 * sent if kind == "all_reduce" else sent


H100 = Machine(
    name="H100 SXM, one node",
    peak=((torch.bfloat16, 989e12), (torch.float16, 989e12), (torch.float32, 67e12), (torch.float64, 67e12)),
    memory=3.35e12,
    compute_share=0.7,
    memory_share=0.9,
    launch=2e-6,
    link=Link(latency=30e-6, bandwidth=350e9),
)
"""One GPU of a node of eight.

Peaks are those of the data sheet ("NVIDIA H100 Tensor Core GPU", SXM, dense): 989 TFLOP/s in bf16 and fp16, 67 in fp32
outside of tensor cores, 3.35 TB/s of HBM3, NVLink 450 GB/s in each direction. Of NVLink, nccl-tests reach 350 GB/s with
all-gathers and 360 GB/s with reduce-scatters (github.com/NVIDIA/nccl/issues/1281). The shares are assumptions on the
high side, so that computation hides less than it may: attention reaches 35 % (FlashAttention-2) to 75 %
(FlashAttention-3; Shah et al., "FlashAttention-3", 2024), large matrix products about 70 %.
"""
