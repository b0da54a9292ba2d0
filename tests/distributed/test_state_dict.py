"""State dicts, plain or sharded, go into and out of a compiled model; conversions keep it sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.ranks import Net, backward, has, message, on_ranks, rows, same, sharded, square, trained, whole

FULL = StateDictOptions(full_state_dict=True)


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(Net()), nn.Linear(7, 7))


def placements(model: nn.Module) -> dict[str, object]:
    """How each parameter is stored: here always cut."""
    found = {name: param.placements[0] for name, param in model.named_parameters()}
    assert all(isinstance(placement, Shard) for placement in found.values())
    return found


def seeded(seed: int, make: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    return make()


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_plain_tensors_load_into_a_compiled_model(assign: bool) -> None:
    model, other = sharded(seeded(0, nested), backend="eager"), seeded(1, nested)
    before, given = placements(model), other.state_dict()
    assert str(model.load_state_dict(given, assign=assign)) == "<All keys matched successfully>"
    same(whole(model), whole(other))
    assert placements(model) == before
    assert not any(isinstance(value, DTensor) for value in given.values())
    backward(model, other)


@on_ranks(2)
def test_a_compiled_models_state_loads_into_plain_and_compiled_models() -> None:
    model, plain = trained(Net, backend="eager")
    other = sharded(seeded(1), backend="eager")
    other.load_state_dict(model.state_dict())
    same(whole(other), whole(model))
    with torch.no_grad():
        other.get_parameter("a.weight").zero_()
    same(whole(model), whole(plain))
    loaded = seeded(2)
    loaded.load_state_dict(whole(model))
    assert torch.allclose(loaded(rows(0)), plain(rows(0)), atol=1e-6)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_tensors_sharded_in_another_way_are_stored_as_the_model_does(assign: bool) -> None:
    model, _ = trained(Net, backend="eager")
    before, out, stored = whole(model), model(rows(0)), placements(model)
    mesh = model.get_parameter("a.weight").device_mesh
    given = {name: distribute_tensor(value, mesh, [Replicate()]) for name, value in before.items() if name != "scale"}
    given["b.weight"] = distribute_tensor(before["b.weight"], mesh, [Shard(0)])
    model.load_state_dict(given, assign=assign, strict=False)
    assert placements(model) == stored
    assert torch.equal(model(rows(0)), out)


@on_ranks(2)
def test_wrong_shapes_and_names_are_refused_as_torch_does() -> None:
    model = sharded(Net(), backend="eager")
    before, state = whole(model), Net().state_dict()
    has(
        message(lambda: model.load_state_dict({**state, "a.weight": torch.zeros(3, 3)})), ["size mismatch for a.weight"]
    )
    del state["b.bias"]
    has(
        message(lambda: model.load_state_dict({**state, "new": torch.zeros(1)})), ['Missing key(s) in state_dict: "b.b']
    )
    assert model.load_state_dict({"new": torch.zeros(1)}, strict=False).unexpected_keys == ["new"]
    assert before.keys() == whole(model).keys()


@on_ranks(2)
def test_distributed_checkpoint_gets_and_sets_full_state() -> None:
    model, plain = trained(Net, backend="eager")
    same(get_model_state_dict(model, options=FULL) or whole(plain), whole(plain))  # empty but on the first rank
    other = seeded(1)
    set_model_state_dict(model, other.state_dict(), options=FULL)
    same(whole(model), whole(other))


def save_and_load(folder: Path) -> None:
    model, _ = trained(Net, backend="eager")
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = sharded(seeded(1), backend="eager")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    same(whole(other), whole(model))


def test_a_sharded_checkpoint_comes_back(pool: object, tmp_path: Path) -> None:
    pool(2).run(save_and_load, tmp_path)


@on_ranks(2)
def test_optimizer_state_is_cut_like_the_parameters() -> None:
    model, plain = trained(Net, backend="eager")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
    for parameter, state in optimizers[0].state.items():
        assert state["exp_avg"].placements == parameter.placements
        assert state["exp_avg"].to_local().shape == parameter.to_local().shape
    state = get_optimizer_state_dict(model, optimizers[0], options=FULL)["state"]
    averages = {name: values["exp_avg"] for name, values in state.items()}
    names = dict(plain.named_parameters())
    expected = {name: optimizers[1].state[param]["exp_avg"] for name, param in names.items()}
    same(averages if dist.get_rank() == 0 else expected, expected)
    same(whole(model), whole(plain))


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float64, "interpreter"), (torch.bfloat16, "eager")])
@on_ranks(2)
def test_a_converted_model_stays_sharded_and_tied(dtype: torch.dtype, backend: str) -> None:
    model, plain = trained(Tied, backend=backend)
    for each in (model, plain):
        each.to(dtype)
    assert model.get_parameter("a.weight") is model.get_parameter("b.weight")
    assert placements(model) == dict.fromkeys(("a.weight", "a.bias", "b.bias"), Shard(0))
    assert all(p.dtype is dtype and p.grad.dtype is dtype for p in model.parameters())
    same(whole(model), whole(plain))
    assert torch.equal(model(rows(0).to(dtype)), plain(rows(0).to(dtype)))
    if dtype is torch.float64:
        backward(model, plain, lambda model, rank: model(rows(rank).double()).square().mean())


@on_ranks(2)
def test_an_optimizer_from_before_a_conversion_is_refused() -> None:
    model, _ = trained(Net, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double()
    has(message(optimizer.step, RuntimeError), ["SGD was built before a dtype conversion", "model.parameters() after"])
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_a_move_to_another_device_is_refused_and_changes_nothing() -> None:
    model, plain = trained(Net, backend="eager")
    has(message(lambda: model.to("meta"), RuntimeError), ["stays on its device", "before zerofx.compile"])
    same(whole(model), whole(plain))
    backward(model, plain, square)
