"""Models that are sliced over tensor-parallel ranks train as one process does, with an mpu and as DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zerofx
from examples.megatron_mpu import Mpu, sliced
from tests.distributed.ranks import has, message, on_ranks, rows
from tests.pool import Pool
from tests.training import MakeOptimizer, State, adamw, compare, full, sgd

STEPS, WORLD = 3, 4
WIDTH, HIDDEN, LENGTH = 6, 10, 4
SLICED = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
Built = tuple[Any, Any]


class Net(nn.Module):
    """A norm and two linear layers beside a residual stream, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.norm = nn.Identity(), nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.up(self.norm(self.split(x))))))


class SplitSequence(torch.autograd.Function):
    """The part of the sequence that this rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class GatherSequence(torch.autograd.Function):
    """The whole sequence, of which each rank goes on with its slice of the layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return torch.cat(whole.chunk(group.size()), 1)


class OfSequence(nn.Module):
    """A layer of a sequence-parallel region, between the functions that lead in and out."""

    def __init__(self, norm: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.group = norm.weight, norm.bias, group
        self.weight.sequence_parallel = self.bias.sequence_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        part = F.layer_norm(SplitSequence.apply(x, self.group), (WIDTH,), self.weight, self.bias)
        return GatherSequence.apply(part, self.group)


class ColumnOnly(nn.Module):
    """A sliced layer behind GatherSequence, which adds up the gradients of the slices."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def of_mpu(sequence: bool = False) -> Built:
    mpu, model = Mpu(2), seeded()
    sliced(model, mpu)
    if sequence:
        model.norm, model.up = OfSequence(model.norm, mpu.model), ColumnOnly(model.up)
    return model, {"mpu": mpu}


def of_mpu_sequence() -> Built:
    return of_mpu(sequence=True)


def of_dtensors(sequence: bool = False, **sizes: int) -> Built:
    """Of the head's three rows tensor-parallel ranks hold unequal slices."""
    mesh, model = zerofx.Mesh(**sizes or {"dp": 2, "tp": 2}), seeded()
    head = ColwiseParallel(output_layouts=Replicate())
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": head}
    if sequence:
        layouts = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
        plan |= {"split": PrepareModuleInput(**layouts), "norm": SequenceParallel()}
        plan |= {"up": ColwiseParallel(input_layouts=Shard(1))}
    parallelize_module(model, mesh.device_mesh["tp"], plan)
    return model, {"mesh": mesh}


def of_dtensors_sequence() -> Built:
    """Beside a third axis, of one rank."""
    return of_dtensors(sequence=True, pp=1, dp=2, tp=2)


def of_dtensors_inferred() -> Built:
    """The tensor-parallel axis comes first, and nobody passes the mesh."""
    return of_dtensors(tp=2, dp=2)[0], {}


def place() -> tuple[int, int]:
    """The data-parallel and the tensor-parallel place of this rank, where the latter comes last."""
    return divmod(dist.get_rank(), 2)


def replica_of(build: Callable[[], Built]) -> int:
    return place()[1] if build is of_dtensors_inferred else place()[0]


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(4, LENGTH, WIDTH, generator=numbers), torch.randn(4, LENGTH, 3, generator=numbers)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def plain_step(model: nn.Module, optimizer: Any, step: int, clip: float | None) -> tuple[Tensor, Tensor, State]:
    optimizer.zero_grad()
    loss = loss_fn(model, *(torch.cat(parts) for parts in zip(batch(0, step), batch(1, step), strict=True)))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
    grads = {name: full(param.grad) for name, param in model.named_parameters()}
    optimizer.step()
    return loss.detach(), norm, grads


def near(model: nn.Module, values: dict[str, Any], expected: State, tolerance: float = 2e-6) -> None:
    """Compares whole tensors, or of an mpu's slices this rank's own."""
    assert values.keys() == expected.keys()
    worst = {}
    for name, value in values.items():
        want, mine = expected[name], full(value)
        if mine.shape != want.shape:
            want = want.chunk(2, SLICED[name])[place()[1]]
        worst[name] = (mine - want).abs().max().item()
    assert max(worst.values()) <= tolerance, worst


@contextmanager
def kept_gradients(model: nn.Module) -> Any:
    seen: list[dict[str, Tensor]] = []

    def keep() -> None:
        seen.append({name: param.grad for name, param in model.named_parameters()})
        nn.Module.zero_grad(model)

    with mock.patch.dict(model.__dict__, zero_grad=keep):
        yield seen


def compiled(build: Callable[[], Built], **options: Any) -> tuple[Any, nn.Module]:
    """The sliced model, whose data-parallel ranks begin with different values, and the whole one in one process."""
    model, how = build()
    plain = seeded()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(replica_of(build))
    return zerofx.compile(model, **{"backend": "interpreter", "persist_below": 0} | how | options), plain


def check(build: Callable[[], Built], stage: int, backend: str, cases: list[dict[str, Any]]) -> None:
    model, plain = compiled(build, stage=stage, backend=backend)
    near(model, model.state_dict(), plain.state_dict(), 0.0)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    whole = copy.deepcopy(plain.state_dict())
    for case in cases:
        model.load_state_dict(start)
        plain.load_state_dict(whole)
        given = dict(case)
        make: MakeOptimizer = given.pop("make")
        optimizer, expected = make(model.parameters()), make(plain.parameters())
        step = zerofx.train_step(model, loss_fn, optimizer, **given)
        with kept_gradients(model) as seen:
            for count in range(STEPS):
                result = step(*batch(replica_of(build), count))
                loss, norm, grads = plain_step(plain, expected, count, given.get("clip"))
                torch.testing.assert_close(result.loss, loss, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=0)
                if given.get("clip") is None:  # the fused kernel clips on its way
                    near(model, seen[-1], grads)
                near(model, model.state_dict(), plain.state_dict())


CASES = [
    *({"make": make, "clip": clip} for make, clip in product((sgd, adamw), (None, 0.1))),
    {"make": adamw, "clip": 0.1, "microbatches": 2, "accumulate": "defer", "loss_scale": 64.0},
    {"make": sgd, "microbatches": 2, "accumulate": "reduce"},
]
BUILDS = (of_mpu, of_mpu_sequence, of_dtensors, of_dtensors_sequence, of_dtensors_inferred)
QUICK = {(of_mpu, 0), (of_mpu_sequence, 2), (of_dtensors, 1), (of_dtensors_sequence, 3)}


@pytest.mark.parametrize(
    ("build", "stage"),
    [
        pytest.param(*each, id=f"{each[0].__name__}-{each[1]}", marks=() if each in QUICK else pytest.mark.full)
        for each in product(BUILDS, (0, 1, 2, 3))
    ],
)
def test_a_sliced_model_trains_as_one_process_does(
    pool: Callable[[int], Pool], build: Callable[[], Built], stage: int
) -> None:
    pool(WORLD).run(check, build, stage, "interpreter", CASES, timeout=300)


@pytest.mark.inductor
@pytest.mark.parametrize("build", [of_mpu, pytest.param(of_dtensors_sequence, marks=pytest.mark.full)])
def test_a_sliced_model_on_inductor_trains_as_one_process_does(
    pool: Callable[[int], Pool], build: Callable[[], Built]
) -> None:
    pool(WORLD).run(check, build, 3, "inductor", [CASES[3]], timeout=300)


@pytest.mark.parametrize("build", [of_mpu, of_dtensors])
@pytest.mark.parametrize("p", [2.0, 1.0, torch.inf])
@on_ranks(WORLD)
def test_clip_grad_norm_counts_each_element_once_in_a_loop(build: Callable[[], Built], p: float) -> None:
    model, plain = compiled(build)
    optimizer, expected = sgd(model.parameters()), sgd(plain.parameters())
    for count in range(STEPS):
        loss_fn(model, *batch(replica_of(build), count)).backward()
        (loss_fn(plain, *batch(0, count)) / 2 + loss_fn(plain, *batch(1, count)) / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
        given = model if count else list(model.parameters())
        torch.testing.assert_close(zerofx.clip_grad_norm_(given, 0.1, p), norm, rtol=1e-5, atol=0)
        near(
            model,
            {n: each.grad for n, each in model.named_parameters()},
            {n: q.grad for n, q in plain.named_parameters()},
        )
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    near(model, model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("build", [of_mpu, of_dtensors])
@on_ranks(WORLD)
def test_an_overflow_on_one_tensor_parallel_rank_skips_the_step_on_all(build: Callable[[], Built]) -> None:
    model, _ = compiled(build)
    name = "up.weight" if build is of_mpu else "norm.weight"  # sliced, or a copy on each of them

    def overflow(param: nn.Parameter) -> None:
        if dist.get_rank() == WORLD - 1:
            param.grad.to_local()[:1] = torch.inf

    step = zerofx.train_step(model, loss_fn, adamw(model.parameters()), loss_scale="dynamic", clip=1.0)
    handle = model.get_parameter(name).register_post_accumulate_grad_hook(overflow)
    before = {key: full(value) for key, value in model.state_dict().items()}
    assert step(*batch(replica_of(build), 0)).skipped
    assert not compare({key: full(value) for key, value in model.state_dict().items()}, before, 0.0)
    handle.remove()
    result = step(*batch(replica_of(build), 0))
    assert not result.skipped and result.grad_norm.isfinite()


@on_ranks(WORLD)
def test_pipeline_stages_have_one_norm_in_which_a_shared_parameter_counts_once() -> None:
    mesh = zerofx.Mesh(pp=2, dp=2)
    stage, replica = mesh.coordinates["pp"], mesh.coordinates["dp"]
    torch.manual_seed(stage)
    model, squares = nn.Linear(5, 5), torch.zeros(())
    plain = copy.deepcopy(model)
    model.weight.shared = stage == 1
    zerofx.compile(model, mesh=mesh, backend="eager", persist_below=0)
    model(rows(replica, 4, 5)).square().mean().backward()
    sum(plain(rows(each, 4, 5)).square().mean() / 2 for each in range(2)).backward()
    for param in [plain.bias] if stage == 1 else plain.parameters():
        squares += param.grad.square().sum()
    dist.all_reduce(squares, group=mesh.group("pp"))
    torch.testing.assert_close(zerofx.clip_grad_norm_(model, 1e-3), squares.sqrt())


@on_ranks(WORLD)
def test_attributes_of_parameters_survive() -> None:
    model, _ = compiled(of_mpu_sequence)
    for each in (model, model.double()):
        marked = {name for name, param in each.named_parameters() if getattr(param, "tensor_model_parallel", False)}
        assert marked == set(SLICED)
        assert each.get_parameter("norm.weight").sequence_parallel


@on_ranks(WORLD)
def test_dtensors_gain_the_data_parallel_placement_and_load_whole_or_sliced_values() -> None:
    model, plain = compiled(of_dtensors)
    found = {name: param.placements for name, param in model.named_parameters()}
    assert found["up.weight"] == (Shard(1), Shard(0)) and found["down.weight"] == (Shard(0), Shard(1))
    assert found["up.bias"] == (Replicate(), Shard(0)) and found["norm.weight"] == (Shard(0), Replicate())
    other, _ = of_dtensors()
    with torch.no_grad():
        for each in (plain, other):
            for param in each.parameters():
                param.mul_(2)
    for state in (plain.state_dict(), other.state_dict()):
        model.load_state_dict({name: torch.zeros(value.shape) for name, value in plain.state_dict().items()})
        model.load_state_dict(state)
        near(model, model.state_dict(), plain.state_dict(), 0.0)


@on_ranks(WORLD)
def test_a_dtensor_read_outside_of_the_forward_is_a_read_only_copy() -> None:
    model, plain = compiled(of_dtensors)
    read = model.up.weight
    assert read.placements == (Shard(0),) and torch.equal(full(read), plain.up.weight)
    writes: list[Callable[[], Any]] = [
        lambda: read.mul_(2),
        lambda: read.data.zero_(),
        lambda: read.t().zero_(),
        lambda: read.to_local().zero_(),
        lambda: nn.init.zeros_(read),
        lambda: torch.mul(read, 2, out=read),
    ]
    for write in writes:
        with torch.no_grad():
            has(message(write), ["a gathered copy of a sharded parameter", "zerofx.full_params"])
    (model.down.weight.square().sum() / 2).full_tensor().backward()
    near(model, {"down.weight": model.get_parameter("down.weight").grad}, {"down.weight": plain.down.weight})


@on_ranks(WORLD)
def test_inside_full_params_a_dtensor_is_as_it_was_before() -> None:
    model, plain = compiled(of_dtensors)
    with zerofx.full_params(model), torch.no_grad():
        assert model.up.weight.placements == (Shard(0),) and model.norm.weight.shape == plain.norm.weight.shape
        for param in model.parameters():
            param.mul_(3)
        x, y = batch(0, 0)
        inside = loss_fn(model, x, y)
        for param in plain.parameters():
            param.mul_(3)
        torch.testing.assert_close(inside, loss_fn(plain, x, y))
    near(model, model.state_dict(), plain.state_dict(), 1e-6)


@on_ranks(WORLD)
def test_meshes_tell_groups_and_coordinates() -> None:
    mpu = Mpu(2)
    replica, slice_ = place()
    for mesh in (zerofx.Mesh(mpu), zerofx.Mesh(dp=2, tp=2), zerofx.Mesh(zerofx.Mesh(dp=2, tp=2).device_mesh)):
        assert mesh.sizes == {"dp": 2, "tp": 2} and mesh.coordinates == {"dp": replica, "tp": slice_}
        assert dist.get_process_group_ranks(mesh.group("tp")) == [2 * replica, 2 * replica + 1]
    assert zerofx.Mesh(pp=2, tp=2).coordinates == {"dp": 0, "pp": replica, "tp": slice_}
    has(message(lambda: mesh.group("pp"), KeyError), ["'dp', 'tp'", "not 'pp'"])
