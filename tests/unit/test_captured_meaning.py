"""A captured transformer with a tied head, sharded by the whole recipe and cut in two, trains as eager ranks do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import GraphModule

from tests.meaning import Ranks, assert_same_bits, mean
from tests.models import GPT, SEQ, VOCAB
from zerofx.capture import Capture
from zerofx.config import Config
from zerofx.layout import Layout, ParamLayout
from zerofx.mesh import Mesh
from zerofx.program import Program, Tag, output_node, output_tags, outputs, placeholders, tag
from zerofx.recipe import recipe
from zerofx.simulate import scatter, simulate
from zerofx.text import parse

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


def compiled_program(model: GPT, batch: Batch, config: Config, world: int) -> Program:
    """The forward and backward that the recipe and the partition make of the loss; what runs stays eager."""
    named = dict(model.named_parameters())
    names = {id(param): name for name, param in named.items()}
    layout = Layout(tuple(ParamLayout(name, tuple(p.shape), p.dtype, None) for name, p in named.items()))
    captures: list[Capture] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        params = {place: names[id(value)] for place, value in enumerate(inputs) if id(value) in names}
        captures.append(Capture(params, recipe(config), Mesh.of(dp=world), layout, rank=0))
        aot_module_simplified(gm, inputs, lambda half, _: half, partition_fn=captures[0].partition)
        return gm.forward

    torch.compiler.reset()
    with warnings.catch_warnings(action="ignore"):
        torch.compile(loss_of(model), backend=backend, fullgraph=True)(*batch)
    (capture,) = captures
    return parse(capture.steps[-1].text)


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


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_loss_and_gradients_have_the_bits_of_eager_ranks(world: int, stage: int) -> None:
    model, given = tied_gpt(), batches(world)
    program = compiled_program(model, given[0], Config(stage=stage, persist_below=100), world)
    losses, grads = sharded_step(program, model, given)
    expected_losses, whole = eager_step(model, given)
    assert_same_bits([losses], [expected_losses])
    assert grads.keys() == whole.keys()
    for name, found in grads.items():
        param = program.layout[name]
        assert (param.dim is None) == (stage == 0 or whole[name][0].numel() < 100)
        assert_same_bits([found], [scatter(mean(whole[name]), param, program.mesh)])


def test_nothing_gathered_is_saved_and_the_tied_weight_is_gathered_once_in_each_half() -> None:
    model, given = tied_gpt(), batches(2)
    program = compiled_program(model, given[0], Config(stage=3, persist_below=100), 2)
    gathers = [
        [node.meta["zerofx"].params[0] for node in graph.nodes if "all_gather" in str(node.target)]
        for graph in program.graphs.values()
    ]
    sharded = [param.name for param in program.layout if param.dim is not None]
    assert sorted(gathers[0]) == sorted(sharded)
    assert gathers[1].count("tokens.weight") == 1
    forward = program.graphs["forward"]
    saved = {v.name for v, known in zip(outputs(forward), output_tags(forward), strict=True) if known == Tag("saved")}
    assert {n.name for n in forward.nodes if tag(n) == Tag("shard", ("tokens.weight",))} <= saved
