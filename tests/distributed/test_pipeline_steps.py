"""What ranks of a pipeline send in a step, what options change of it, and what they hear of one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.distributed.ranks import has, message, on_ranks
from tests.distributed.runs import ByteCounter, Spy, spied, stored
from tests.distributed.test_bytes import sent
from tests.distributed.test_pipelines import CLIP, Rows, Setting, Text, batch, check, compiled, make, pipeline
from tests.pool import Pool
from tests.stage_models import WIDTH
from tests.training import adamw, compare, full, sgd
from zerofx.agree import RankMismatchError
from zerofx.pipeline import PipelineError
from zerofx.pipeline_step import Step
from zerofx.stage_gather import Released

SCHEDULES = (pytest.param("1f1b", marks=pytest.mark.full), "zbv")


def rows_of(seed: int, count: int = 8) -> tuple[Tensor, Tensor]:
    return Rows.batch(count, torch.Generator().manual_seed(seed))


def tied(**options: Any) -> nn.Module:
    x, y = batch(Setting("tied", zerofx.Pipeline(1), 2), 0, 0)
    asked = {"pipeline": zerofx.Pipeline(2, "1f1b", 2), "example_inputs": Text.example(x, y), "persist_below": 0}
    return zerofx.compile(make("tied"), backend="interpreter", **asked, **options)


# What travels.


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(4)
def test_each_rank_sends_its_stage_once_to_be_gathered_and_once_to_be_reduced(stage: int) -> None:
    """Whatever the micro-batches are; what crosses the cut goes over another group."""
    counter = ByteCounter(2)
    with spied(), mock.patch.object(Spy, "listeners", (counter,)):
        model = compiled(stage=stage)
        step = zerofx.train_step(model, Rows.loss, sgd(model.parameters()))
        step(*rows_of(0))
        for seed, count in ((1, 4), (2, 8)):
            counter.bytes = 0
            step(*rows_of(seed, count))
            once = sum(sent(size, dim, 2, 2 if dim is None else 1) for size, dim in stored(model).values())
            assert counter.bytes == 2 * once > 0


@pytest.mark.filterwarnings("ignore:zerofx.Pipeline")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gathering_always_trains_as_gathering_once(pool: Callable[[int], Pool], schedule: str) -> None:
    asked = zerofx.Pipeline(2 if schedule == "1f1b" else 4, schedule, 4, gather="always")
    check(pool, 4, Setting("unet", asked, rows=6, stage=3), adamw)


@on_ranks(4)
def test_gathering_always_gathers_for_each_computation_and_holds_nothing_in_between() -> None:
    asked = zerofx.Pipeline(2, "1f1b", 4, gather="always")
    with pytest.warns(UserWarning, match=r"traffic cannot hide: give micro-batches more rows") as told:
        model = compiled(stage=3, pipeline=asked)
    said = [str(each.message) for each in told if "gather='always'" in str(each.message)]
    assert len(said) == 1 and f"stage {dist.get_rank() // 2} gathers" in said[0]
    engine = model.__dict__["_zerofx_engine"]
    step = zerofx.train_step(model, Rows.loss, sgd(model.parameters()))
    step(*rows_of(0))
    gathers, held, kept = list[str](), list[int](), list[Released]()
    moves = engine.accumulation.moves

    def counted(kind: str, move: Any, given: Any) -> Any:
        gathers.append(kind)
        return move(given)

    for key in moves:
        moves[key] = lambda given, kind=key[0], move=moves[key]: counted(kind, move, given)
    act = Step._act

    def watched(each: Step, *action: Any) -> Any:
        kept.append(each.released)
        held.append(sum(storage.nbytes() for storage in each.released.storages.values()))
        return act(each, *action)

    with mock.patch.object(Step, "_act", watched):
        step(*rows_of(1))
    assert gathers == ["gather"] * 8 + ["reduce"] and len(held) == 8 and min(held) > 0
    assert not any(storage.nbytes() for each in kept for storage in each.storages.values())


# What options change.


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_activations_are_computed_again_and_gradients_are_the_same(schedule: str) -> None:
    states = list[dict[str, Tensor]]()
    saved = list[int]()
    for share in (None, 1.0):
        model = compiled(pipeline=pipeline(schedule, 2, 4), recompute=share)
        step = zerofx.train_step(model, Rows.loss, sgd(model.parameters()))
        step(*rows_of(0))
        states.append({name: full(value) for name, value in model.state_dict().items()})
        text = model.__dict__["_zerofx_engine"].captures[-1].steps[-1].text
        saved.append(text.count("tanh"))
    assert not compare(states[0], states[1], rtol=1e-6)
    assert saved[1] > saved[0]


@on_ranks(4)
def test_gradients_are_reduced_in_the_dtype_asked_for_by_the_passes_given() -> None:
    plain = make("unet")
    seen = list[int]()

    def passes(default: Any) -> Any:
        seen.append(len(default))
        return default

    model = compiled(stage=1, reduce_dtype="bf16", passes=passes)
    result = zerofx.train_step(model, Rows.loss, sgd(model.parameters()))(*rows_of(0))
    loss = Rows.loss(plain, *rows_of(0))
    loss.backward()
    sgd(plain.parameters()).step()
    assert seen and result.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    own = {name: full(param) for name, param in model.named_parameters()}
    theirs = {name: param for name, param in plain.named_parameters() if name in own}
    assert compare(own, theirs, rtol=1e-7) and not compare(own, theirs, rtol=2e-3)
    moves = [c for c in model.__dict__["_zerofx_engine"].captures if c.kind == "reduce"]
    assert moves and "bf16" in moves[-1].steps[-1].text


@on_ranks(4)
def test_an_ignored_parameter_stays_with_the_stage_that_reads_it_and_is_not_reduced() -> None:
    model = make("unet")
    ignored = model.up[-1].weight
    example = ((torch.zeros(2, WIDTH),), {})
    asked = {"pipeline": zerofx.Pipeline(2, "1f1b", 4), "example_inputs": example, "persist_below": 0}
    zerofx.compile(model, backend="interpreter", ignored_params=[ignored], **asked)
    last, replica = dist.get_rank() >= 2, dist.get_rank() % 2
    assert ("up.2.weight" in model.state_dict()) == last and (model.up[-1].weight is ignored) == last
    before = ignored.detach().clone()
    zerofx.train_step(model, Rows.loss, sgd(model.parameters()))(*rows_of(replica))
    if last:
        plain = make("unet")
        Rows.loss(plain, *rows_of(replica)).backward()
        torch.testing.assert_close(ignored, before - 0.05 * plain.up[-1].weight.grad)


@on_ranks(2)
def test_the_state_dict_of_a_whole_model_loads_strictly() -> None:
    for model, name in ((compiled(), "unet"), (tied(), "tied")):
        start = {key: torch.full_like(value, 0.25) for key, value in make(name).state_dict().items()}
        told = model.load_state_dict(start)
        assert not told.missing_keys and not told.unexpected_keys
        assert all(bool((full(value) == 0.25).all()) for value in model.state_dict().values())
        has(
            message(lambda model=model, start=start: model.load_state_dict(start | {"other": torch.ones(1)})),
            ("other",),
        )


@on_ranks(2)
def test_the_gradient_of_a_copy_that_is_read_is_said_to_be_elsewhere() -> None:
    model = compiled(stage=2, pipeline=zerofx.Pipeline(1, "gpipe", 4))
    with pytest.warns(UserWarning, match=r"gathered copy, which has no .grad: .*get_parameter") as told:
        assert model.down[0].weight.grad is None
    assert len(told) == 1


# Norms.


@on_ranks(4)
def test_tied_weights_count_once_in_the_norm_and_an_overflow_of_theirs_is_infinite() -> None:
    model, norms = tied(stage=1), list[Tensor]()
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: norms.append(zerofx.clip_grad_norm_(model, 1e9)))
    step = zerofx.train_step(model, Text.loss, optimizer, clip=CLIP)
    replica = dist.get_rank() % 2
    result = step(*batch(Setting("tied", zerofx.Pipeline(1), 4), replica, 0))
    plain = make("tied")
    for each in range(2):
        (Text.loss(plain, *batch(Setting("tied", zerofx.Pipeline(1), 4), each, 0)) / 2).backward()
    torch.testing.assert_close(result.grad_norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e9), rtol=1e-5, atol=0)
    torch.testing.assert_close(norms[0].item(), CLIP, rtol=1e-4, atol=0)

    def overflow(param: nn.Parameter) -> None:
        param.grad.to_local().view(-1)[:1] = torch.inf

    own = model.get_parameter("tokens.weight")
    assert own.shared == (dist.get_rank() >= 2)
    if dist.get_rank() == 3:
        own.register_post_accumulate_grad_hook(overflow)
    result = step(*batch(Setting("tied", zerofx.Pipeline(1), 4), replica, 1))
    assert result.grad_norm.item() == torch.inf and norms[1].isnan().all()


# Ranks that fail.


def failing(where: str, rank: int) -> Callable[..., Tensor]:
    """A loss function that raises on one rank, before or behind its call of the model."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        bad = FAILS[0] and dist.get_rank() == rank
        if bad and where == "before":
            raise ArithmeticError("no good target")
        made = model(x)
        if bad:
            raise ArithmeticError("no good target")
        return nn.functional.mse_loss(made, y)

    return loss


FAILS = [False]


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_all_ranks_hear_at_once_of_one_that_fails_and_can_go_on(schedule: str) -> None:
    model, other = (compiled(stage=2, pipeline=pipeline(schedule, 2, 4)) for _ in range(2))
    last = 2 if schedule == "1f1b" else 1  # the ranks of the last stage: 2 and 3, or, back where it began, 0 and 1
    replica = dist.get_rank() % 2
    for where, rank in (("before", 0), ("before", 3), ("behind", last)):
        step = zerofx.train_step(model, failing(where, rank), sgd(model.parameters()))
        FAILS[0], began = True, time.monotonic()
        told = message(lambda step=step: step(*rows_of(replica)))
        FAILS[0] = False
        assert time.monotonic() - began < 20
        if dist.get_rank() == rank:
            assert told == "no good target"
        else:
            has(told, (f"a step failed on rank {rank}", "ArithmeticError: no good target"))
    few = 2 if dist.get_rank() == 3 else 8
    has(message(lambda: step(*rows_of(replica, few))), ("2 rows cannot be split into 4",))
    evaluate = zerofx.eval_step(model, failing("behind", last))
    FAILS[0] = True
    has(message(lambda: evaluate(*rows_of(replica))), ("no good target",))
    FAILS[0] = False
    model.zero_grad()
    results = [
        zerofx.train_step(each, failing("", -1), sgd(each.parameters()))(*rows_of(replica)) for each in (model, other)
    ]
    assert torch.equal(results[0].loss, results[1].loss)
    assert all(torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:zerofx.Pipeline")
@pytest.mark.parametrize("gather", ["once", "always"])
@on_ranks(4)
def test_a_stage_that_cannot_compute_is_heard_of_and_training_goes_on(gather: str) -> None:
    model = compiled(stage=3, pipeline=zerofx.Pipeline(2, "1f1b", 4, gather=gather))
    step = zerofx.train_step(model, Rows.loss, sgd(model.parameters()))
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    run = model.__dict__["_zerofx_engine"].pipelined
    broken = mock.patch.object(run, "compiled_for", side_effect=MemoryError("no memory for it"))
    with broken if dist.get_rank() == 1 else mock.MagicMock():
        told = message(lambda: step(*rows_of(0)), MemoryError if dist.get_rank() == 1 else RankMismatchError)
    has(told, ("no memory for it",))
    assert all(torch.equal(full(value), before[name]) for name, value in model.state_dict().items())
    plain = make("unet")
    loss = Rows.loss(plain, *rows_of(1))
    assert step(*rows_of(1)).loss.item() == pytest.approx(loss.item(), rel=1e-5)


@on_ranks(2)
def test_gathering_always_is_refused_where_it_cannot_be() -> None:
    has(message(lambda: compiled(stage=1, pipeline=zerofx.Pipeline(2, gather="always")), PipelineError), ("stage=3",))
