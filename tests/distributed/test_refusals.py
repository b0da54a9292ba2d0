"""What zerofx.compile cannot do right is refused in one sentence with the remedy, on every rank; nothing is changed."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module

from tests.distributed.ranks import Net, has, message, on_ranks, sharded
from tests.pool import Pool
from zerofx import agree
from zerofx.agree import RankMismatchError
from zerofx.config import ConfigError
from zerofx.facts import _versions
from zerofx.passes.delay_waits import DelayWaits
from zerofx.program import Program

Build = Callable[[], nn.Module]
Arguments = Callable[[int], dict[str, Any]]


class Refusal(NamedTuple):
    """A model, the arguments of each rank, and words of the error: on all ranks, or on rank 0 and rank 1."""

    name: str
    model: Build
    arguments: Arguments
    words: tuple[str, ...]
    rank1: tuple[str, ...] | None = None


def none(rank: int) -> dict[str, Any]:
    return {}


def always(**arguments: Any) -> Arguments:
    return lambda rank: arguments


def only_last(**arguments: Any) -> Arguments:
    return lambda rank: arguments if rank == 1 else {}


def with_parameter(make: Callable[[], torch.Tensor]) -> Build:
    def build() -> nn.Module:
        model = Net()
        model.extra = nn.Parameter(make())
        return model

    return build


def cached() -> nn.Module:
    model = Net()
    model.heads = {"all": [model.a.weight]}
    return model


def inside(make: Build) -> Build:
    return lambda: nn.Sequential(nn.Linear(7, 7), make())


def called(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=names)


def fsdp2() -> nn.Module:
    return fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))


def engine() -> nn.Module:
    """A module whose class is DeepSpeed's by name."""
    return type("DeepSpeedEngine", (Net,), {"__module__": "deepspeed.runtime.engine"})()


def only_last_mesh(*names: str) -> Arguments:
    """All ranks make the mesh, which is a collective, and only the last one uses it."""

    def arguments(rank: int) -> dict[str, Any]:
        made = mesh(*names)
        return {"mesh": made} if rank == 1 else {}

    return arguments


def distributed() -> nn.Module:
    return distribute_module(nn.Linear(7, 7), init_device_mesh("cpu", (2,)))


def without_release(order: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(step for step in order if step.name != "release-after-use")


def wider_on_last() -> nn.Module:
    return nn.Linear(7, 13 + dist.get_rank())


def net_or_list() -> Any:
    return [Net()] if dist.get_rank() == 1 else Net()


def deeper_on_last() -> nn.Module:
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(1 + dist.get_rank())))


def frozen_on_last() -> nn.Module:
    return Net().requires_grad_(dist.get_rank() == 0)


HSDP = "hybrid sharding (HSDP), which zerofx does not have: give zerofx.compile a mesh with one data-parallel dimension"
SPARSE = "sparse gradients, which cannot be reduced: make it with sparse=False"
REFUSALS = [
    Refusal("stage", Net, always(stage=4), ("stage=4", "one of 0, 1, 2, 3")),
    Refusal("stage_type", Net, always(stage="3"), ("stage='3'", "one of 0, 1, 2, 3")),
    Refusal("stage_bool", Net, always(stage=True), ("stage=True",)),
    Refusal("backend", Net, always(backend="aot"), ("backend='aot'", "'inductor', 'interpreter', 'eager'")),
    Refusal("persist_below", Net, always(persist_below=-1), ("persist_below=-1", "number of elements, 0 or more")),
    Refusal("persist_float", Net, always(persist_below=1e4), ("persist_below=10000.0",)),
    Refusal("dynamic", Net, always(dynamic="auto"), ("dynamic='auto'", "None, True or False")),
    Refusal("fullgraph", Net, always(fullgraph=None), ("fullgraph=None", "True or False")),
    Refusal("sync_init", Net, always(sync_init="yes"), ("sync_init='yes'", "True or False")),
    Refusal("precision", Net, always(precision="half"), ("precision='half'", "'fp32', 'bf16', 'fp16', or None")),
    Refusal("reduce_dtype", Net, always(reduce_dtype=8), ("reduce_dtype=8", "'fp32', 'bf16', 'fp16', or None")),
    Refusal("per_block", Net, always(per_block=2), ("per_block=2", "True or False")),
    Refusal("memory_blocks", Net, always(per_block=True, memory=0.5), ("memory=0.5", "left out with per_block=True")),
    Refusal("no_blocks", Net, always(per_block=True), ("ModelError", "no ModuleList", "leave per_block out")),
    Refusal("passes", Net, always(passes=[]), ("passes=[]", "a function from the default tuple of passes")),
    Refusal("order", Net, always(passes=lambda order: order[::-1]), ("PassOrderError", "insert one that does")),
    Refusal("ignored_name", Net, always(ignored_params=["a.weight"]), ("ignored_params", "takes parameters, not str")),
    Refusal("ignored_none", Net, always(ignored_params=None), ("ignored_params", "takes parameters, not NoneType")),
    Refusal("ignored_other", Net, always(ignored_params=Net().parameters()), ("is no parameter of the model: pass",)),
    Refusal("init_fn", Net, always(init_fn=3), ("init_fn=3", "a function of a module")),
    Refusal("progress", Net, always(progress="no"), ("progress='no'", "None, True or False")),
    Refusal("mesh_type", Net, always(mesh=2), ("takes a DeviceMesh or a zerofx.Mesh, not int",)),
    Refusal("mesh_axes", Net, lambda rank: {"mesh": mesh("x", "y")}, ("('x', 'y')", "name the data-parallel axis")),
    Refusal("mesh_last", Net, only_last(mesh=2), ("failed on rank 1", "a DeviceMesh"), ("ConfigError", "not int")),
    Refusal("axes_last", Net, only_last_mesh("x", "y"), ("failed on rank 1", "('x', 'y')"), ("ConfigError", "'dp'")),
    Refusal("hsdp", Net, lambda rank: {"mesh": mesh("dp_replicate", "dp_shard")}, ("'dp_replicate', 'dp_shard'", HSDP)),
    Refusal("hsdp_dp", Net, lambda rank: {"mesh": mesh("dp_replicate", "dp")}, ("'dp_replicate', 'dp'", HSDP)),
    Refusal("cp", Net, lambda rank: {"mesh": mesh("cp", "dp")}, ("'cp'", "context parallelism, which zerofx does not")),
    Refusal("ep", Net, lambda rank: {"mesh": mesh("ep", "dp")}, ("'ep'", "expert parallelism, which zerofx does not")),
    Refusal("stages", Net, always(stage={"a": 2, "b": 3}), ("stages per module", "one stage", "ignored_params")),
    Refusal("stage_function", Net, always(stage=lambda module: 3), ("given a function", "stages per module")),
    Refusal("reshard", Net, always(reshard_after_forward=False), ("ConfigError", "False is stage=2")),
    Refusal("offload", Net, always(offload_policy=None), ("offload_policy=...", "offload, which zerofx does not have")),
    Refusal("deepspeed", Net, always(config="ds.json"), ("DeepSpeed's configuration", "zerofx.from_deepspeed")),
    Refusal("unknown", Net, always(bucket_size=1), ("no argument 'bucket_size'", "the closest one is 'bucket_mb'")),
    Refusal("unknown_last", Net, only_last(stge=1), ("failed on rank 1", "'stge'"), ("ConfigError", "'stage'")),
    Refusal("module_last", net_or_list, none, ("failed on rank 1", "not list"), ("ModelError", "not list")),
    Refusal("no_module", lambda: Net().forward, none, ("takes a torch.nn.Module, not method",)),
    Refusal("list", lambda: [Net()], none, ("takes a torch.nn.Module, not list",)),
    Refusal("other_stage", Net, only_last(stage=0), ("ranks differ in stage", "rank 1 has 0", "the same arguments")),
    Refusal("other_passes", Net, only_last(passes=without_release), ("ranks differ in the passes",)),
    Refusal("other_shape", wider_on_last, none, ("ranks differ in parameter weight", "(13, 7)", "(14, 7)", "same")),
    Refusal("other_depth", deeper_on_last, none, ("ranks differ in parameter 1.weight", "of the group has None")),
    Refusal("other_frozen", frozen_on_last, none, ("ranks differ in parameter a.weight", "True", "False")),
    Refusal("bad_on_last", Net, only_last(stage=5), ("failed on rank 1", "stage=5"), ("ConfigError", "0, 1, 2, 3")),
    Refusal("bad_passes", Net, only_last(passes=lambda order: 1 / 0), ("failed on rank 1",), ("ZeroDivisionError",)),
    Refusal("twice", lambda: sharded(Net(), backend="eager"), none, ("already called on this model", "once")),
    Refusal("part_twice", inside(lambda: sharded(Net(), backend="eager")), none, ("called on its submodule '1'",)),
    Refusal("compiled", lambda: torch.compile(Net()), none, ("torch.compile was already applied", "the model itself")),
    Refusal("compiled_part", inside(lambda: torch.compile(Net())), none, ("submodule '1'", "pass the model itself")),
    Refusal("compile_method", lambda: called(Net()), none, ("torch.compile was already applied to this model",)),
    Refusal("ddp", lambda: nn.parallel.DistributedDataParallel(Net()), none, ("DistributedDataParallel", "itself")),
    Refusal("dp", inside(lambda: nn.DataParallel(Net())), none, ("submodule '1' is wrapped in DataParallel", "itself")),
    Refusal("fsdp2", fsdp2, none, ("wrapped in FSDPModule", "without fully_shard")),
    Refusal("engine", engine, none, ("wrapped in DeepSpeedEngine", "the place of deepspeed.initialize")),
    Refusal("script", lambda: torch.jit.trace(Net(), torch.ones(1, 7)), none, ("ScriptModule", "the Python module")),
    Refusal("sparse", inside(lambda: nn.Embedding(5, 7, sparse=True)), none, ("its submodule '1'", SPARSE)),
    Refusal("complex", with_parameter(lambda: torch.zeros(3, dtype=torch.cfloat)), none, ("'extra' is complex", "two")),
    Refusal("meta", with_parameter(lambda: torch.zeros(3, device="meta")), none, ("'extra' is on the meta", "init_fn")),
    Refusal("lazy", lambda: nn.LazyLinear(7), none, ("'weight' is not initialised yet", "run the lazy module once")),
    Refusal("dtensor", distributed, none, ("'weight' is a DTensor already", "before it is sharded")),
    Refusal("cached", cached, none, ("'a.weight' is also kept in the attribute 'heads'", "read it from its module")),
]  # fmt: skip


def errors() -> dict[str, str]:
    """What this rank is told; every rank goes through the refusals in step."""
    return {refusal.name: error(refusal) for refusal in REFUSALS}


def error(refusal: Refusal) -> str:
    model = refusal.model()
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [look(part) for part in parts]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        sharded(model, **refusal.arguments(dist.get_rank()))
    assert [look(part) for part in parts] == before
    return f"{caught.type.__name__}: {caught.value}"


def look(module: nn.Module) -> tuple[type, list[str], list[int]]:
    return type(module), list(module.__dict__), list(map(id, module._parameters.values()))


@functools.cache
def told(pool: Callable[[int], Pool]) -> list[dict[str, str]]:
    return pool(2).run(errors)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_every_rank_is_told_what_to_do(pool: Callable[[int], Pool], refusal: Refusal) -> None:
    first, last = (rank[refusal.name] for rank in told(pool))
    has(first, refusal.words)
    has(last, refusal.rank1 or refusal.words)
    assert "\n" not in first + last


@pytest.mark.parametrize("what", list(_versions()))
@on_ranks(2)
def test_every_rank_is_told_of_another_version(what: str) -> None:
    own, model = _versions(), Net()
    other = own | ({what: "0.1"} if dist.get_rank() == 1 else {})
    with mock.patch("zerofx.facts._versions", return_value=other), pytest.raises(RankMismatchError) as caught:
        sharded(model, backend="eager")
    has(str(caught.value), (f"ranks differ in {what}: rank 0 of the group has {own[what]!r}, rank 1 has '0.1'",))


@on_ranks(2)
def test_a_rank_without_a_usable_mesh_waits_only_a_while_for_the_others() -> None:
    agree.TELL_SECONDS = 1.0
    try:
        start = time.monotonic()
        if dist.get_rank() == 1:
            has(message(lambda: sharded(Net(), mesh=2), ConfigError), ["takes a DeviceMesh or a zerofx.Mesh, not int"])
            assert time.monotonic() - start >= 1
            for thread in threading.enumerate():
                if thread.name == "zerofx refusal":
                    thread.join()
        else:
            time.sleep(3)
            has(message(lambda: sharded(Net())), ["failed on rank 1", "takes a DeviceMesh", "not int"])
    finally:
        agree.TELL_SECONDS = 30.0


@on_ranks(2)
def test_a_refused_model_can_be_compiled_afterwards() -> None:
    model = Net()
    with pytest.raises(ValueError, match="stage"):
        sharded(model, stage=5)
    sharded(model, backend="eager")(torch.ones(2, 7)).sum().backward()
    assert isinstance(model.get_parameter("a.weight").grad, DTensor)


@dataclass(frozen=True)
class Failing(DelayWaits):
    def __call__(self, program: Program) -> None:
        raise KeyError("no such node")


@on_ranks(2)
def test_a_call_raises_what_a_pass_raises_and_says_which() -> None:
    model = sharded(Net(), passes=lambda order: (*order, Failing()))
    with pytest.raises(KeyError, match="no such node") as caught:
        model(torch.ones(2, 7))
    has("".join(caught.value.__notes__), ["in pass delay-waits (passes before it at this level: ", "point-to-point"])
    assert caught.value.__cause__ is None
