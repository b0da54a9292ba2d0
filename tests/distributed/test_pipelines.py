"""Models that are cut into stages train and evaluate as one process does, over pipelines and their replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import zerofx
from tests.architectures import llama
from tests.distributed.ranks import has, message, on_ranks
from tests.models import VOCAB, gpt2
from tests.pool import Pool
from tests.stage_models import WIDTH, InPlace, Tied, UNet
from tests.training import MakeOptimizer, State, adamw, compare, full, sgd
from zerofx.agree import RankMismatchError
from zerofx.pipeline import SCHEDULES, SINGLE, PipelineError

STEPS = 3
CLIP = 0.5


class Text:
    """Tokens and the next ones."""

    @staticmethod
    def batch(rows: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(3, VOCAB, (rows, 17), generator=numbers)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @staticmethod
    def example(x: Tensor, y: Tensor) -> Any:
        return (x,), {}


class OwnLoss(Text):
    """The same for models that compute their loss themselves."""

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(input_ids=x, labels=y, use_cache=False).loss

    @staticmethod
    def example(x: Tensor, y: Tensor) -> Any:
        return (), {"input_ids": x, "labels": y, "use_cache": False}


class Rows(Text):
    """Random rows, of which a random part of each is the target; what is drawn for that has to be known everywhere."""

    @staticmethod
    def batch(rows: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, WIDTH, generator=numbers), torch.randn(rows, WIDTH, generator=numbers)

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = model(x)
        return F.mse_loss(made, y[:, : made.shape[1]])


MODELS: dict[str, tuple[Callable[[], nn.Module], type[Text]]] = {
    "unet": (UNet, Rows),
    "deep_unet": (lambda: UNet(4), Rows),
    "in_place": (InPlace, Rows),
    "one_layer": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Softmax(-1)), Rows),
    "tied": (Tied, Text),
    "gpt2": (lambda: gpt2().model, OwnLoss),
    "llama": (lambda: llama().model, OwnLoss),
}


class Setting(NamedTuple):
    """A model, its pipeline, and how many rows each replica's batch has."""

    model: str
    pipeline: zerofx.Pipeline
    rows: int
    stage: int = 1
    backend: str = "interpreter"


class Trained(NamedTuple):
    """What a rank has in the end, and what all of its steps returned."""

    state: State
    grads: State
    results: list[tuple[float, float]]
    evaluated: float


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def batch(setting: Setting, replica: int, step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + replica)
    return MODELS[setting.model][1].batch(setting.rows, numbers)


def keep_grads(into: State, model: nn.Module) -> Callable[..., None]:
    """A hook that keeps the whole gradients that a step updates by."""

    def hook(*_: Any) -> None:
        into.update({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})

    return hook


def train_rank(setting: Setting, makers: tuple[MakeOptimizer, ...]) -> list[Trained]:
    """One rank's training, once with each optimizer; it has drawn other random numbers than the others before."""
    torch.manual_seed(dist.get_rank())
    model, kind = make(setting.model), MODELS[setting.model][1]
    torch.manual_seed(dist.get_rank())
    x, y = batch(setting, 0, 0)
    replicas = dist.get_world_size() // setting.pipeline.ranks
    model = zerofx.compile(
        model,
        stage=setting.stage,
        persist_below=0,
        backend=setting.backend,
        pipeline=setting.pipeline,
        example_inputs=kind.example(x[:2], y[:2]),
    )
    start = {name: value.clone() for name, value in model.state_dict().items()}
    made = list[Trained]()
    for make_optimizer in makers:
        model.load_state_dict(start)
        made.append(train_model(setting, model, make_optimizer, replicas))
    return made


def train_model(setting: Setting, model: nn.Module, make_optimizer: MakeOptimizer, replicas: int) -> Trained:
    kind = MODELS[setting.model][1]
    optimizer, grads, results = make_optimizer(model.parameters()), State(), []
    optimizer.register_step_pre_hook(keep_grads(grads, model))
    step, evaluate = zerofx.train_step(model, kind.loss, optimizer, clip=CLIP), zerofx.eval_step(model, kind.loss)
    for number in range(STEPS):
        result = step(*batch(setting, dist.get_rank() % replicas, number))
        results.append((result.loss.item(), result.grad_norm.item()))
    evaluated = evaluate(*batch(setting, dist.get_rank() % replicas, STEPS)).item()
    state = {name: full(value) for name, value in model.state_dict().items()}
    return Trained(state, grads, results, evaluated)


@functools.cache
def reference(name: str, count: int, rows: int, replicas: int, make_optimizer: MakeOptimizer) -> Trained:
    """The same training in one process, eager, micro-batch by micro-batch; buffers are those of the first replica."""
    setting = Setting(name, zerofx.Pipeline(1, microbatches=count), rows)
    model, kind = make(name), MODELS[name][1]
    optimizer, grads, results = make_optimizer(model.parameters()), State(), []
    optimizer.register_step_pre_hook(keep_grads(grads, model))
    buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(replicas)]

    def losses(step: int) -> Any:
        for replica in range(replicas):
            for n, buffer in model.named_buffers():
                buffer.data.copy_(buffers[replica][n])
            x, y = batch(setting, replica, step)
            for part, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
                yield kind.loss(model, part, target) * len(part) / len(x) / replicas
            buffers[replica] = {n: b.clone() for n, b in model.named_buffers()}

    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for loss in losses(step):
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        results.append((total, norm.item()))
    model.eval()
    with torch.no_grad():
        evaluated = sum(loss.item() for loss in losses(STEPS))
    for n, buffer in model.named_buffers():
        buffer.data.copy_(buffers[0][n])
    return Trained({n: full(v) for n, v in model.state_dict().items()}, grads, results, evaluated)


def check(pool: Callable[[int], Pool], world: int, setting: Setting, *makers: MakeOptimizer) -> list[Trained]:
    """Trains on all ranks and compares what each of them has; together they have all there is."""
    trained = list(zip(*pool(world).run(train_rank, setting, makers, timeout=300), strict=True))
    for ranks, make_optimizer in zip(trained, makers, strict=True):
        compare_ranks(ranks, world, setting, make_optimizer)
    return list(trained[-1])


def compare_ranks(ranks: Iterable[Trained], world: int, setting: Setting, make_optimizer: MakeOptimizer) -> None:
    replicas = world // setting.pipeline.ranks
    expected = reference(setting.model, setting.pipeline.microbatches, setting.rows, replicas, make_optimizer)
    for each in ranks:
        for own, theirs in ((each.state, expected.state), (each.grads, expected.grads)):
            worst = compare(own, {name: theirs[name] for name in own}, rtol=2e-5)
            assert not worst, worst
        assert each.results == [pytest.approx(result, rel=1e-5) for result in expected.results]
        assert each.evaluated == pytest.approx(expected.evaluated, rel=1e-5)
    assert set().union(*(each.state for each in ranks)) == set(expected.state)


def pipeline(schedule: str, ranks: int, parts: int) -> zerofx.Pipeline:
    return zerofx.Pipeline(ranks * (1 if schedule in SINGLE else 2), schedule, parts)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_process(pool: Callable[[int], Pool], schedule: str) -> None:
    """A skip connection crosses a stage, or two; with 1F1B the last micro-batches are a row shorter."""
    optimizer = adamw if schedule in SINGLE or schedule == "zbv" else sgd
    check(pool, 2, Setting("unet", pipeline(schedule, 2, 4), rows=10 if schedule == "1f1b" else 8), optimizer)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_four_ranks_train_as_one_process(pool: Callable[[int], Pool], schedule: str) -> None:
    check(pool, 4, Setting("deep_unet", pipeline(schedule, 4, 8), rows=16), sgd)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "parts", "schedule"),
    [
        (ranks, parts, schedule)
        for ranks, parts in ((2, 4), (2, 8), (4, 4), (4, 8))
        for schedule in SCHEDULES
        if (ranks, parts, schedule) != (4, 4, "dualpipev")  # it needs as many micro-batches as stages
    ],
)
def test_every_schedule_trains_over_every_number_of_ranks(
    pool: Callable[[int], Pool], schedule: str, ranks: int, parts: int
) -> None:
    check(pool, ranks, Setting("deep_unet", pipeline(schedule, ranks, parts), rows=2 * parts), sgd, adamw)


@pytest.mark.parametrize("name", ["tied", "gpt2", "llama", "in_place"])
def test_models_are_cut_without_naming_a_module(pool: Callable[[int], Pool], name: str) -> None:
    """Tied embeddings are in both stages, and the same; buffers are counted on in one."""
    first, second = check(pool, 2, Setting(name, pipeline("1f1b", 2, 4), rows=8), adamw)
    shared = set(first.state) & set(second.state)
    assert all(torch.equal(first.state[key], second.state[key]) for key in shared)
    assert bool(shared) == (name in ("tied", "gpt2"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_are_sharded_over_their_replicas(pool: Callable[[int], Pool], stage: int) -> None:
    schedule = "1f1b" if stage < 3 else "zbv"
    ranks = check(pool, 4, Setting("tied", pipeline(schedule, 2, 4), rows=6, stage=stage), adamw if stage == 1 else sgd)
    assert ranks[0].state.keys() == ranks[1].state.keys() and ranks[2].state.keys() == ranks[3].state.keys()


@pytest.mark.inductor
@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_inductor_compiles_stages(pool: Callable[[int], Pool], schedule: str) -> None:
    check(pool, 2, Setting("unet", pipeline(schedule, 2, 4), rows=8, backend="inductor"), sgd)


def compiled(model: str = "unet", **options: Any) -> nn.Module:
    asked = {"pipeline": zerofx.Pipeline(2, "1f1b", 4), "example_inputs": ((torch.zeros(2, WIDTH),), {})}
    return zerofx.compile(make(model), **{"persist_below": 0, "backend": "interpreter", **asked, **options})


def noted(run: list[str], kind: str, move: Callable[[Any], Any], given: Any) -> Any:
    run.append(kind)
    return move(given)


@on_ranks(4)
def test_parameters_are_gathered_and_gradients_reduced_once_a_step() -> None:
    for stage in (1, 2, 3):
        model = compiled(stage=stage)
        step, engine = zerofx.train_step(model, Rows.loss, sgd(model.parameters())), model.__dict__["_zerofx_engine"]
        step(*Rows.batch(8, torch.Generator().manual_seed(0)))
        moves, run = engine.accumulation.moves, list[str]()
        names = tuple(name for name, _ in model.named_parameters())
        assert {(kind, tuple(param.name for param in params)) for kind, params in moves} == {
            ("gather", names),
            ("reduce", names),
        }
        for key in moves:
            moves[key] = functools.partial(noted, run, key[0], moves[key])
        step(*Rows.batch(8, torch.Generator().manual_seed(1)))
        assert run == ["gather", "reduce"]
        stages = [part for part in engine.captures if part.kind == "train"]
        assert len(stages) == 1 and "c10d" not in stages[0].steps[-1].text


@on_ranks(2)
def test_a_rank_holds_its_stages_and_says_how_the_model_is_called() -> None:
    model = compiled()
    names = {name.split(".")[0] for name in model.state_dict()}
    assert names == ({"down"} if dist.get_rank() == 0 else {"up"})
    has(message(lambda: model(torch.zeros(2, WIDTH)), RuntimeError), ("1 of its 2 stages", "zerofx.train_step"))
    assert "None" not in str(zerofx.pipeline_report(model)) and "UNet" in repr(model)
    start = {name: torch.full_like(value, 0.25) for name, value in make("unet").state_dict().items()}
    model.load_state_dict(start, strict=False)
    assert all(bool((full(value) == 0.25).all()) for value in model.state_dict().values())
    optimizer = sgd(model.parameters())
    has(message(lambda: zerofx.train_step(model, Rows.loss, optimizer, microbatches=3)), ("runs 4 micro-batches",))
    has(message(lambda: zerofx.train_step(model, Rows.loss, optimizer, accumulate="reduce")), ("once a step",))
    has(message(lambda: zerofx.train_step(model, Rows.loss, optimizer, fuse_optimizer=True)), ("with a pipeline",))
    next(model.parameters()).requires_grad_(False)
    step = zerofx.train_step(model, Rows.loss, optimizer)
    has(message(lambda: step(torch.zeros(8, WIDTH), torch.zeros(8, WIDTH))), ("frozen or thawed",))


@on_ranks(2)
def test_random_numbers_of_a_loss_are_those_of_all_ranks() -> None:
    """Noise that the loss draws before it calls the model reaches the first stage, and the target on the last one."""
    model = compiled()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        drawn.append(noise)
        return F.mse_loss(model(x + noise), noise)

    drawn = list[Tensor]()
    torch.manual_seed(dist.get_rank())
    zerofx.train_step(model, loss, sgd(model.parameters()))(torch.zeros(8, WIDTH))
    told: list[Any] = [None, None]
    dist.all_gather_object(told, drawn)
    assert len(told[0]) == 4 and len(told[1]) == 8
    assert all(torch.equal(a, b) for a, b in zip(told[0], told[1][:4], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(told[1][:4], told[1][4:], strict=True))
    assert not torch.equal(drawn[0], drawn[1])


@on_ranks(2)
def test_ranks_of_a_pipeline_that_get_different_batches_all_hear_of_it() -> None:
    model = compiled()
    step = zerofx.train_step(model, Rows.loss, sgd(model.parameters()))
    words = ("ranks differ in the batch", "give all ranks of a pipeline the same batch")
    same, rank = torch.zeros(8, WIDTH), float(dist.get_rank())
    for x, y in ((torch.full((8, WIDTH), rank), same), (same, torch.full((8, WIDTH), rank))):
        step(same, same)
        has(message(lambda x=x, y=y: step(x, y)), words)
    fewer = torch.zeros(8 - 2 * dist.get_rank(), WIDTH)
    has(message(lambda: step(fewer, fewer)), words)
    step(same, same)


@on_ranks(2)
def test_losses_are_weighed_by_tokens() -> None:
    model, plain = compiled(), make("unet")
    x, y = Rows.batch(8, torch.Generator().manual_seed(0))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y, reduction="sum")

    def weight(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, 0] > 0).sum()

    optimizer = sgd(model.parameters())
    result = zerofx.train_step(model, loss, optimizer, loss_weight=weight)(x, y)
    expected = loss(plain, x, y) / weight(x, y)
    expected.backward()
    sgd(plain.parameters()).step()
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    own = {name: full(param) for name, param in model.named_parameters()}
    assert not compare(own, {name: param for name, param in plain.named_parameters() if name in own}, rtol=1e-5)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 0 else x


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no example": ({"example_inputs": None}, "needs example_inputs=(args, kwargs)"),
    "an example of no call": ({"example_inputs": (torch.zeros(2),)}, "needs example_inputs=(args, kwargs)"),
    "a number": ({"pipeline": 2}, "takes a zerofx.Pipeline, not int"),
    "one rank": ({"pipeline": zerofx.Pipeline(2, "zbv", 4)}, "ask for 4 stages over 2 ranks"),
    "too many stages": ({"pipeline": zerofx.Pipeline(64, "looped-bfs", 4, None, 32)}, "take at most"),
    "too many ranks": ({"pipeline": zerofx.Pipeline(3, "1f1b", 4)}, "does not divide 2 ranks"),
    "an unknown module": ({"pipeline": zerofx.Pipeline(2, split_at=["middle"])}, "names no module"),
    "a rank without parameters": ({"model": "one_layer"}, "rank 1 of the pipeline would have no parameters"),
    "too little memory": ({"memory": 1000}, "stages of at most 1000 bytes"),
    "blocks": ({"per_block": True}, "per_block) is not possible with a pipeline"),
    "an example alone": ({"pipeline": None}, "of use with a pipeline only"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_possible_is_refused_on_every_rank(pool: Callable[[int], Pool], name: str) -> None:
    given, words = REFUSALS[name]
    for told in pool(2).run_errors(compile_with, given):
        has(told, ("PipelineError", words))


def compile_with(given: dict[str, Any], on: tuple[int, ...] = (0, 1)) -> None:
    compiled(**given if dist.get_rank() in on else {})


@on_ranks(2)
def test_a_graph_break_and_ranks_that_disagree_are_refused_before_training() -> None:
    asked = {"pipeline": zerofx.Pipeline(2, "1f1b", 4), "example_inputs": ((torch.zeros(2, WIDTH),), {})}
    told = message(lambda: zerofx.compile(Breaks(), backend="interpreter", **asked), PipelineError)
    has(told, ("torch.compile makes no single graph of its forward", "test_pipelines.py:", "take what breaks"))
    for stages, schedule in ((2, "gpipe"), (1, "1f1b")):
        other = zerofx.Pipeline(stages, schedule, 4) if dist.get_rank() else zerofx.Pipeline(2, "1f1b", 4)
        has(message(lambda other=other: compiled(pipeline=other), RankMismatchError), ("ranks differ in the pipeline",))
    given = {"pipeline": None, "example_inputs": None} if dist.get_rank() else {}
    has(message(lambda: compiled(**given), RankMismatchError), ("ranks differ in",))
