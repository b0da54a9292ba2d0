"""`train_step` trains as plain PyTorch does in one process on the global batch, whatever it splits and clips."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim

import zerofx
from tests.distributed.ranks import Net, both, gradients, same, sharded, whole
from tests.pool import Pool
from tests.training import MakeOptimizer, State, adamw, compare, sgd
from zerofx.engine import Engine

STEPS = 3
ROWS = 5  # on rank 0; the others have as many
PADDING = -100


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 7, generator=numbers), torch.randn(ROWS, 7, generator=numbers)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def labelled(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Classes, of which ranks and rows have padded away different numbers."""
    x, y = batch(rank, step)
    classes = y.argmax(1)
    classes[: (rank + step) % 3 + 1] = PADDING
    return x, classes


def summed_loss(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(x), classes, ignore_index=PADDING, reduction="sum")


def tokens(x: Tensor, classes: Tensor) -> Tensor:
    return (classes != PADDING).sum()


@contextmanager
def kept_gradients(model: nn.Module) -> Iterator[list[State]]:
    """The gradients that the optimizer stepped on, each time before they are freed."""
    seen: list[State] = []

    def keep() -> None:
        seen.append(gradients(model))
        nn.Module.zero_grad(model)

    with mock.patch.dict(model.__dict__, zero_grad=keep):
        yield seen


def near(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    worst = {name: (state[name] - value).abs().max().item() for name, value in expected.items() if value.numel()}
    assert max(worst.values()) <= 1e-6, worst


def plain_step(model: nn.Module, optimizer: optim.Optimizer, step: int, clip: float | None, weighted: bool) -> Any:
    """A step in one process on the batches of all ranks; returns its loss, norm and gradients."""
    world = dist.get_world_size()
    optimizer.zero_grad()
    if weighted:
        batches = [labelled(rank, step) for rank in range(world)]
        loss = sum(summed_loss(model, *each) for each in batches) / sum(tokens(*each) for each in batches)
    else:
        loss = sum(mean_loss(model, *batch(rank, step)) for rank in range(world)) / world
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
    optimizer.step()
    return loss.detach(), norm, gradients(model)


def check_steps(
    model: Any, plain: nn.Module, make: MakeOptimizer, weighted: bool = False, clip: float | None = None, **given: Any
) -> None:
    """Trains both a few steps from the same start, and compares all that a step gives."""
    optimizer, expected = make(model.parameters()), make(plain.parameters())
    loss_fn = summed_loss if weighted else mean_loss
    weight = tokens if weighted else None
    step = zerofx.train_step(model, loss_fn, optimizer, clip=clip, loss_weight=weight, **given)
    with kept_gradients(model) as seen:
        for place in range(STEPS):
            result = step(*(labelled if weighted else batch)(dist.get_rank(), place))
            loss, norm, grads = plain_step(plain, expected, place, clip, weighted)
            assert torch.allclose(result.loss, loss, rtol=1e-6, atol=1e-6)
            assert torch.allclose(result.grad_norm, norm, rtol=1e-5)
            assert not result.skipped
            near(seen[-1], grads)
            near(whole(model), whole(plain))
    assert all(param.grad is None for param in model.parameters())


def check_all(stage: int, backend: str, cases: Sequence[dict[str, Any]]) -> None:
    model, plain = both(Net, stage=stage, persist_below=30, backend=backend)
    start = copy.deepcopy(whole(model))
    for case in cases:
        model.load_state_dict(start)
        plain.load_state_dict(start)
        check_steps(model, plain, **case)


CASES = [
    *({"make": make, "clip": clip, "microbatches": k}
      for make, clip, k in product((sgd, adamw), (None, 0.1), (1, 3, 4))),
    {"make": adamw, "clip": 0.1, "microbatches": 3, "loss_scale": 1024.0},
    *({"make": make, "weighted": True, "clip": 0.1, "microbatches": k} for make, k in product((sgd, adamw), (1, 3))),
    {"make": sgd, "weighted": True, "microbatches": 4, "loss_scale": "dynamic"},
    {"make": sgd, "microbatches": 3, "accumulate": "reduce"},
    {"make": sgd, "microbatches": 3, "accumulate": "defer"},
]  # fmt: skip


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_a_step_is_that_of_one_process(pool: Callable[[int], Pool], world: int, stage: int) -> None:
    pool(world).run(check_all, stage, "interpreter", CASES, timeout=300)


@pytest.mark.inductor
def test_a_step_on_inductor_is_that_of_one_process(pool: Callable[[int], Pool]) -> None:
    pool(2).run(check_all, 3, "inductor", [CASES[10], CASES[-4]], timeout=300)


class Twice(optim.SGD):
    """An optimizer of the user's."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


OTHERS: list[MakeOptimizer] = [
    lambda params: optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    lambda params: optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True),
    lambda params: optim.Adam(params, lr=1e-2, eps=1e-3, fused=True, amsgrad=True),
    lambda params: optim.AdamW(params, lr=torch.tensor(1e-2), eps=1e-3),
    lambda params: optim.RMSprop(params, lr=1e-3, eps=1e-3),
    lambda params: Twice(params, lr=0.05),
    lambda params: optim.Adam([{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(params)], eps=1e-3),
]


def check_others() -> None:
    cases = [{"make": make, "clip": 0.1, "microbatches": 2, "loss_scale": "dynamic"} for make in OTHERS]
    check_all(3, "interpreter", cases)


def test_other_optimizers_step_as_in_one_process(pool: Callable[[int], Pool]) -> None:
    pool(2).run(check_others, timeout=300)


def check_states() -> None:
    model, plain = both(Net)
    optimizer, expected = adamw(model.parameters()), adamw(plain.parameters())
    step = zerofx.train_step(model, mean_loss, optimizer)
    for place in range(STEPS):
        step(*batch(dist.get_rank(), place))
        plain_step(plain, expected, place, None, False)
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for key, state in theirs["state"].items():
        assert ours["state"][key]["step"] == state["step"] == STEPS
        near({name: ours["state"][key][name].full_tensor() for name in ("exp_avg", "exp_avg_sq")}, state_of(state))


def state_of(state: dict[str, Tensor]) -> State:
    return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


def test_states_and_options_stay_those_of_the_users_optimizer(pool: Callable[[int], Pool]) -> None:
    pool(2).run(check_states)


def check_compilations(microbatches: int) -> tuple[list[int], list[int]]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = sharded(Net())
    optimizer = adamw(model.parameters())
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = zerofx.train_step(model, mean_loss, optimizer, microbatches=microbatches, clip=0.1, scheduler=scheduler)
    graphs, frames, rates = [], [], []
    for place in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        step(*batch(dist.get_rank(), place))
        graphs.append(len(zerofx.inspect(model).graphs))
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert rates == [0.01 * 0.5**place for place in range(5)]
    return graphs, frames


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_nothing_is_compiled_after_the_second_step(pool: Callable[[int], Pool], microbatches: int) -> None:
    for graphs, frames in pool(2).run(check_compilations, microbatches):
        assert graphs[-1] <= 3
        assert graphs[1:] == [graphs[1]] * 4 and frames[1:] == [frames[1]] * 4


def micro(rank: int) -> Iterator[Any]:
    x, y = batch(rank, 0)
    yield x[:3], y[:3]
    yield {"x": x[3:], "y": y[3:]}


def check_calls() -> None:
    for call in (lambda x, y: ((), {"x": x, "y": y}), lambda x, y: (({"x": x, "y": y},), {}), lambda *_: None):
        model, plain = both(Net)
        step = zerofx.train_step(model, mean_loss, sgd(model.parameters()), microbatches=2)
        args, kwargs = call(*batch(dist.get_rank(), 0)) or ((micro(dist.get_rank()),), {})
        step(*args, **kwargs)
        plain_step(plain, sgd(plain.parameters()), 0, None, False)
        near(whole(model), whole(plain))


def test_batches_come_by_name_as_a_mapping_or_from_an_iterator(pool: Callable[[int], Pool]) -> None:
    pool(2).run(check_calls)


def check_hooks() -> None:
    model, plain = both(Net)
    optimizer, seen, after = sgd(model.parameters()), [], []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(model)))
    optimizer.register_step_post_hook(lambda *_: after.append(1))
    step = zerofx.train_step(model, mean_loss, optimizer, clip=0.01, loss_scale=zerofx.DynamicLossScale(64.0))
    step(*batch(dist.get_rank(), 0))
    near(seen[0], plain_step(plain, sgd(plain.parameters()), 0, 0.01, False)[2])
    assert step(torch.full((2, 7), torch.inf), torch.zeros(2, 7)).skipped
    assert len(seen) == len(after) == 1


def test_hooks_see_clipped_gradients_and_no_skipped_step(pool: Callable[[int], Pool]) -> None:
    pool(2).run(check_hooks)


class Varied(nn.Module):
    """A tied, a frozen, a replicated, an unused and an unevenly cut parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 7), nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.layer, self.unused = nn.Linear(7, 7), nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.scale * torch.tanh(self.layer(self.embed(ids) * self.frozen)))


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), ids)


def check_norms(stage: int, persist_below: int) -> None:
    model, plain = both(Varied, stage=stage, persist_below=persist_below)
    batches = [torch.randint(0, 13, (6,), generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    mine = batches[dist.get_rank()]
    (sum(token_loss(plain, each) for each in batches) / 2).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    token_loss(model, mine).backward()
    assert torch.allclose(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor(), norm, rtol=1e-6)
    same(gradients(model), gradients(plain))
    model.zero_grad()
    with kept_gradients(model) as seen:
        result = zerofx.train_step(model, token_loss, sgd(model.parameters()), clip=0.5)(mine)
    assert torch.allclose(result.grad_norm, norm, rtol=1e-6)
    same(seen[0], gradients(plain))


@pytest.mark.parametrize("persist_below", [0, 10, 10_000])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_norms_are_those_of_one_process(pool: Callable[[int], Pool], stage: int, persist_below: int) -> None:
    pool(2).run(check_norms, stage, persist_below)


def check_ignored() -> None:
    """A parameter that is left alone is one of its own on each rank; the norm is that of all of them."""
    torch.manual_seed(0)
    model = Net()
    zerofx.compile(model, backend="interpreter", persist_below=0, ignored_params=[model.a.bias])
    with kept_gradients(model) as seen:
        result = zerofx.train_step(model, mean_loss, sgd(model.parameters()))(*batch(dist.get_rank(), 0))
    own = seen[0].pop("a.bias").square().sum()
    dist.all_reduce(own)
    expected = (own + sum(grad.square().sum() for grad in seen[0].values())).sqrt()
    assert torch.allclose(result.grad_norm, expected, rtol=1e-6)


def test_ignored_parameters_count_on_each_rank(pool: Callable[[int], Pool]) -> None:
    pool(2).run(check_ignored)


def test_micro_batches_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[bool, bool, bool]] = []

    @contextmanager
    def micro_batch(_: Engine, first: bool, last: bool, defer: bool, updates: object) -> Iterator[None]:
        told.append((first, last, defer))
        yield

    monkeypatch.setattr(Engine, "micro_batch", micro_batch)
    for accumulate, stage, defer in (("auto", 1, True), ("auto", 3, False), ("defer", 3, True), ("reduce", 0, False)):
        model = zerofx.compile(Net(), backend="eager", stage=stage)
        step = zerofx.train_step(model, mean_loss, sgd(model.parameters()), microbatches=3, accumulate=accumulate)
        told.clear()
        step(*batch(0, 0))
        assert told == [(True, False, defer), (False, False, defer), (False, True, defer)]


def check_no_waiting(loss_scale: Any) -> None:
    model = sharded(Net())
    step = zerofx.train_step(model, mean_loss, adamw(model.parameters()), clip=1.0, loss_scale=loss_scale)
    step(*batch(dist.get_rank(), 0))

    def waits(*_: Any) -> Any:
        raise AssertionError("the host waits for a tensor")

    names = ("item", "__bool__", "__float__", "__int__", "tolist")
    read_on_cpus = mock.patch.object(zerofx.scaling.LossScale, "_refuse_stuck")
    with mock.patch.multiple(Tensor, **dict.fromkeys(names, waits)), read_on_cpus:
        step(*batch(dist.get_rank(), 1))


@pytest.mark.parametrize("loss_scale", [None, 8.0, "dynamic"])
def test_no_tensor_of_a_step_is_waited_for(pool: Callable[[int], Pool], loss_scale: Any) -> None:
    pool(2).run(check_no_waiting, loss_scale)


def check_evaluation() -> None:
    model, plain = both(lambda: nn.Sequential(Net(), nn.Dropout(0.5)))
    plain.eval()
    model[0].eval()
    world = dist.get_world_size()
    loss = zerofx.eval_step(model, mean_loss, microbatches=2)(*batch(dist.get_rank(), 0))
    expected = sum(mean_loss(plain, *batch(rank, 0)) for rank in range(world)) / world
    assert torch.allclose(loss, expected.detach(), rtol=1e-6) and not loss.requires_grad
    weighted = zerofx.eval_step(model, summed_loss, microbatches=3, loss_weight=tokens)
    batches = [labelled(rank, 1) for rank in range(world)]
    expected = sum(summed_loss(plain, *each) for each in batches) / sum(tokens(*each) for each in batches)
    assert torch.allclose(weighted(*batches[dist.get_rank()]), expected.detach(), rtol=1e-6)
    assert [module.training for module in (model, model[0], model[0].a, model[1])] == [True, False, False, True]
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_gives_the_global_loss_and_leaves_modes_alone(pool: Callable[[int], Pool], world: int) -> None:
    pool(world).run(check_evaluation)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda value: value.clone(),
    "transposed": lambda value: value.t().contiguous().t(),
    "with gaps": lambda value: F.pad(value, (0, 2))[:, :-2],
}


@pytest.mark.parametrize("grad", LAYOUTS)
@pytest.mark.parametrize("param", LAYOUTS)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_layouts_in_memory_do_not_matter(make: MakeOptimizer, param: str, grad: str) -> None:
    """Fused kernels on CPUs go through memory in its order, whatever the strides are."""
    model, plain = nn.Linear(5, 6, bias=False), nn.Linear(5, 6, bias=False)
    plain.load_state_dict(model.state_dict())
    model.weight = nn.Parameter(LAYOUTS[param](model.weight.detach()))
    zerofx.compile(model, backend="eager")
    step = zerofx.train_step(model, lambda model: model(torch.ones(1, 5)).sum(), make(model.parameters()))
    expected = make(plain.parameters())
    for place in range(3):
        value = torch.randn(6, 5, generator=torch.Generator().manual_seed(place))
        handle = model.weight.register_post_accumulate_grad_hook(
            lambda weight, value=value: setattr(weight, "grad", LAYOUTS[grad](value))
        )
        step()
        handle.remove()
        plain.weight.grad = value
        expected.step()
    near(model.state_dict(), plain.state_dict())


def test_parameters_of_several_dtypes_have_one_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 5).bfloat16())
    zerofx.compile(model, backend="eager")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return sum(layer(x.to(layer.weight.dtype)).square().mean().double() for layer in model)

    grads = torch.autograd.grad(loss(model, batch(0, 0)[0][:, :5]), list(model.parameters()))
    result = zerofx.train_step(model, loss, sgd(model.parameters()), loss_scale=8.0)(batch(0, 0)[0][:, :5])
    expected = sum(grad.double().square().sum() for grad in grads).sqrt()
    assert torch.allclose(result.grad_norm.double(), expected, rtol=1e-3) and not result.skipped


def test_without_a_group_a_step_is_plain_torchs() -> None:
    torch.manual_seed(0)
    model, plain = zerofx.compile(Net(), backend="interpreter"), Net()
    plain.load_state_dict(model.state_dict())
    optimizer, expected = adamw(model.parameters()), adamw(plain.parameters())
    step = zerofx.train_step(model, mean_loss, optimizer, microbatches=2, clip=0.1, loss_scale="dynamic")
    for place in range(STEPS):
        result = step(*batch(0, place))
        expected.zero_grad()
        mean_loss(plain, *batch(0, place)).backward()
        assert torch.allclose(result.grad_norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-6)
        expected.step()
    assert not compare(model.state_dict(), plain.state_dict(), rtol=1e-6)
