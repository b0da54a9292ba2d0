"""What a plan says: memory by what it is for, traffic, times, and the sentence on what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CATEGORIES = ("parameters", "gradients", "states", "activations", "buckets", "workspace")


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds at one moment.

    Attributes:
        parameters: the rank's part of the parameters, and buffers.
        gradients: gradients that wait for the optimizer, reduced or not.
        states: AdamW's two moments.
        activations: the batch, and what the forward computes and the backward still needs.
        buckets: gathered parameters, and gradients on their way to be reduced.
        workspace: what reductions hold besides.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    activations: int = 0
    buckets: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Moment:
    """What a rank holds `seconds` after the step began, in the part of it that is named."""

    seconds: float
    part: str
    memory: Memory


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step for collectives of one kind along one axis: how many there are, and bytes."""

    axis: str
    kind: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class StagePlan:
    """The ranks of one stage of the pipeline, or all, for the one that holds most; times in seconds of a step.

    `curve` is the memory over time, thinned out, with the peak in it. `compute` is time in kernels, `communication`
    in collectives, `exposed` that in which kernels wait for these, `idle` that in which a rank waits for others.
    """

    stage: int
    blocks: int
    peak: Memory
    curve: tuple[Moment, ...]
    traffic: tuple[Traffic, ...]
    compute: float
    communication: float
    exposed: float
    idle: float


@dataclass(frozen=True)
class Plan:
    """What a step of training will take on a cluster: made by `zerofx.plan`.

    Attributes:
        asked: the arguments that the plan is for, as text and numbers.
        hardware: the name of the hardware.
        elements: elements of all parameters.
        ranks: what data-, tensor- and pipeline-parallel ranks there are: `dp`, `tp`, `pp`.
        stages: one for each stage of the pipeline; one in all without a pipeline.
        seconds: the time of a step.
        bubble: the share of the ranks' time in which they wait for other stages.
        samples: rows of all ranks' batches together.
        tokens: elements of the first tensor of these batches if they are integers, else `samples`.
        flops: FLOP of the model for these, forward and backward, without what is computed again.
        mfu: `flops` over what all ranks could compute at their peak in the time of a step.
        memory_bytes: what one rank may hold.
        traced: how many of the model's equal blocks were traced, and how many it has.
    """

    asked: tuple[tuple[str, Any], ...]
    hardware: str
    elements: int
    ranks: tuple[tuple[str, int], ...]
    stages: tuple[StagePlan, ...]
    seconds: float
    bubble: float
    samples: int
    tokens: int
    flops: float
    mfu: float
    memory_bytes: int
    traced: tuple[int, int]

    @property
    def fullest(self) -> StagePlan:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.peak.total)

    @property
    def peak(self) -> int:
        """The most bytes that any rank holds."""
        return self.fullest.peak.total

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def exposed(self) -> float:
        """Seconds in which the slowest rank's kernels wait for collectives."""
        return max(stage.exposed for stage in self.stages)

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, in a sentence."""
        where = f" of stage {self.fullest.stage}" if len(self.stages) > 1 else ""
        if self.fits:
            left = self.memory_bytes - self.peak
            return (
                f"It fits: a rank{where} holds {size(self.peak)} of {size(self.memory_bytes)}, {size(left)} are left."
            )
        most = max(CATEGORIES, key=lambda name: int(getattr(self.fullest.peak, name)))
        over = self.peak - self.memory_bytes
        return (
            f"It does not fit: a rank{where} needs {size(self.peak)} of {size(self.memory_bytes)}, {size(over)} too "
            f"much, most of it {most} ({size(getattr(self.fullest.peak, most))}): {REMEDY[most]}."
        )

    def formula(self, name: str) -> Any:
        """A closed form, in sympy, for the plan's stage and schedule: `memory` (bytes of parameters, gradients and
        states in 16-bit training), `activations`, `parameters`, `flops`, `bubble`, `communication` (bytes a
        data-parallel rank sends), `tensor_communication` or `pipeline_communication`.

        Symbols and sources are those of `zerofx.planning.formulas`. Raises ValueError for another name.
        """
        from zerofx.planning import formulas  # sympy is slow to import

        stage = int(dict(self.asked)["stage"])
        known: dict[str, Callable[[], Any]] = {
            "memory": lambda: formulas.model_states(stage),
            "activations": formulas.activations,
            "parameters": formulas.parameters,
            "flops": formulas.flops,
            "bubble": formulas.bubble,
            "communication": lambda: formulas.data_bytes(stage),
            "tensor_communication": formulas.tensor_bytes,
            "pipeline_communication": formulas.pipeline_bytes,
        }
        if name not in known:
            raise ValueError(f"there is no formula {name!r}: take one of {', '.join(known)}")
        return known[name]()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str)


class PlanError(ValueError):
    """A file holds no plan."""


def read_plan(path: str | Path) -> Plan:
    """The plan that `Plan.to_json` has written into a file. Raises PlanError for another file."""
    try:
        told = json.loads(Path(path).read_text())
        stages = tuple(_stage_from(stage) for stage in told.pop("stages"))
        listed: dict[str, Any] = {name: tuple(map(tuple, told.pop(name))) for name in ("asked", "ranks")}
        return Plan(stages=stages, traced=tuple(told.pop("traced")), **listed, **told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} holds no plan ({error}): give what `python -m zerofx plan --json` wrote") from error


def _stage_from(told: dict[str, Any]) -> StagePlan:
    peak = Memory(**told.pop("peak"))
    curve = tuple(Moment(**each | {"memory": Memory(**each["memory"])}) for each in told.pop("curve"))
    traffic = tuple(Traffic(**each) for each in told.pop("traffic"))
    return StagePlan(peak=peak, curve=curve, traffic=traffic, **told)


REMEDY = {
    "parameters": "take a higher stage, more ranks, or tensor parallelism",
    "gradients": "take a higher stage, or more ranks",
    "states": "take stage 1 or higher, or more ranks",
    "activations": "take more micro-batches, recompute=1.0, or tensor parallelism",
    "buckets": "take stage 3, a smaller bucket_mb, or tensor parallelism",
    "workspace": "take a smaller bucket_mb",
}


def size(nbytes: float) -> str:
    """Bytes with the unit that suits them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError
