"""Makes a model's decision on memory at its first training graph, over all ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from zerofx import _torch, records
from zerofx.agree import RankMismatchError
from zerofx.allowance import allowed_bytes
from zerofx.backends import Joint, trace
from zerofx.config import Config
from zerofx.decide import Deciding, Decision, Exchange, Forecast, Settled
from zerofx.exchange import StoreExchange, alone
from zerofx.processes import connect, this_host
from zerofx.watch import WATCHES

_places = dict[tuple[str, int], "itertools.count[int]"]()


@dataclass(frozen=True)
class Graph:
    """The training graph that is decided on: how a decision cuts it, and what names it in the records."""

    gm: GraphModule
    inputs: Sequence[Any]
    cut: Callable[[Joint, Decision, int], Forecast]
    key: str


def settle(
    config: Config,
    model: nn.Module,
    graph: Graph,
    keepable: Iterable[str],
    group: str,
    world: int,
    waiting: int = 0,
) -> Settled:
    """Decides what `memory` and `recompute` ask for; `waiting` are the bytes of the whole gradients that wait.

    Raises MemoryLimitError where no decision fits, and RankMismatchError where a rank does not take part.
    """
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    allowed = None if config.memory is None else allowed_bytes(config.memory, device)
    if allowed is not None and _torch.is_broken_off(graph.gm):
        keepable = ()
        warnings.warn(
            "memory= bounds each compiled graph alone, and torch.compile leaves the graph within this model: what its "
            "graphs hold together is not bounded, and no parameter stays gathered; fullgraph=True names the code",
            stacklevel=2,
        )
    predict = Remembered(config.backend, graph, steady_bytes(model) + waiting)
    exchange = _exchange(group, world)
    found = Deciding(predict, exchange, allowed, keepable if config.memory is not None else ()).settle(
        config.recompute or 0.0
    )
    predict.save()
    return found


def steady_bytes(model: nn.Module) -> int:
    """What a rank stores: its parts of the parameters, and for those it trains gradients and AdamW's two moments."""
    parts = [
        (param.to_local() if isinstance(param, DTensor) else param, param.requires_grad) for param in model.parameters()
    ]
    return sum(part.nbytes * (4 if trained else 1) for part, trained in parts)


class Remembered:
    """Foresees what a rank needs with a decision; the graph is traced only for what no earlier run has foreseen."""

    def __init__(self, backend: str, graph: Graph, steady: int) -> None:
        self.backend, self.graph, self.steady = backend, graph, steady
        self.key = records.shapes_key(graph.key, graph.inputs, steady)
        self.told = records.forecasts(self.key) if backend == "inductor" else {}
        self.joint: Joint | None = None

    def __call__(self, decision: Decision) -> Forecast:
        name = repr(decision)
        if name not in self.told:
            self.joint = self.joint or trace(self.backend, self.graph.gm, self.graph.inputs)
            forecast = Forecast.nothing(self.steady)
            if self.joint is not None:
                forecast = self.graph.cut(self.joint, decision, self.steady)
            self.told[name] = forecast.written()
        return Forecast.read(self.told[name])

    def save(self) -> None:
        if self.backend == "inductor":
            records.save_forecasts(self.key, self.told)


def _exchange(group: str, world: int) -> Exchange:
    if world == 1:
        return alone
    watch = WATCHES.get(group)
    if watch is None:
        raise RankMismatchError(
            "ranks cannot agree on memory= and recompute=, because their process group is no longer watched: call "
            "zerofx.compile on a new copy of the model"
        )
    epoch = watch.offer.epoch
    place = next(_places.setdefault((group, epoch), itertools.count()))
    return StoreExchange(connect(watch.offer, this_host()), f"memory {epoch} {place}", watch.rank, watch.world)
