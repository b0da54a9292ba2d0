"""Changes of a compiled model that would be lost or train wrongly are refused in one sentence with the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.parametrizations as parametrizations
from torch.nn.utils import prune

from tests.distributed.ranks import Net, has, message, on_ranks, same, sharded, square, whole
from zerofx.config import ModelError

COPY = ("gathered copy of a sharded parameter", "model.named_parameters()", "zerofx.full_params")
Change = Callable[[Any], Any]
WRITES: dict[str, Change] = {
    "in_place": lambda m: m.a.weight.mul_(2),
    "operator": lambda m: m.a.weight.__imul__(2),
    "setitem": lambda m: m.a.weight.__setitem__(0, 1.0),
    "fill_view": lambda m: m.a.weight[0].zero_(),
    "fill_transpose": lambda m: m.a.weight.t().fill_(1),
    "detached": lambda m: m.a.weight.detach().zero_(),
    "data": lambda m: m.a.weight.data.zero_(),
    "set_data": lambda m: setattr(m.a.weight, "data", torch.zeros(13, 7)),
    "chunk": lambda m: m.a.weight.chunk(2)[1].copy_(torch.zeros(6, 7)),
    "out": lambda m: torch.add(m.a.weight, 1, out=m.a.weight),
    "out_tuple": lambda m: torch.max(m.a.weight, 0, out=(m.a.bias[:7], torch.empty(7, dtype=torch.long))),
    "renorm": lambda m: torch.nn.functional.embedding(torch.tensor([0]), m.a.weight, max_norm=0.1),
    "foreach": lambda m: torch._foreach_zero_([m.a.weight.detach(), m.a.bias.detach()]),
    "function": lambda m: torch.nn.functional.relu(m.a.weight, inplace=True),
    "init": lambda m: nn.init.kaiming_uniform_(m.a.weight),
    "reset": lambda m: m.a.reset_parameters(),
    "requires_grad_": lambda m: m.a.weight.requires_grad_(False),
    "requires_grad": lambda m: setattr(m.a.weight, "requires_grad", False),
}
BEFORE = "zerofx.compile"
CHANGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "assignment": (lambda m: setattr(m.a, "weight", nn.Parameter(torch.zeros(13, 7))), ("'weight'", "load_state_dict")),
    "registration": (lambda m: m.a.register_parameter("q", nn.Parameter(torch.zeros(2))), ("'q'", BEFORE)),
    "new_attribute": (lambda m: setattr(m, "q", nn.Parameter(torch.zeros(2))), ("'q'", BEFORE)),
    "pruning": (lambda m: prune.l1_unstructured(m.a, "weight", 0.5), ("'weight_orig'", BEFORE)),
    "share_memory": (lambda m: m.share_memory(), ("share_memory()", BEFORE)),
    "subclass": (lambda m: type("Mine", (type(m.a),), {}), ("Mine cannot be derived from Linear", BEFORE)),
}


@on_ranks(2)
def test_writes_to_gathered_copies_are_refused() -> None:
    model = sharded(Net(), backend="eager")
    before = whole(model)
    allowed = set()
    for name, write in WRITES.items():
        with torch.no_grad():
            try:
                write(model)
                allowed.add(name)
            except RuntimeError as error:
                has(str(error), COPY)
    assert not allowed, allowed
    same(whole(model), before)


@on_ranks(2)
def test_reads_of_gathered_copies_are_allowed() -> None:
    model = sharded(Net(), backend="eager")
    weight = model.a.weight.detach()
    assert torch.equal(torch.add(weight, 1, out=torch.empty(13, 7)), weight + 1)
    assert torch.equal(torch.zeros(13, 7).copy_(weight), weight)
    assert torch.equal(torch.relu(weight), torch.nn.functional.relu(weight, inplace=False))
    assert torch.equal((weight * 2).mul_(2), weight * 4)
    assert torch.equal(weight.clone().zero_(), torch.zeros(13, 7))
    assert torch.equal(nn.init.constant_(weight.detach().clone(), 1), torch.ones(13, 7))


@on_ranks(2)
def test_changes_of_modules_are_refused() -> None:
    model = sharded(Net(), backend="eager")
    keys = list(model.state_dict())
    for change, words in CHANGES.values():
        with pytest.raises((RuntimeError, TypeError)) as caught:
            change(model)
        has(str(caught.value), words)
        assert "\n" not in str(caught.value)
        assert list(model.state_dict()) == keys
    square(model, 0).backward()


@on_ranks(2)
def test_parametrizations_after_compile_are_refused() -> None:
    model = sharded(Net(), backend="eager")
    has(message(lambda: parametrizations.weight_norm(model.a)), COPY)
    has(message(lambda: parametrizations.orthogonal(model.b)), ["Linear of a compiled model", BEFORE])


@pytest.mark.parametrize("backend", ["interpreter", "eager"])
@on_ranks(2)
def test_modules_put_in_after_compile_are_refused_when_called(backend: str) -> None:
    model = sharded(Net(), backend=backend)
    square(model, 0).backward()
    kept, model.b = model.b, nn.Linear(13, 7)
    has(message(lambda: square(model, 0)), ["'b.weight' was put into the model after zerofx.compile", "change modules"])
    model.b = nn.Linear(13, 7).requires_grad_(False)
    square(model, 0).backward()
    model.b = kept
    square(model, 0).backward()
    model.b = copy.deepcopy(kept)
    square(model, 0).backward()


class Decayed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum() + sum(parameter.square().sum() for parameter in self.parameters())


class Branching(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: -self.a(y), (x,))


@on_ranks(2)
def test_forwards_that_compute_with_stored_parts_are_refused() -> None:
    has(message(lambda: square(sharded(Decayed()), 0), ModelError), ["self.parameters()", "as attributes"])
    has(message(lambda: square(sharded(Branching()), 0), ModelError), ["torch.cond", "torch.where"])


@on_ranks(2)
def test_an_optimizer_from_before_compile_is_refused_when_it_steps() -> None:
    for make in (torch.optim.SGD, torch.optim.AdamW):
        model = Net()
        optimizer = make(model.parameters(), lr=0.1)
        sharded(model, backend="eager")
        square(model, 0).backward()
        has(
            message(optimizer.step),
            [f"this {make.__name__} was built before zerofx.compile", "'a.weight'", "afterwards"],
        )
        make(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_stored_parts_can_be_written() -> None:
    model = sharded(Net(), backend="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2)
        model.get_parameter("a.bias").to_local().add_(1)
    assert {name: value.unique().tolist() for name, value in whole(model).items()} == {
        "a.weight": [2.0], "a.bias": [3.0], "norm.weight": [2.0], "norm.bias": [2.0], "b.weight": [2.0],
        "b.bias": [2.0], "scale": [1.0],
    }  # fmt: skip
