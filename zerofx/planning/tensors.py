"""Tensor parallelism as a closed form on a tape: everything cut in parts, and what the parts exchange."""

from __future__ import annotations

from dataclasses import replace

from zerofx.planning.borders import Borders
from zerofx.planning.hardware import Hardware
from zerofx.planning.networks import ring_bytes
from zerofx.planning.replay import Streams
from zerofx.planning.tape import Tape

EXCHANGES = (("all_gather", 4), ("reduce_scatter", 4))
"""Collectives of a block's input for each block and micro-batch, forward and backward together, with sequence
parallelism: two of each in each half (Korthikanti et al., "Reducing activation recomputation in large transformer
models", 2022, figure 5).
"""


def sliced(tape: Tape, tensor: int) -> Tape:
    """The tape of one of the ranks that slice layers between them."""
    if tensor == 1:
        return tape
    return replace(tape, forward=tape.forward.sliced(tensor), backward=tape.backward.sliced(tensor))


def exchange_seconds(found: Borders, hardware: Hardware, tensor: int) -> float:
    """Seconds that a block's exchanges take for one micro-batch; kernels wait for all of them."""
    return sum(
        count * hardware.collective_seconds(kind, found.crossing, tensor) for kind, count in EXCHANGES if tensor > 1
    )


def note_exchanges(streams: Streams, found: Borders, hardware: Hardware, tensor: int, times: int) -> float:
    """Counts the exchanges of so many blocks and micro-batches; returns the seconds that they take in all."""
    if tensor == 1:
        return 0.0
    for kind, count in EXCHANGES:
        streams.collectives["tp", kind] += count * times
        streams.sent["tp", kind] += round(count * times * ring_bytes(kind, found.crossing, tensor))
    seconds = times * exchange_seconds(found, hardware, tensor)
    streams.communication += seconds
    streams.exposed += seconds
    return seconds
