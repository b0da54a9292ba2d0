"""What a newcomer gets wrong ends at once, in one sentence with the remedy: steps, plans, the inspector, the kit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from zerofx.__main__ import main
from zerofx.reporting.terminal import show_run
from zerofx.testing import assert_collectives, assert_same_meaning, chain, linear, traced

X, Y = torch.randn(4, 6), torch.randn(4, 3)
OTHER = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def compiled(**options: Any) -> nn.Module:
    return zerofx.compile(nn.Linear(6, 3), backend="interpreter", **options)


def step(loss_fn: Callable[..., Any] = loss_of, **options: Any) -> zerofx.TrainStep:
    model = compiled()
    return zerofx.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), **options)


def pipeline(*args: Any) -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    cut = zerofx.Pipeline(2, "zbv", 4)
    return zerofx.compile(layers, backend="interpreter", pipeline=cut, example_inputs=(args, {}))


def plan(model_fn: Any = lambda: nn.Linear(6, 3), batch: Any = (X,), **options: Any) -> Any:
    return zerofx.plan(model_fn, batch, **{"world": 2, "loss_fn": lambda model, x: model(x).sum()} | options)


def inspected() -> Any:
    model = compiled()
    model(X)
    return zerofx.inspect(model)


class Wrong(NamedTuple):
    """A call, and words of what it raises."""

    call: Callable[[], Any]
    kind: type[Exception]
    words: str


VALUE, TYPE, LOOKUP = ValueError, TypeError, LookupError
WRONG = {
    "ignored_params": Wrong(
        lambda: compiled(ignored_params=[nn.Parameter(X)]),
        VALUE,
        r"number 0, of shape \(4, 6\), is no parameter of the model: pass those of the model itself",
    ),
    "init_fn": Wrong(lambda: compiled(init_fn=3), VALUE, r"init_fn=3\).* must be a function of a module"),
    "progress": Wrong(lambda: compiled(progress="no"), VALUE, r"progress='no'\).* must be None, True or False"),
    "scheduler": Wrong(
        lambda: step(scheduler=torch.optim.lr_scheduler.StepLR(OTHER, 1)),
        VALUE,
        "scheduler must be one that was built from the optimizer that the step is given",
    ),
    "a close name": Wrong(lambda: step(micro_batches=2), VALUE, "no argument 'micro_batches'.* one is 'microbatches'"),
    "another name": Wrong(lambda: step(max_norm=1.0), VALUE, r"train_step\(max_norm=\.\.\.\) is .*: pass clip"),
    "a list": Wrong(lambda: step()([X, Y]), TYPE, r"called with \(list\).* argument: 'y'\): call step\(\*batch\)"),
    "a detached loss": Wrong(
        lambda: step(lambda *batch: loss_of(*batch).detach())(X, Y), TYPE, "no gradient: return it without detach"
    ),
    "a loss of rows": Wrong(lambda: step(lambda model, x, y: model(x))(X, Y), TYPE, r"\(4, 3\) .*return the mean"),
    "few micro-batches": Wrong(
        lambda: step(microbatches=3)(iter([(X, Y)] * 2)), VALUE, "2 micro-batches left, and the step takes 3: give it"
    ),
    "example_inputs": Wrong(lambda: pipeline(X, X), VALUE, "the model does not take .* give example_inputs"),
    "their shape": Wrong(
        lambda: pipeline(Y), VALUE, r"same reduction dim, but got \[4, 3\].*; .*mend example_inputs if they do not fit"
    ),
    "no_sync": Wrong(lambda: pipeline(X).no_sync(), RuntimeError, "no_sync and .* a pipeline runs in .*: leave them"),
    "a model to plan": Wrong(
        lambda: plan(nn.Linear(6, 3)), VALUE, r"zerofx.plan\(model_fn='Linear'\).* a function that makes the model"
    ),
    "no model to plan": Wrong(lambda: plan(lambda: None), VALUE, "must return a torch.nn.Module, not NoneType"),
    "a tensor as batch": Wrong(lambda: plan(batch=X), VALUE, r"batch must be a tuple .* such as \(x,\) for one tensor"),
    "no batch": Wrong(lambda: plan(batch=None), VALUE, "batch must be a tuple"),
    "a wrong shape": Wrong(
        lambda: plan(batch=(Y,)), VALUE, r"cannot be traced: .* dim, but got \[4, 3\].*give a batch"
    ),
    "stages alone": Wrong(lambda: plan(pipeline=4), VALUE, r"must be a zerofx.Pipeline, such as zerofx.Pipeline\(4"),
    "no hardware": Wrong(lambda: plan(hardware=None), VALUE, "hardware must be one of a100.*cpu.*a TOML file"),
    "a stage to plan": Wrong(lambda: plan(stage=5), VALUE, r"^zerofx\.plan\(stage=5\) is not possible"),
    "no ranks": Wrong(lambda: plan(world=0), VALUE, r"^zerofx\.plan\(world=0\) is not possible"),
    "a step": Wrong(lambda: inspected().print(99), LOOKUP, "graph 0 has no step 99: give one of capture, .* to"),
    "a name": Wrong(lambda: inspected().diff(0, "fuse"), LOOKUP, "graph 0 has no step 'fuse': give one of capture"),
    "a graph": Wrong(lambda: inspected().print(graph=1), LOOKUP, "no graph 1: the model has the graphs 0 to 0"),
    "a drawing": Wrong(lambda: inspected().draw("it.xyz"), VALUE, "drawn as SVG, .* give a name in .svg"),
    "ranks of a program": Wrong(lambda: linear(0), VALUE, "ranks is 0: give an int, 1 or more"),
    "width of a program": Wrong(lambda: chain(width=0), VALUE, "width is 0: give an int"),
    "dtype of a program": Wrong(lambda: linear(dtype="float32"), VALUE, "dtype is 'float32': give one of f64, f32"),
    "a model to trace": Wrong(lambda: traced(nn.Linear(6, 3), [X]), TYPE, r"not a Linear: pass lambda: Model\(\)"),
    "a tensor to trace": Wrong(lambda: traced(lambda: nn.Linear(6, 3), X), TYPE, r"not a Tensor: pass \[x\]"),
    "a shape to trace": Wrong(
        lambda: traced(lambda: nn.Linear(6, 3), [Y]), VALUE, "cannot be traced: .*example_inputs"
    ),
    "no collectives": Wrong(
        lambda: assert_collectives(linear(), joint=[]), VALUE, "no collectives yet.*apply InsertAll"
    ),
    "no program": Wrong(lambda: assert_same_meaning(3, 4), TYPE, "a int is no program"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_the_remedy(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case = WRONG[name]
    with pytest.raises(case.kind, match=case.words) as raised:
        case.call()
    assert "\n" not in str(raised.value)
    assert "Traceback" not in capfd.readouterr().err


def test_a_mesh_of_several_ranks_says_how_to_start_them() -> None:
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    with (
        mock.patch.dict(os.environ, bare, clear=True),
        pytest.raises(ValueError, match=r"has not set RANK, .*: start the script by .*torch.distributed.run"),
    ):
        zerofx.Mesh(dp=2)


def test_a_report_goes_into_a_folder(tmp_path: Path) -> None:
    assert inspected().report(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--world", "0"], "zerofx.plan(world=0) is not possible"),
        (["--world", "2", "--pipeline", "0"], "zerofx.Pipeline(stages=0) is not possible"),
        (["--world", "2", "--sequence", "0"], "--sequence 0 is not possible: give 1 or more"),
        (["--world", "2", "--json", "missing/plan.json"], "missing/plan.json cannot be written"),
        (["--world", "2", "--png", "plan.png"], "needs matplotlib: pip install 'zerofx[bench]'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_the_plan_command_says_what_is_wrong_before_it_works(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["zerofx", "plan", "--preset", "gpt2", "--hardware", "cpu", *options]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(sys.modules, {"matplotlib": None}),
        mock.patch("zerofx.planning.plan.Shapes", side_effect=AssertionError("it worked already")),
        pytest.raises(SystemExit, match="1"),
    ):
        main()
    found = capsys.readouterr().err
    assert words in found and found.count("\n") == 1


def test_nothing_is_cut_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled(record=tmp_path)
    model(X).sum().backward()
    show_run(tmp_path, 0, 0, {"step": "-1", "diff": ("0", "-1"), "collectives": True, "memory": True})
    told = capsys.readouterr().out
    text = zerofx.inspect(model).graphs[0].steps[-1].text
    assert set(text.splitlines()) <= set(told.splitlines()) and max(map(len, text.splitlines())) > 80
