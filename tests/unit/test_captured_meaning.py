"""A captured transformer with a tied head, sharded by the whole recipe and cut in two, trains as eager ranks do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import GraphModule, Node

from tests.models import GPT, SEQ, VOCAB
from zerofx.capture import Capture
from zerofx.config import STAGES, Config
from zerofx.decide import NOTHING_DECIDED, Decision
from zerofx.layout import Layout, ParamLayout
from zerofx.manager import run
from zerofx.mesh import Mesh
from zerofx.passes.release_after_use import ReleaseAfterUse
from zerofx.program import Invariant, Program, Tag, output_node, output_tags, outputs, placeholders, tag
from zerofx.recipe import recipe
from zerofx.simulate import scatter, simulate
from zerofx.testing.meaning import Ranks, assert_same_bits, mean
from zerofx.text import parse
from zerofx.textgraph import read

KEEPS = {0: set(), 1: {Invariant.KEPT}, 2: {Invariant.KEPT}, 3: {Invariant.RELEASED}}
SIZES = (1, 64, 2**10, 2**30)  # of a bucket: less than any tensor, one or two, a few, the whole model
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
aten = torch.ops.aten
VIEWS = {aten.t.default, aten.permute.default, aten.transpose.int, aten.view.default}
Batch = tuple[torch.Tensor, torch.Tensor]


def tied_gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=1, width=16, heads=2)
    model.head.weight = model.tokens.weight
    return model


def batches(world: int) -> list[Batch]:
    numbers = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, VOCAB, (2, 2, SEQ), generator=numbers)) for _ in range(world)]


def loss_of(model: GPT) -> Callable[..., torch.Tensor]:
    return lambda ids, targets: F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def compiled(model: GPT, batch: Batch, config: Config, world: int, decision: Decision = NOTHING_DECIDED) -> Capture:
    """What the recipe and the partition make of the loss; what runs stays eager."""
    named = dict(model.named_parameters())
    names = {id(param): name for name, param in named.items()}
    layout = Layout(tuple(ParamLayout(name, tuple(p.shape), p.dtype, None) for name, p in named.items()))
    captures: list[Capture] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        params = {place: names[id(value)] for place, value in enumerate(inputs) if id(value) in names}
        order = recipe(config)
        order = tuple(
            replace(step, keep=decision.keep) if isinstance(step, ReleaseAfterUse) else step for step in order
        )
        captures.append(Capture(params, order, Mesh.of(dp=world), layout, 0, decision))
        aot_module_simplified(gm, inputs, lambda half, _: half, partition_fn=captures[0].partition)
        return gm.forward

    torch.compiler.reset()
    with warnings.catch_warnings(action="ignore"):
        torch.compile(loss_of(model), backend=backend, fullgraph=True)(*batch)
    (capture,) = captures
    return capture


def compiled_program(
    model: GPT, batch: Batch, config: Config, world: int, decision: Decision = NOTHING_DECIDED
) -> Program:
    """The forward and backward at the end."""
    return parse(compiled(model, batch, config, world, decision).steps[-1].text)


def with_buckets_of(size: int, stage: int, capture: Capture) -> Program:
    """The same forward and backward with the physical passes for another size of buckets, in bytes."""
    program = parse(next(step.text for step in capture.steps if step.name == "partition"))
    program.holds = {Invariant.MARKED, Invariant.MERGED, *KEEPS[stage]}
    run(program, recipe(Config(stage=stage, bucket_mb=size / 2**20)))
    return program


def issued(program: Program, part: str, kind: str) -> list[Node]:
    """The collectives of a kind in one graph; a bucket is one."""
    return [
        node for node in program.graphs[part].nodes if re.match(rf"(_c10d_functional|zerofx)\.{kind}", str(node.target))
    ]


def half(program: Program, name: str, inputs: list[list[Any]]) -> Ranks:
    """All outputs of one graph, one list for each, what it saves among them."""
    graph = program.graphs[name]
    output_node(graph).meta["zerofx"] = tuple(Tag("out") for _ in output_tags(graph))
    found = simulate(Program({name: graph}, program.mesh, program.layout), inputs)
    return [list(column) for column in zip(*found, strict=True)]


def sharded_step(program: Program, model: GPT, given: list[Batch]) -> tuple[list[Any], dict[str, list[Any]]]:
    """The loss of each rank, and what each rank gets of each gradient."""
    whole, (ids, targets) = dict(model.named_parameters()), zip(*given, strict=True)
    inputs: list[list[Any]] = []
    rest = iter((list(ids), list(targets)))
    for node in placeholders(program.graphs["forward"]):
        known = tag(node)
        param = program.layout[known.params[0]] if known else None
        inputs.append(scatter(whole[param.name].detach(), param, program.mesh) if param else next(rest))
    tags, grads = output_tags(program.graphs["forward"]), output_tags(program.graphs["backward"])
    computed = half(program, "forward", inputs)
    saved = [column for column, known in zip(computed, tags, strict=True) if known.role == "saved"]
    tangent = [[torch.ones(())] * program.mesh.world]
    columns = half(program, "backward", [*saved, *tangent])
    return computed[0], {k.params[0]: column for column, k in zip(columns, grads, strict=True) if k and k.params}


def eager_step(model: GPT, given: list[Batch]) -> tuple[list[Any], dict[str, list[Any]]]:
    """The loss of each rank, and each rank's whole gradients."""
    names, params = zip(*model.named_parameters(), strict=True)
    losses = [loss_of(model)(*batch) for batch in given]
    grads = [torch.autograd.grad(loss, params) for loss in losses]
    return [loss.detach() for loss in losses], dict(zip(names, map(list, zip(*grads, strict=True)), strict=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_loss_and_gradients_have_the_bits_of_eager_ranks_whatever_the_buckets_hold(world: int, stage: int) -> None:
    model, given = tied_gpt(), batches(world)
    capture = compiled(model, given[0], Config(stage=stage, persist_below=100), world)
    expected_losses, whole = eager_step(model, given)
    counts: list[int] = []
    for size in SIZES:
        program = with_buckets_of(size, stage, capture)
        losses, grads = sharded_step(program, model, given)
        assert_same_bits([losses], [expected_losses])
        assert grads.keys() == whole.keys()
        for name, found in grads.items():
            param = program.layout[name]
            assert (param.dim is None) == (stage == 0 or whole[name][0].numel() < 100)
            assert_same_bits([found], [scatter(mean(whole[name]), param, program.mesh)])
        counts.append(sum(len(issued(program, part, kind)) for part in program.graphs for kind in KINDS))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == {0: 1, 1: 3, 2: 3, 3: 4}[stage]  # one of each kind in each half


@pytest.mark.parametrize("stage", [1, 2])
def test_what_was_gathered_is_kept_and_only_where_the_backward_reads_it(stage: int) -> None:
    model, given = tied_gpt(), batches(2)
    program = compiled_program(model, given[0], Config(stage=stage, persist_below=100), 2)
    assert not issued(program, "backward", "all_gather")
    forward = program.graphs["forward"]
    pairs = zip(outputs(forward), output_tags(forward), strict=True)
    saved = [value for value, known in pairs if known == Tag("saved")]
    gathered = {name for value in saved for name in read_from(value)}
    assert gathered == {
        "tokens.weight",
        *(f"blocks.0.{name}.weight" for name in ("qkv", "proj", "up", "down")),
    }
    assert not any(tag(value) and tag(value).role == "shard" for value in saved)


def read_from(node: Node) -> tuple[str, ...]:
    """The parameter that a value, or what it is a view of, was gathered from."""
    while node.target in VIEWS:
        node = node.args[0]
    known = tag(node)
    return known.params if known and known.role == "unshard" else ()


def test_nothing_gathered_is_saved_and_the_tied_weight_is_gathered_once_in_each_half() -> None:
    model, given = tied_gpt(), batches(2)
    program = compiled_program(model, given[0], Config(stage=3, persist_below=100), 2)
    gathers = [
        [name for node in issued(program, part, "all_gather") for name in node.meta["zerofx"].params]
        for part in ("forward", "backward")
    ]
    sharded = [param.name for param in program.layout if param.dim is not None]
    assert sorted(gathers[0]) == sorted(sharded)
    assert gathers[1].count("tokens.weight") == 1
    forward = program.graphs["forward"]
    saved = {v.name for v, known in zip(outputs(forward), output_tags(forward), strict=True) if known == Tag("saved")}
    assert {n.name for n in forward.nodes if tag(n) == Tag("shard", ("tokens.weight",))} <= saved


BLOCK = tuple(f"blocks.0.{name}.weight" for name in ("qkv", "proj", "up", "down"))


@pytest.mark.parametrize("recompute", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("keep", [(), BLOCK[:2], ("tokens.weight", *BLOCK)])
def test_what_is_kept_and_what_is_computed_again_changes_no_bit(keep: tuple[str, ...], recompute: float) -> None:
    model, given = tied_gpt(), batches(3)
    config = Config(stage=3, persist_below=100)
    program = compiled_program(model, given[0], config, 3, Decision(keep, recompute))
    losses, grads = sharded_step(program, model, given)
    expected_losses, whole = eager_step(model, given)
    assert_same_bits([losses], [expected_losses])
    assert grads.keys() == whole.keys()
    for name, found in grads.items():
        assert_same_bits([found], [scatter(mean(whole[name]), program.layout[name], program.mesh)])
    again = [name for node in issued(program, "backward", "all_gather") for name in node.meta["zerofx"].params]
    assert set(again) >= {"tokens.weight", *BLOCK} - set(keep) and not set(again) & set(keep)


def saved_bytes(program: Program) -> int:
    """Of activations: what the forward saves and was not given."""
    forward = program.graphs["forward"]
    pairs = zip(outputs(forward), output_tags(forward), strict=True)
    return sum(v.meta["val"].nbytes for v, known in pairs if known == Tag("saved") and v.op != "placeholder")


def test_activations_that_are_saved_are_the_share_that_is_not_computed_again() -> None:
    model, given = tied_gpt(), batches(2)
    config = Config(stage=3, persist_below=100)
    whole, half, none = (
        saved_bytes(compiled_program(model, given[0], config, 2, Decision(recompute=share)))
        for share in (0.0, 0.5, 1.0)
    )
    assert 0.3 * whole < half < 0.55 * whole
    assert none < 0.2 * whole  # attention's result, which is not computed again


def test_a_graph_of_another_shape_computes_the_same_again() -> None:
    model, (batch, *_) = tied_gpt(), batches(2)
    config = Config(stage=3, persist_below=100)
    smaller = tuple(part[:1, :5] for part in batch)
    first = compiled(model, batch, config, 2, Decision(recompute=0.5))
    chosen = first.chosen
    assert chosen is not None and chosen.again
    second = compiled(model, smaller, config, 2, Decision(recompute=0.5, chosen=chosen))
    assert second.chosen == chosen
    calls = [
        [
            (part.name, row.name, row.collective, row.params)
            for part in read(capture.steps[-1].text).graphs
            for row in part.sent
        ]
        for capture in (first, second)
    ]
    assert calls[0] == calls[1]
