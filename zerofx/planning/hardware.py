"""The machines of a cluster as data: `load("h100-8x400g")`, or the path of a file of one's own."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zerofx.cost import Link
from zerofx.planning import networks, rates

FILES = files("zerofx.planning") / "hardware"
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHORT = {dtype: name for name, dtype in DTYPES.items()}


OPTIONAL = {"origin", "ring_bandwidth", "attention", "convolution", "update_bandwidth"}


class HardwareError(ValueError):
    """A hardware file is missing, or something in it is."""


@dataclass(frozen=True)
class Hardware:
    """One rank's accelerator, and its ways to the ranks of its node and to those of other nodes.

    Attributes:
        name: what the file is called.
        description: the accelerator, the node and the network, in words.
        device: `cuda` or `cpu`.
        memory_bytes: what one rank may hold.
        memory_bandwidth: bytes/s of the memory, as the vendor states it.
        memory_share: the share of it that kernels reach which are limited by it.
        peak: FLOP/s by dtype (`fp64`, `fp32`, `bf16`, `fp16`), dense, as the vendor states them.
        achievable: FLOP/s by dtype that large matrix products reach in training.
        launch: seconds that each kernel takes besides.
        ranks_per_node: accelerators of one node.
        collective_latency: seconds that a collective takes to begin, whatever the ranks.
        intra: one step of a ring inside a node: seconds, and bytes/s that one rank sends in one direction.
        inter: the same between nodes; the bandwidth is a rank's part of its node's network cards.
        ring_bandwidth: bytes/s that one ring may send between nodes, where it does not use all cards of a node.
        attention, convolution: FLOP/s by dtype that these reach, forward and backward together; where there is none,
            what products do.
        update_bandwidth: bytes/s of an optimizer's fused kernel, which works in place; 0 for those of other kernels.
        origin: where each number comes from.
    """

    name: str
    description: str
    device: str
    memory_bytes: int
    memory_bandwidth: float
    memory_share: float
    peak: Mapping[str, float]
    achievable: Mapping[str, float]
    launch: float
    ranks_per_node: int
    collective_latency: float
    intra: Link
    inter: Link
    ring_bandwidth: float = math.inf
    origin: Mapping[str, str] = field(default_factory=dict)
    attention: Mapping[str, float] = field(default_factory=dict)
    convolution: Mapping[str, float] = field(default_factory=dict)
    update_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        for name in ("peak", "achievable", "origin", "attention", "convolution"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for name in ("memory_bytes", "memory_bandwidth", "memory_share", "ranks_per_node"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise HardwareError(f"hardware {self.name!r}: {name} is {value!r}: give a number above 0")
        if "fp32" not in self.peak or set(self.peak) != set(self.achievable) or not set(self.peak) <= set(DTYPES):
            raise HardwareError(
                f"hardware {self.name!r}: peak has {sorted(self.peak)} and achievable {sorted(self.achievable)}: "
                f"give both for the same dtypes of {', '.join(DTYPES)}, fp32 among them"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, tuple(self.achievable.items()), self.intra, self.inter))

    def kernel_seconds(self, flops: float, nbytes: float, dtype: torch.dtype | str, op: str = rates.PRODUCT) -> float:
        """Seconds of one kernel: see `zerofx.planning.rates.kernel_seconds`."""
        return float(rates.kernel_seconds(self, flops, nbytes, dtype, op))

    def collective_seconds(self, kind: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of one collective: see `zerofx.planning.networks.collective_seconds`."""
        return float(networks.collective_seconds(self, kind, nbytes, ranks, stride))


def names() -> list[str]:
    """The hardware that comes with zerofx."""
    return sorted(entry.name.removesuffix(".toml") for entry in FILES.iterdir() if entry.name.endswith(".toml"))


def load(name: str | Path | Hardware) -> Hardware:
    """The hardware of that name, or of that TOML file.

    Raises HardwareError where there is neither, or where the file lacks a value.
    """
    if isinstance(name, Hardware):
        return name
    packaged = str(name) in names()
    path = Path(name)
    if not packaged and not path.is_file():
        raise HardwareError(
            f"no hardware is called {str(name)!r}, and no file either: take one of {', '.join(names())}, or a TOML "
            "file such as `python -m zerofx tune --out FILE` writes"
        )
    source = FILES / f"{name}.toml" if packaged else path
    try:
        return _made(str(name) if packaged else path.stem, tomllib.loads(source.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path} is no TOML: {error}") from None


def _made(name: str, read: dict[str, Any]) -> Hardware:
    known = {each.name for each in fields(Hardware)} - {"name"}
    wrong, missing = set(read) - known, known - set(read) - OPTIONAL
    if wrong or missing:
        raise HardwareError(
            f"hardware {name!r} lacks {sorted(missing)} and has unknown {sorted(wrong)}: "
            f"give {', '.join(sorted(known))}"
        )
    for way in ("intra", "inter"):
        if set(read[way]) != {"latency", "bandwidth"}:
            raise HardwareError(f"hardware {name!r}: {way} has {sorted(read[way])}: give latency and bandwidth")
        read[way] = Link(**read[way])
    return Hardware(name=name, **read)


H100, CPU = load("h100-8x400g"), load("cpu")
"""What is foreseen for where nothing else is said: pipelines for the first, timelines by the device of the run."""


def machine_of(device: str) -> Hardware:
    """What a run on devices of that type is foreseen for."""
    return CPU if device == "cpu" else H100


def text(hardware: Hardware) -> str:
    """The TOML from which `load` reads the same hardware."""
    lines = []
    for each in fields(Hardware):
        value = getattr(hardware, each.name)
        if isinstance(value, (str, int, float)) and each.name != "name":
            lines.append(f"{each.name} = {_literal(value)}")
    for name in ("peak", "achievable", "attention", "convolution", "intra", "inter", "origin"):
        value = getattr(hardware, name)
        entries = {"latency": value.latency, "bandwidth": value.bandwidth} if isinstance(value, Link) else value
        lines += ["", f"[{name}]", *(f"{key} = {_literal(entry)}" for key, entry in entries.items())]
    return "\n".join(lines) + "\n"


def _literal(value: str | float) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
