"""The alpha-beta model of what a message costs, and the size of buckets that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.1


@dataclass(frozen=True)
class Link:
    """A way between ranks: `latency` is in seconds, `bandwidth` in bytes a second.

    A message of n bytes takes latency + n / bandwidth seconds (Hockney, "The communication challenge for MPP", 1994).
    """

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth

    def bucket_bytes(self, share: float = SHARE) -> int:
        """The smallest power of two of bytes of which latency is at most `share` of the time."""
        least = self.latency * self.bandwidth * (1 / share - 1)
        return 1 << max(0, int(least) - 1).bit_length()


LINKS = {"gloo": Link(latency=200e-6, bandwidth=1.5e9), "nccl": Link(latency=30e-6, bandwidth=150e9)}
"""What sizes buckets: gloo as `python -m zerofx tune` measures it between two ranks of a laptop; for nccl an assumption
between NVLink in one node (350 GB/s, see `zerofx.planning.hardware`) and a 400 Gb/s network card a GPU (50 GB/s).
"""


def link(backend: str) -> Link:
    """The link of a process group's backend; that of gloo where nothing is known."""
    return LINKS["nccl" if "nccl" in backend else "gloo"]
