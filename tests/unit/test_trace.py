"""A step is traced without processes and without data, and its program is that of `zerofx.compile`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.models import GPT, SEQ
from zerofx.config import STAGES, Config, ModelError
from zerofx.kernels import is_collective
from zerofx.program import Invariant, Level, Program
from zerofx.text import parse, show
from zerofx.trace import trace

IDS = torch.zeros(2, SEQ, dtype=torch.long, device="meta")


def tiny() -> nn.Module:
    return GPT(layers=1)


def loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def traced(stage: int = 3, world: int = 4, backend: str = "nccl") -> Program:
    config = Config(stage=stage, persist_below=100, bucket_mb=2**-8)
    return trace(tiny, (IDS, IDS), config, world, backend, loss_fn=loss)


def collectives(program: Program) -> dict[str, list[str]]:
    return {
        part: [str(node.target).split(".")[1] for node in graph.nodes if is_collective(node)]
        for part, graph in program.graphs.items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_gathers_where_it_should(stage: int) -> None:
    program = traced(stage)
    assert program.level is Level.PHYSICAL
    assert {Invariant.GATHERED, Invariant.REDUCED, Invariant.WAITED, Invariant.BOUNDED} <= program.holds
    sent = collectives(program)
    assert any(kind.startswith("all_gather") for kind in sent["forward"]) == (stage > 0)
    assert any(kind.startswith("all_gather") for kind in sent["backward"]) == (stage == 3)
    assert any(kind.startswith("reduce_scatter") for kind in sent["backward"]) == (stage > 0)


def test_it_is_the_program_of_all_ranks_and_the_same_each_time() -> None:
    program = traced(world=3)
    text = show(program)
    assert "rows(101, 3)" in text and "pad(101, 3)" in text
    assert show(parse(text)) == text == show(traced(world=3))
    assert not dist.is_initialized()


def test_one_rank_sends_nothing() -> None:
    assert collectives(traced(world=1)) == {"forward": [], "backward": []}


def test_the_backend_of_the_group_decides_on_the_passes() -> None:
    assert {kind for kinds in collectives(traced(backend="gloo")).values() for kind in kinds} >= {"all_gather_p2p"}


def test_autocast_gathers_what_is_cast() -> None:
    config = Config(persist_below=100, bucket_mb=2**-8)
    text = show(trace(tiny, (IDS, IDS), config, 2, loss_fn=loss, autocast=torch.bfloat16))
    gathers = [line for line in text.splitlines() if "= c10d.all_gather_into_tensor" in line and "qkv.weight" in line]
    assert len(gathers) == 2 and all(": bf16[96, 32]" in line or "(bf16[" in line for line in gathers)


def test_a_forward_without_gradients_is_an_inference() -> None:
    def frozen() -> nn.Module:
        return nn.Linear(64, 64).requires_grad_(False)

    program = trace(frozen, (torch.zeros(2, 64),), Config(persist_below=0), 2)
    assert collectives(program) == {"inference": ["all_gather_into_tensor_coalesced"]}


def test_a_model_that_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ModelError, match="has sparse gradients"):
        trace(lambda: nn.Embedding(8, 8, sparse=True), (IDS,), Config(), 2)


def test_a_model_on_another_device_is_refused() -> None:
    with pytest.raises(ModelError, match="model_fn made tensors on meta: they have no data anyway, leave them on cpu"):
        trace(lambda: nn.Linear(8, 8, device="meta"), (torch.zeros(2, 8),), Config(), 2)


def test_a_tied_weight_is_gathered_once_in_each_half() -> None:
    def tied() -> nn.Module:
        model = GPT(layers=1)
        model.head.weight = model.tokens.weight
        return model

    program = trace(tied, (IDS, IDS), Config(persist_below=100, bucket_mb=2**-8), 2, loss_fn=loss)
    gathered = [
        p for g in program.graphs.values() for n in g.nodes if is_collective(n) for p in n.meta["zerofx"].params
    ]
    assert gathered.count("tokens.weight") == 3 and "head.weight" not in gathered  # two gathers and one reduction


def test_a_step_that_is_no_single_graph_is_an_error() -> None:
    def breaks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        trace(lambda: nn.Linear(8, 8), (torch.zeros(2, 8),), Config(), 2, loss_fn=breaks)
