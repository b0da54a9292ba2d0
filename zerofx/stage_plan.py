"""How a model is cut into stages: once by example, and the same again for batches of other shapes and other modes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from zerofx.passes.split_stages import SplitStages, choose_cuts
from zerofx.pipeline import Pipeline, PipelineError
from zerofx.planning.hardware import H100
from zerofx.schedule_check import check_schedule
from zerofx.schedules import order_of
from zerofx.shard import Owner
from zerofx.stage_check import check_stages
from zerofx.stage_graphs import Stage, refuse_spread_buffers, stages_of
from zerofx.stage_line import Line
from zerofx.stage_report import PipelineReport, report_of
from zerofx.whole_graph import WholeGraph, WithoutData

Key = tuple[Any, ...]
Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    """The stages for micro-batches of one kind."""

    key: Key
    whole: WholeGraph
    stages: list[Stage]


@dataclass(frozen=True)
class Foreign:
    """What a rank does not hold, since another one of its pipeline does.

    In `others` are buffers, and parameters that zerofx was told to ignore.
    """

    params: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, model: nn.Module, owners: Sequence[Owner], ignored: Sequence[Tensor], place: int, plan: Plan | None
    ) -> Foreign:
        if plan is None:
            return cls()
        params = frozenset(o.layout.name for o in owners if place not in plan.ranks_of(o.layout.name))
        first = {id(each): name for name, each in (*model.named_buffers(), *model.named_parameters())}
        alone = {id(param) for param in ignored}
        named = [(name, param) for name, param in model.named_parameters(remove_duplicate=False) if id(param) in alone]
        others = {n: first[id(each)] for n, each in (*model.named_buffers(remove_duplicate=False), *named)}
        return cls(params, frozenset(name for name, known in others.items() if place not in plan.ranks_of(known)))

    def drop_others(self, prefix: str, module: nn.Module) -> None:
        """Takes those that zerofx does not store out of one module."""
        for name in (*module._buffers, *module._parameters):
            if (f"{prefix}.{name}" if prefix else name) in self.others:
                held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
                held[name] = None


class Plan:
    """The stages of a model. Every rank makes the same one from the same model, without data and communication.

    `owned` has for each stage the names of its parameters and buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        device: torch.device,
        autocast: Autocast,
        example_inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
        cap: int | None = None,
    ) -> None:
        self.pipeline, self.autocast = pipeline, autocast
        try:
            self.without = WithoutData(model, device)
        except Exception as error:
            raise PipelineError(
                "the model cannot be cut into stages, because it cannot be copied (copy.deepcopy): "
                f"{type(error).__name__}: {error}"
            ) from None
        args, kwargs = example_inputs
        modes = tuple(module.training for module in model.modules())
        simulated = check_schedule(pipeline, order_of(pipeline))
        whole, line = self._line(args, kwargs)
        cuts = choose_cuts(line, pipeline, simulated.in_flight, cap)
        stages = stages_of(line, cuts)
        check_stages(line, stages)
        self.report: PipelineReport = report_of(line, cuts, pipeline, simulated)
        read = [frozenset(stage.names("param") + stage.names("buffer")) for stage in stages]
        self.owned = self._with_unread(read)
        self._refuse_split_state(line)
        self._refuse_ranks_without_parameters()
        key = self._key(args, kwargs, modes)
        self.variants = {key: Variant(key, whole, stages)}

    def variant(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: tuple[bool, ...]) -> Variant:
        """The stages for a call with these arguments; `modes` says which modules train.

        Raises PipelineError where they cannot be those that the model was cut into.
        """
        key = self._key(args, kwargs, modes)
        if key not in self.variants:
            for module, training in zip(self.without.model.modules(), modes, strict=True):
                module.training = training
            whole, line = self._line(args, kwargs)
            cuts = SplitStages(self.pipeline.stages, self.pipeline.microbatches, owned=self.owned)(line)
            stages = stages_of(line, cuts)
            check_stages(line, stages)
            refuse_spread_buffers(stages, self.owned)
            self.variants[key] = Variant(key, whole, stages)
        return self.variants[key]

    def digest(self, boundaries: bool = True) -> str:
        """Says what is in which stage, and what crosses from one to the next."""
        (variant,) = self.variants.values()
        told = [(sorted(n), s.receives if boundaries else ()) for n, s in zip(self.owned, variant.stages, strict=True)]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def ranks_of(self, name: str) -> list[int]:
        """The ranks of the pipeline that hold a parameter or buffer, in the order of their first stage that does."""
        ranks = (self.pipeline.rank_of(stage) for stage, names in enumerate(self.owned) if name in names)
        return list(dict.fromkeys(ranks))

    def _line(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[WholeGraph, Line]:
        whole = self.without.capture(args, kwargs, self.autocast)
        with self.autocast():
            return whole, Line(whole, H100)

    def _with_unread(self, read: list[frozenset[str]]) -> tuple[frozenset[str], ...]:
        """Gives what no stage reads to the first stage that reads something of the same module, or of one around it."""
        owned = [set(names) for names in read]
        for each in self.without.names.values():
            if any(each.name in names for names in read):
                continue
            module, place = each.name, 0
            while module:
                module = module.rpartition(".")[0]
                inside = [p for p, names in enumerate(read) if any(name.startswith(f"{module}.") for name in names)]
                if module and inside:
                    place = inside[0]
                    break
            owned[place].add(each.name)
        return tuple(map(frozenset, owned))

    def _refuse_split_state(self, line: Line) -> None:
        """Raises PipelineError for a buffer that the forward writes to on one rank and another one holds, too."""
        for node, each in line.whole.inputs.items():
            written = line.facts[node].storages & line.writers.keys()
            if each.kind == "buffer" and written and len(self.ranks_of(each.name)) > 1:
                raise PipelineError(
                    f"buffer {each.name!r} is written to in one stage and read in another: keep both in one by split_at"
                )

    def _refuse_ranks_without_parameters(self) -> None:
        """Raises PipelineError where a rank could not build an optimizer, for which the others would wait."""
        names = {each.name for each in self.without.names.values() if each.kind == "param"}
        for rank in range(self.pipeline.ranks):
            stages = self.pipeline.stages_of(rank)
            if self.pipeline.ranks > 1 and not any(names & self.owned[stage] for stage in stages):
                raise PipelineError(
                    f"rank {rank} of the pipeline would have no parameters in its stages {stages}, and no "
                    "optimizer can be built of none: take fewer stages, or split_at that gives each rank some"
                )

    @staticmethod
    def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: tuple[bool, ...]) -> Key:
        leaves, spec = tree_flatten((args, dict(kwargs)))
        known = [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), repr(x)) for x in leaves]
        return str(spec), tuple(known), modes, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
