"""A compiled model looks and acts like the module that the user wrote."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from tests.distributed.ranks import (
    Net,
    backward,
    both,
    gradients,
    message,
    on_ranks,
    rows,
    same,
    sharded,
    square,
    trained,
    whole,
)


class Registering(nn.Module):
    """Keeps a list of its subclasses, as plug-in systems do."""

    known: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        Registering.known.append(cls)


class Registered(Registering):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))


class Collections(nn.Module):
    """Parameters in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(7, 7)) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(7))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = torch.tanh(x @ step)
        return x + self.named["shift"]


class TwoHeads(Net):
    """Has another entry than `forward`."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x))


@on_ranks(2)
def test_classes_names_and_attributes_are_the_users() -> None:
    model, plain = both(Net, backend="eager")
    assert repr(model) == repr(plain)
    assert isinstance(model, Net) and isinstance(model.a, nn.Linear)
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(ours), name) == getattr(type(theirs), name)
    assert list(model.state_dict()) == list(plain.state_dict())
    for ours, theirs in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(ours[1], nn.Parameter) and isinstance(ours[1], DTensor)
        assert (ours[0], ours[1].shape, ours[1].numel()) == (theirs[0], theirs[1].shape, theirs[1].numel())
    assert (model.a.in_features, model.norm.eps) == (7, plain.norm.eps)


@on_ranks(2)
def test_a_class_that_registers_its_subclasses_sees_none() -> None:
    sharded(Registered(), backend="eager")
    assert Registering.known == [Registered]


@on_ranks(2)
def test_parameters_are_found_by_name() -> None:
    model = sharded(nn.Sequential(Net(), nn.ReLU()), backend="eager")
    found = model.get_parameter("0.a.weight")
    assert found is dict(model.named_parameters())["0.a.weight"]
    assert found is model[0].a.get_parameter("weight")
    assert "nothing" in message(lambda: model.get_parameter("0.a.nothing"), AttributeError)


@on_ranks(2)
def test_containers_find_the_parameters_inside_them() -> None:
    model = sharded(nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(7, 7))]), nn.ReLU()), backend="eager")
    for each in (model, copy.deepcopy(model)):
        weight = dict(each.named_parameters())["0.0.0.weight"]
        assert type(each[0]) is nn.ModuleList and type(each[0][0]) is nn.Sequential
        assert each[0].get_parameter("0.0.weight") is each[0][0].get_parameter("0.weight") is weight
    assert copy.deepcopy(model[0]).get_parameter("0.0.weight") is not model[0].get_parameter("0.0.weight")


@on_ranks(2)
def test_flags_and_gradients_of_parameters_are_carried_over() -> None:
    model = Net()
    model.a.weight.no_decay = True
    square(model, 0).backward()
    before = gradients(model)
    sharded(model, backend="eager")
    assert model.get_parameter("a.weight").no_decay is True
    assert not hasattr(model.get_parameter("b.weight"), "no_decay")
    same(gradients(model), before)


@on_ranks(2)
def test_parameters_can_be_dropped_after_compile() -> None:
    model, plain = trained(Net)
    for each in (model, plain):
        each.zero_grad()
        each.a.bias = None
    backward(model, plain)
    assert model.a.bias is None
    del model.b.bias
    assert not hasattr(model.b, "bias")


@on_ranks(2)
def test_functional_call_uses_the_given_whole_tensors() -> None:
    model, plain = trained(Net)
    given = {name: torch.full(p.shape, 0.5, requires_grad=True) for name, p in plain.named_parameters()}
    grads: list[dict[str, torch.Tensor]] = []
    for each in (model, plain):
        loss = torch.func.functional_call(each, given, rows(dist.get_rank())).square().mean()
        grads.append(dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True)))
    same(*grads)
    backward(model, plain)


@on_ranks(2)
def test_parameter_lists_and_dicts_are_sharded() -> None:
    model, _ = trained(Collections)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert (len(model.steps), list(model.named.keys())) == (3, ["shift"])


@on_ranks(2)
def test_other_methods_and_submodules_train_outside_of_graphs() -> None:
    trained(TwoHeads, lambda model, rank: model.encode(rows(rank)).square().mean())
    trained(TwoHeads, lambda model, rank: model.forward(rows(rank)).square().mean())
    trained(TwoHeads, lambda model, rank: model.a(rows(rank)).square().mean())


@on_ranks(2)
def test_a_penalty_on_parameters_read_outside_of_the_model_trains() -> None:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        return square(model, rank) + model.a.weight.square().sum() + model.norm.bias.sum()

    trained(Net, loss)


@on_ranks(2)
def test_a_parameter_read_outside_of_the_model_is_whole() -> None:
    model, plain = both(Net, backend="eager")
    assert torch.equal(model.a.weight, plain.a.weight)
    assert (model.a.weight.detach().numpy() == plain.a.weight.detach().numpy()).all()
    assert type(model.a.weight * 2) is torch.Tensor


@on_ranks(2)
def test_a_compiled_model_can_be_a_part_of_a_plain_one() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    model, plain = both(Net)
    backward(Wrapper(model), Wrapper(plain))


@on_ranks(2)
def test_outputs_of_any_structure_come_back() -> None:
    class Structured(Net):
        def forward(self, x: torch.Tensor, *, note: str) -> dict[str, object]:
            return {"y": super().forward(x), "none": None, "rest": (x, 3, note)}

    model, _ = trained(Structured, lambda model, rank: model(rows(rank), note="a")["y"].square().mean())
    out = model(rows(0), note="b")
    assert (out["none"], out["rest"][1:], torch.equal(out["rest"][0], rows(0))) == (None, (3, "b"), True)


@on_ranks(2)
def test_a_moving_average_of_the_model_follows_it() -> None:
    model, plain = trained(Net, backend="eager")
    averages = [torch.optim.swa_utils.AveragedModel(each) for each in (model, plain)]
    for each, average in zip((model, plain), averages, strict=True):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        average.update_parameters(each)
        average.update_parameters(each)
    same(whole(averages[0]), whole(averages[1]))
