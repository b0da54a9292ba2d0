"""In one process without any group a model trains as plain torch does, and can be inspected."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import zerofx
from tests.models import Case, mlp_odd
from tests.training import adamw_default, train


@pytest.fixture(autouse=True)
def without_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    torch.compiler.reset()
    yield
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["interpreter", "eager"])
@pytest.mark.parametrize("stage", [0, 3])
def test_it_trains_bitwise_as_plain_torch(stage: int, backend: str) -> None:
    case, plain = mlp_odd(), mlp_odd()
    assert zerofx.compile(case.model, stage=stage, backend=backend, persist_below=0) is case.model
    ours, theirs = (train(each, adamw_default, 3, 0) for each in (case, plain))
    assert ours.losses == theirs.losses
    for got, wanted in ((ours.state, theirs.state), (ours.grads, theirs.grads)):
        assert got.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def test_parameters_stay_what_they_were() -> None:
    case = mlp_odd()
    before = dict(case.model.named_parameters())
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    zerofx.compile(case.model, backend="interpreter", persist_below=0)
    assert all(parameter is before[name] for name, parameter in case.model.named_parameters())
    assert type(case.model.first) is nn.Linear
    case.loss(case.model, case.batch(0, 0)).backward()
    optimizer.step()


def test_its_graphs_are_there_and_send_nothing() -> None:
    case = mlp_odd()
    zerofx.compile(case.model, backend="interpreter", persist_below=0)
    case.loss(case.model, case.batch(0, 0)).backward()
    inspection = zerofx.inspect(case.model)
    assert [graph.kind for graph in inspection.graphs] == ["train"]
    assert inspection.graphs[0].steps[-1].text.startswith("mesh(dp=1)\n")
    assert (inspection.collectives().bytes_sent, inspection.collectives().bound) == (0, 0)


def test_a_second_compile_is_refused() -> None:
    model = zerofx.compile(nn.Linear(3, 3), backend="eager")
    with pytest.raises(ValueError, match=r"zerofx\.compile was already called on this model: compile a model once"):
        zerofx.compile(model, backend="eager")


def test_a_wrong_argument_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(
        ValueError, match=r"zerofx\.compile\(stage=4\) is not possible: stage must be one of 0, 1, 2, 3"
    ):
        zerofx.compile(model, stage=4)
    assert set(vars(model)) == set(vars(nn.Linear(3, 3)))


def test_copies_and_new_modules_train() -> None:
    case = mlp_odd()
    zerofx.compile(case.model, backend="interpreter", persist_below=0)
    case.loss(case.model, case.batch(0, 0)).backward()
    other = copy.deepcopy(case.model)
    other.last = nn.Linear(5, 1)
    train(Case(other, case.batch, case.loss), adamw_default, 1, 0)
    assert other.last.weight.grad is not None
    assert torch.equal(case.model.last.weight, mlp_odd().model.last.weight)


def test_a_model_without_parameters_runs() -> None:
    model = zerofx.compile(nn.Sequential(nn.ReLU()), backend="interpreter")
    assert torch.equal(model(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_torchruns_environment_makes_a_group() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with mock.patch.dict("os.environ", environment), mock.patch("torch.distributed.init_process_group") as made:
        made.side_effect = RuntimeError("stop here")
        with pytest.raises(RuntimeError, match="stop here"):
            zerofx.compile(nn.Linear(3, 3), backend="eager")
    made.assert_called_once_with("gloo")
