"""`zerofx.Pipeline`: what the user asks of a pipeline, validated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zerofx.config import Config, ConfigError

SINGLE, LOOPED, ZERO_BUBBLE = ("gpipe", "1f1b"), ("interleaved-1f1b", "looped-bfs"), "interleaved-zero-bubble"
V_SHAPED = ("zbv", "dualpipev")
SCHEDULES = (*SINGLE, *LOOPED, ZERO_BUBBLE, *V_SHAPED)
SPLITS_BACKWARD = (ZERO_BUBBLE, *V_SHAPED)
"""Schedules that run the halves of a backward, for the inputs and for the weights, apart from one another."""
GATHER = ("once", "always")
STASHING = ("pipedream", "pipedream-2bw", "async", "asynchronous", "weight-stashing")


Example = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and named arguments of a call of the model."""


class PipelineError(ConfigError):
    """A model cannot be run as the pipeline that was asked for."""


@dataclass(frozen=True)
class Pipeline:
    """The argument `pipeline` of `zerofx.compile`.

    Attributes:
        stages: how many stages the model is cut into.
        schedule: `gpipe` (Huang et al., "GPipe", 2019); `1f1b` (PipeDream-Flush; Narayanan et al., "Memory-efficient
            pipeline-parallel DNN training", 2021); with several stages on each rank `interleaved-1f1b` (Narayanan et
            al., "Efficient large-scale language model training", 2021), `looped-bfs` (Lamy-Poirier, "Breadth-first
            pipeline parallelism", 2023), `interleaved-zero-bubble`, `zbv` (Qi et al., "Zero bubble pipeline
            parallelism", 2023; "Pipeline parallelism with controllable memory", 2024) and `dualpipev` (DeepSeek-AI,
            "DualPipe", 2025).
        microbatches: the parts that each rank's batch is run in.
        split_at: names of modules that begin a stage, one less than stages; by default where the stages balance.
        gather: with `stage=3`, `once` gathers a rank's parameters once a step and keeps them for it; `always` gathers
            those of a stage for each forward and each backward of a micro-batch, and releases them behind it.
        stages_per_rank: how many stages each rank runs: 1 for `gpipe` and `1f1b`, 2 for `zbv` and `dualpipev`, and 2
            or more, 2 by default, for the others. A pipeline has stages / stages_per_rank ranks.
    """

    stages: int
    schedule: str = "1f1b"
    microbatches: int = 1
    split_at: Sequence[str] | None = None
    stages_per_rank: int | None = None
    gather: str = "once"

    def __post_init__(self) -> None:
        if type(self.stages) is not int or self.stages < 1:
            self._refuse("stages", "an int, 1 or more")
        if type(self.microbatches) is not int or self.microbatches < 1:
            self._refuse("microbatches", "an int, 1 or more")
        if isinstance(self.schedule, str) and self.schedule.lower() in STASHING:
            raise PipelineError(
                f"zerofx.Pipeline(schedule={self.schedule!r}) is not possible: PipeDream's asynchronous schedule "
                "computes gradients at weights that are several updates old, and stashes a copy of the weights for "
                "each micro-batch, so that it trains another model than one process does: take '1f1b', its synchronous "
                "form, or 'zbv', which has next to no bubble"
            )
        if self.schedule not in SCHEDULES:
            self._refuse("schedule", f"one of {', '.join(map(repr, SCHEDULES))}")
        if self.gather not in GATHER:
            self._refuse("gather", f"one of {', '.join(map(repr, GATHER))}")
        self._check_places()
        self._check_schedule()

    def _check_places(self) -> None:
        if self.split_at is None:
            return
        names = self.split_at
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            self._refuse("split_at", "names of modules, or None")
        object.__setattr__(self, "split_at", tuple(names))
        if len(names) != self.stages - 1:
            self._refuse("split_at", f"{self.stages - 1} names of modules, one less than stages")

    def _check_schedule(self) -> None:
        allowed = "1" if self.schedule in SINGLE else "2" if self.schedule in V_SHAPED else "2 or more"
        each = self.stages_per_rank
        if each is None:
            object.__setattr__(self, "stages_per_rank", 1 if self.schedule in SINGLE else 2)
        elif (
            type(each) is not int
            or each < 1
            or (allowed in ("1", "2") and each != int(allowed))
            or (allowed == "2 or more" and each < 2)
        ):
            self._refuse("stages_per_rank", f"{allowed} with schedule={self.schedule!r}")
        if self.stages % self.per_rank:
            self._refuse("stages", f"a multiple of {self.per_rank}, the stages of each rank with {self.schedule!r}")
        ranks, several = self.ranks, self.microbatches
        least = {"interleaved-1f1b": ranks, ZERO_BUBBLE: ranks, "zbv": ranks, "dualpipev": 2 * ranks}
        if several < least.get(self.schedule, 1):
            self._refuse("microbatches", f"at least {least[self.schedule]} with {self.schedule!r} over {ranks} ranks")
        if self.schedule in (LOOPED[0], ZERO_BUBBLE) and several % max(1, several // ranks):
            self._refuse("microbatches", f"a multiple of {ranks} with {self.schedule!r} over {ranks} ranks")

    @property
    def per_rank(self) -> int:
        assert self.stages_per_rank is not None
        return self.stages_per_rank

    @property
    def ranks(self) -> int:
        """The ranks of one pipeline."""
        return self.stages // self.per_rank

    def rank_of(self, stage: int) -> int:
        """The rank in its pipeline that runs a stage: round and round, or there and back where the schedule is a V."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.schedule in V_SHAPED and turn % 2 else place

    @property
    def places(self) -> list[int]:
        """The rank of each stage."""
        return [self.rank_of(stage) for stage in range(self.stages)]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, first one first."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def _refuse(self, field: str, allowed: str) -> NoReturn:
        value: Any = getattr(self, field)
        raise PipelineError(f"zerofx.Pipeline({field}={value!r}) is not possible: {field} must be {allowed}")


def refuse_beside(pipeline: object, example_inputs: object, config: Config) -> None:
    """Raises PipelineError for a pipeline that is none, and for arguments of zerofx.compile that do not go with one."""
    if pipeline is None:
        if example_inputs is not None:
            raise PipelineError("zerofx.compile(example_inputs=...) is of use with a pipeline only: leave it out")
        return
    if not isinstance(pipeline, Pipeline):
        raise PipelineError(
            f"zerofx.compile(pipeline=...) takes a zerofx.Pipeline, not {type(pipeline).__name__}: "
            "pass zerofx.Pipeline(stages=4, schedule='1f1b', microbatches=8)"
        )
    if not (
        isinstance(example_inputs, tuple)
        and len(example_inputs) == 2
        and isinstance(example_inputs[0], (tuple, list))
        and isinstance(example_inputs[1], Mapping)
    ):
        raise PipelineError(
            "zerofx.compile(pipeline=...) needs example_inputs=(args, kwargs), what the model is called with for one "
            "micro-batch, of which shapes and dtypes are read: pass ((x,), {}) for model(x)"
        )
    if pipeline.gather == "always" and config.stage != 3:
        raise PipelineError(
            f"zerofx.Pipeline(gather='always') is not possible with stage={config.stage}, which keeps what it has "
            "gathered: pass stage=3, or leave it out"
        )
    unfit = {
        "backend='eager'": (config.backend == "eager", "stages are cut out of a graph, and this makes none"),
        "per_block": (config.per_block, "the whole forward is captured to be cut, and each stage is one graph"),
    }
    for name, why in [(name, why) for name, (given, why) in unfit.items() if given]:
        raise PipelineError(f"zerofx.compile({name}) is not possible with a pipeline, since {why}: leave it out")
