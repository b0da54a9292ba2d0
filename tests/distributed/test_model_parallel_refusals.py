"""A wrong mpu, mesh or slicing is one sentence on all four ranks, before anything trains."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerofx
from examples.megatron_mpu import Mpu, sliced
from tests.distributed.ranks import has
from tests.distributed.test_model_parallel import of_mpu, seeded
from tests.pool import Pool

Built = tuple[nn.Module, dict[str, Any]]


def functions(leave: str = "", **changed: Any) -> Any:
    """The six functions of a right mpu, as a module has them, but for one left out and others changed."""
    mpu = Mpu(2)
    own = {name: getattr(mpu, name) for name in dir(mpu) if name.startswith("get_")} | changed
    return SimpleNamespace(**{name: function for name, function in own.items() if name != leave})


def with_mpu(mpu: Any, **options: Any) -> Built:
    return sliced(seeded(), Mpu(2)), {"mpu": mpu, **options}


def without_function() -> Built:
    return with_mpu(functions("get_data_parallel_world_size"))


def without_function_on_one() -> Built:
    return with_mpu(functions("get_model_parallel_rank" if dist.get_rank() == 2 else ""))


def wrong_rank() -> Built:
    return with_mpu(functions(get_data_parallel_rank=lambda: 0))


def wrong_size() -> Built:
    return with_mpu(functions(get_model_parallel_world_size=lambda: 4))


def raising() -> Built:
    return with_mpu(functions(get_tensor_model_parallel_group=lambda: 1 / 0))


def no_group() -> Built:
    return with_mpu(functions(get_data_parallel_group=lambda: None))


def groups_of_one_kind() -> Built:
    mpu = Mpu(2)
    data = {name.replace("model", "data"): getattr(mpu, name) for name in dir(mpu) if name.startswith("get_model")}
    return with_mpu(functions(**data))


def mpu_on_one() -> Built:
    model, how = with_mpu(functions())
    return model, how if dist.get_rank() else {}


def both() -> Built:
    return with_mpu(functions(), mesh=zerofx.Mesh(dp=2, tp=2))


def other_stage() -> Built:
    return with_mpu(Mpu(2), stage=2 if dist.get_rank() == 1 else 3)


def wrong_stage() -> Built:
    return with_mpu(Mpu(2), stage=7 if dist.get_rank() == 3 else 3)


def unmarked() -> Built:
    model, how = of_mpu()
    del model.down.weight.tensor_model_parallel
    return model, how


def marked_on_one() -> Built:
    model, how = of_mpu()
    model.norm.weight.tensor_model_parallel = dist.get_rank() % 2 == 1
    return model, how


def other_copies() -> Built:
    model, how = of_mpu()
    with torch.no_grad():
        model.norm.weight.add_(dist.get_rank() % 2)
    return model, how


def sizes() -> Built:
    return seeded(), {"mesh": zerofx.Mesh(dp=3, tp=2)}


def sizes_of_one() -> Built:
    return seeded(), {"mesh": zerofx.Mesh(dp=4) if dist.get_rank() else zerofx.Mesh(dp=2, tp=2)}


def axes() -> Built:
    return seeded(), {"mesh": init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))}


def parallelised(mesh: Any) -> nn.Module:
    return parallelize_module(seeded(), mesh, {"up": ColwiseParallel()})


def without_parent() -> Built:
    return parallelised(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))), {}


def along_dp() -> Built:
    mesh = zerofx.Mesh(dp=2, tp=2)
    return parallelised(mesh.device_mesh["dp"]), {"mesh": mesh}


def marked_without_mpu() -> Built:
    return sliced(seeded(), Mpu(2)), {}


def dtensors_with_mpu() -> Built:
    return parallelised(zerofx.Mesh(dp=2, tp=2).device_mesh["tp"]), {"mpu": Mpu(2)}


class Refusal(NamedTuple):
    """What all ranks are given, and what each of them says."""

    build: Callable[[], Built]
    words: tuple[str, ...]


REFUSALS = [
    Refusal(without_function, ("has no function get_data_parallel_world_size(): give it one",)),
    Refusal(without_function_on_one, ("has no function get_model_parallel_rank(): give it one",)),
    Refusal(wrong_rank, ("mpu.get_data_parallel_rank() returned 0 on rank", "but mpu.get_data_parallel_group() is")),
    Refusal(wrong_size, ("mpu.get_model_parallel_world_size() returned 4 on rank", "where it is 2")),
    Refusal(raising, ("mpu.get_tensor_model_parallel_group() raised ZeroDivisionError",)),
    Refusal(no_group, ("mpu.get_data_parallel_group() returned NoneType on rank", "not a ProcessGroup")),
    Refusal(groups_of_one_kind, ("mpu.get_model_parallel_group() holds ranks 0 and 1", "in mpu.get_data")),
    Refusal(mpu_on_one, ("ranks differ in",)),
    Refusal(both, ("zerofx.compile(mesh=..., mpu=...)", "pass one")),
    Refusal(other_stage, ("ranks differ in stage",)),
    Refusal(wrong_stage, ("zerofx.compile(stage=7)",)),
    Refusal(unmarked, ("parameter 'down.weight' has other values on", "tensor_model_parallel = True")),
    Refusal(marked_on_one, ("ranks differ in parameter norm.weight", "sliced")),
    Refusal(other_copies, ("parameter 'norm.weight' has other values", "the same seed")),
    Refusal(marked_without_mpu, ("parameter 'up.weight' is marked as a slice", "pass mpu=...")),
    Refusal(sizes, ("zerofx.Mesh(dp=3, tp=2) is not possible", "multiply to 6, and there are 4 ranks: start 6")),
    Refusal(sizes_of_one, ("ranks differ in the sizes of the mesh",)),
    Refusal(axes, ("none is named 'dp'", "init_device_mesh('cpu', (1, 4), mesh_dim_names=('dp', ...))")),
    Refusal(without_parent, ("parameter 'up.weight' is a DTensor already", "pass mesh=, the DeviceMesh of both")),
    Refusal(along_dp, ("parameter 'up.weight' is a DTensor already", "no axis beside 'dp'")),
    Refusal(dtensors_with_mpu, ("parameter 'up.weight' is a DTensor already", "pass mesh=")),
]  # fmt: skip


def refused(refusal: Refusal) -> str:
    try:
        model, how = refusal.build()
        zerofx.compile(model, **{"backend": "eager", "persist_below": 0} | how)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def refuse_all(refusals: list[Refusal]) -> list[str]:
    return [refused(refusal) for refusal in refusals]


def test_all_ranks_say_what_is_wrong(pool: Callable[[int], Pool]) -> None:
    for said in pool(4).run(refuse_all, REFUSALS, timeout=200):
        for refusal, text in zip(REFUSALS, said, strict=True):
            has(text, refusal.words)
            assert "\n" not in text


@pytest.mark.parametrize("given", ["plain", "mixed"])
def test_clipping_takes_one_compiled_model_only(given: str) -> None:
    model, plain = zerofx.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2)
    params = list(plain.parameters()) if given == "plain" else [*model.parameters(), *plain.parameters()]
    with pytest.raises(ValueError, match=r"zerofx\.clip_grad_norm_ was given . parameter\(s\), not all of one model"):
        zerofx.clip_grad_norm_(params, 1.0)
    with pytest.raises(ValueError, match=r"a p above 0, or inf"):
        zerofx.clip_grad_norm_(model, 1.0, norm_type=0)
