"""Models compiled block by block train as whole ones, with as many graphs however many blocks there are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.architectures import ARCHITECTURES
from tests.distributed.ranks import backward, both, on_ranks, rows, same, sharded, whole
from tests.models import GPT, Case, gpt
from tests.pool import Pool
from tests.training import MakeOptimizer, Trained, adamw, compare, reference, sgd, train
from zerofx.blocks import pieces

STEPS = 3
BUILDERS: dict[str, Callable[[], Case]] = {"gpt": gpt, **ARCHITECTURES}
QUICK = {"gpt": (0, 1, 2, 3), "llama": (3,), "resnet": (2,)}


def train_rank(name: str, stage: int, backend: str) -> dict[str, Trained]:
    case = BUILDERS[name]()
    start = {name: value.clone() for name, value in case.model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # embeddings and heads that are read around the blocks
        zerofx.compile(case.model, stage=stage, persist_below=0, backend=backend, per_block=True)
        trained: dict[str, Trained] = {}
        for make in (sgd, adamw):
            case.model.load_state_dict(start)
            trained[make.__name__] = train(case, make, STEPS, dist.get_rank())
    return trained


def check(pool: Pool, name: str, stage: int, backend: str, wrap: Any = None) -> None:
    ranks = pool.run(train_rank, name, stage, backend, timeout=500)
    makers: tuple[MakeOptimizer, ...] = (sgd, adamw)
    for make in makers:
        expected = reference(BUILDERS[name], make, STEPS, pool.world, *([wrap] if wrap else []))
        got = ranks[0][make.__name__]
        worst = compare(got.state, expected.state, rtol=1e-5)
        assert not worst, (make.__name__, worst)
        assert got.grads.keys() == expected.grads.keys()


@pytest.mark.parametrize(
    ("name", "stage", "world"),
    [
        pytest.param(
            name, stage, world, marks=[] if world == 2 and stage in QUICK.get(name, ()) else [pytest.mark.full]
        )
        for name in BUILDERS
        for stage in ((0, 1, 2, 3) if name == "gpt" else (2, 3))
        for world in (2, 3)
    ],
)
def test_models_train_as_in_one_process(pool: Callable[[int], Pool], name: str, stage: int, world: int) -> None:
    check(pool(world), name, stage, "interpreter")


@pytest.mark.inductor
def test_blocks_train_on_inductor(pool: Callable[[int], Pool]) -> None:
    check(pool(2), "gpt", 3, "inductor")


def compiled(layers: int, **options: Any) -> Any:
    """A GPT that has run forward and backward, compiled by blocks unless told."""
    torch.manual_seed(0)
    model = sharded(GPT(layers), **{"per_block": True} | options)
    model(torch.arange(8).view(1, 8)).square().mean().backward()
    return model


@on_ranks(2)
def test_as_many_graphs_however_many_blocks() -> None:
    counts = [len(zerofx.inspect(compiled(layers)).graphs) for layers in (2, 5)]
    assert counts == [5, 5]  # two embeddings, the block, the norm, the head


@on_ranks(2)
def test_each_block_is_counted_where_it_runs_a_shared_graph() -> None:
    per_block, at_once = (zerofx.inspect(compiled(3, per_block=by)).collectives() for by in (True, False))
    assert per_block.bound == at_once.bound
    assert per_block.bytes_sent == pytest.approx(at_once.bytes_sent, rel=0.01)
    gathered = {param for row in per_block.rows if row.role == "unshard" for param in row.params}
    assert gathered == {param for row in at_once.rows if row.role == "unshard" for param in row.params}


@on_ranks(2)
def test_gradients_equal_those_of_the_whole_graph() -> None:
    per_block, at_once = compiled(3), compiled(3, per_block=False)
    for (name, a), b in zip(per_block.named_parameters(), at_once.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local()), name


class Stack(nn.Module):
    """Three blocks, one of them frozen, in a container in a container, and a scale that the model reads itself."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.GELU()) for _ in range(3))}
        )
        self.body["layers"][1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(7))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body["layers"]:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x * self.scale


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_what_is_around_the_blocks_runs_as_it_is(recompute: bool) -> None:
    model, plain = both(lambda: Stack(recompute), per_block=True)
    with pytest.warns(UserWarning, match=r"Stack\.scale; .*per_block=True, what is around the blocks"):
        backward(model, plain)
    assert plain.body["layers"][1][0].weight.grad is None


class Numbered(nn.Linear):
    """Dynamo compiles its forward for the number."""

    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.number


@on_ranks(2)
def test_blocks_that_differ_in_a_number_are_all_compiled() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(Numbered(7, 7) for _ in range(10)))
        for number, block in enumerate(model):
            block.number = number
        return model

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parameters are read outside")
        model, plain = both(build, per_block=True)
        backward(model, plain)
    assert len(zerofx.inspect(model).graphs) == 10


@on_ranks(2)
def test_frozen_blocks_share_no_graph_with_others() -> None:
    kinds = list(pieces(Stack()))
    assert len(kinds) == 3
    model = sharded(Stack(), per_block=True)
    calls = [layer.__dict__["_compiled_call_impl"].func for layer in model.body["layers"]]
    assert calls[0] is calls[2] is not calls[1]


@on_ranks(2)
def test_copies_are_compiled_by_blocks_too() -> None:
    model = compiled(2)
    other = copy.deepcopy(model)
    assert all("_compiled_call_impl" in block.__dict__ for block in other.blocks)
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(model(ids), other(ids))
    same(whole(model), whole(other))


@on_ranks(2)
def test_a_graph_break_in_a_block_is_an_error_with_fullgraph() -> None:
    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = sharded(nn.Sequential(Breaks(7, 7), Breaks(7, 7)), per_block=True, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(rows(0))


def test_one_rank_compiles_by_blocks_as_well() -> None:
    torch.manual_seed(0)
    model = GPT(3)
    plain = copy.deepcopy(model)
    zerofx.compile(model, per_block=True, backend="interpreter")
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(model(ids), plain(ids))
    assert len(model.__dict__["_zerofx_engine"].captures) == 5
