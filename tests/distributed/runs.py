"""Trains a test model on every rank of a pool; each run is made once and shared by the tests that look at it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.fx import Interpreter, Node

import zerofx
from tests.models import Case, gpt, gpt2
from tests.pool import Pool
from tests.training import MakeOptimizer, Trained, adamw, adamw_default, sgd, train
from zerofx.inspection import Collectives

STEPS = 5
NONE, SOME, DEFAULT = 0, 1_000, 10_000  # values of persist_below
Builder = Callable[[], Case]
Tensors = torch.Tensor | Sequence[torch.Tensor]


class Setting(NamedTuple):
    """One compile of a model and the optimizers to train it with, each from the same start."""

    builder: Builder
    world: int
    stage: int
    persist_below: int
    makers: tuple[MakeOptimizer, ...]
    backend: str = "interpreter"


def interpreted(builder: Builder, world: int, stage: int, persist_below: int) -> Setting:
    """The setting that all tests of interpreted graphs share, with the optimizers whose results can be compared.

    Three ranks add in another order than one process does, and default AdamW makes the rounding of gradients that are
    zero in theory (those of attention's key biases) into updates of full size.
    """
    reordered = world > 2 and builder in (gpt, gpt2)
    makers = (sgd, adamw) if reordered else (sgd, adamw, adamw_default)
    return Setting(builder, world, stage, persist_below, makers)


class Run(NamedTuple):
    """What one rank has after training.

    Results by optimizer; what its graphs say of collectives; the bytes that it really sent in a step; and each
    parameter's whole shape, with the dim that it is cut on.
    """

    trained: dict[str, Trained]
    collectives: Collectives
    bytes_of_a_step: int
    stored: dict[str, tuple[tuple[int, ...], int | None]]


class Spy(Interpreter):
    """Tells its listeners of every node that carries a tag: the node, its first input and its result."""

    listeners: tuple[Callable[[Node, Tensors, Tensors], None], ...] = ()

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node.op == "call_function" and "zerofx" in node.meta:
            inputs, _ = self.fetch_args_kwargs_from_env(node)
            for listener in self.listeners:
                listener(node, inputs[0], result)
        return result


class ByteCounter:
    """Adds up what this rank sends in collectives, by the usual ring algorithms."""

    def __init__(self, world: int) -> None:
        self.world, self.bytes = world, 0

    def __call__(self, node: Node, given: Tensors, result: Tensors) -> None:
        others = self.world - 1
        each = {
            "all_gather_into_tensor": [t.nbytes * others for t in members(given)],
            "all_gather_p2p": [t.nbytes * others for t in members(given)],
            "reduce_scatter_tensor": [t.nbytes * others for t in members(result)],
            "reduce_scatter_p2p": [t.nbytes * others for t in members(result)],
            "all_reduce": [2 * t.nbytes * others // self.world for t in members(given)],
        }
        namespace, _, op = str(node.target).partition(".")
        if namespace in ("_c10d_functional", "zerofx"):
            self.bytes += sum(each.get(op.removesuffix(".default").removesuffix("_coalesced"), []))


def members(tensors: Tensors) -> Sequence[torch.Tensor]:
    """The tensors of a bucket, or the one that travels alone."""
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


def spied() -> Any:
    """While it is entered, models compile into graphs that tell `Spy.listeners` what they run."""
    return mock.patch("zerofx.backends.Interpreter", Spy)


def train_rank(setting: Setting) -> Run:
    """Trains with each optimizer in turn on one compiled model."""
    case = setting.builder()
    start = {name: value.clone() for name, value in case.model.state_dict().items()}
    trained: dict[str, Trained] = {}
    counter = ByteCounter(setting.world)
    with spied(), mock.patch.object(Spy, "listeners", (counter,)):
        zerofx.compile(case.model, stage=setting.stage, persist_below=setting.persist_below, backend=setting.backend)
        for make in setting.makers:
            case.model.load_state_dict(start)
            counter.bytes = 0
            trained[make.__name__] = train(case, make, STEPS, dist.get_rank())
    collectives = zerofx.inspect(case.model).collectives()
    return Run(trained, collectives, counter.bytes // STEPS, stored(case.model))


def stored(model: nn.Module) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Each parameter's whole shape, and the dim that it is cut on."""
    placed = ((name, param, param.placements[0]) for name, param in model.named_parameters())
    return {name: (tuple(param.shape), getattr(how, "dim", None)) for name, param, how in placed}


def train_rank_ddp(builder: Builder, makers: tuple[MakeOptimizer, ...]) -> dict[str, Trained]:
    """The same with torch's DistributedDataParallel, eager."""
    trained: dict[str, Trained] = {}
    for make in makers:
        case = builder()
        model = nn.parallel.DistributedDataParallel(case.model, broadcast_buffers=False)
        result = train(Case(model, case.batch, case.loss), make, STEPS, dist.get_rank())
        named = [{key.removeprefix("module."): value for key, value in part.items()} for part in result[:2]]
        trained[make.__name__] = Trained(*named, result.losses)
    return trained


@functools.cache
def run(pool: Callable[[int], Pool], setting: Setting) -> list[Run]:
    """Every rank's run."""
    return pool(setting.world).run(train_rank, setting, timeout=500)


@functools.cache
def run_ddp(
    pool: Callable[[int], Pool], builder: Builder, makers: tuple[MakeOptimizer, ...]
) -> list[dict[str, Trained]]:
    return pool(2).run(train_rank_ddp, builder, makers)
