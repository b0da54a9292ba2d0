"""What the profiler, the structured trace and TensorBoard get to see of a step on two ranks."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.distributed.ranks import Net, has, message, on_ranks, rows, sharded
from zerofx.config import Config, ConfigError
from zerofx.measured import measured
from zerofx.planning.hardware import H100
from zerofx.timeline import timeline
from zerofx.trace import trace


def step_of(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return zerofx.train_step(model, lambda net, x: net(x).square().mean(), optimizer, **options)


@on_ranks(2)
def test_a_measured_timeline_has_the_names_of_the_forecast() -> None:
    model = sharded(Net())
    step, x = step_of(model), rows(dist.get_rank())
    step(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(x)
    seen = measured(profile)
    program = trace(Net, [x], Config(persist_below=0), 2, "gloo", loss_fn=lambda net, x: net(x).square().mean())
    foreseen = timeline(program, H100)

    def names(found: Any, kind: str) -> list[tuple[str, str]]:
        return sorted((span.part, span.name) for span in found.spans if span.kind == kind)

    assert names(seen, "collective") == names(foreseen, "collective") != []
    assert {name for _, name in names(foreseen, "wait")} <= {name for _, name in names(seen, "wait")}
    assert {span.part for span in seen.spans if span.name == "mm"} == {"backward"}
    events = json.loads(seen.chrome_trace())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {span.name for span in seen.spans}
    assert all(span.end >= span.start >= 0 for span in seen.spans)
    with torch.profiler.profile() as empty:
        rows(0) + 1
    has(message(lambda: measured(empty), ValueError), ["backend='interpreter'"])


@on_ranks(2)
def test_the_structured_trace_gets_the_program_after_each_pass() -> None:
    found: dict[str, str] = {}

    class Keep(logging.Handler):
        def emit(self, record: Any) -> None:
            if name := record.metadata.get("artifact", {}).get("name", ""):
                found[name] = record.payload

    logger, handler = logging.getLogger("torch.__trace"), Keep()
    logger.addHandler(handler)
    try:
        model = sharded(Net())
        model(rows(0)).sum().backward()
    finally:
        logger.removeHandler(handler)
    steps = zerofx.inspect(model).graphs[0].steps
    ours = {name: text for name, text in found.items() if name.startswith("zerofx_")}
    assert ours == {f"zerofx_graph_0_{place:02}_{step.name}": step.text for place, step in enumerate(steps)}


class Kept:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


@on_ranks(2)
def test_a_callback_writes_scalars_on_the_first_rank() -> None:
    kept = Kept()
    with zerofx.TensorBoard(kept, tokens=lambda x: x.numel(), every=2, start=5) as board:
        step = step_of(sharded(Net()), callback=board)
        results = [step(rows(dist.get_rank())) for _ in range(3)]
        assert {number for *_, number in kept.scalars} == ({5, 6} if dist.get_rank() == 0 else set())
    if dist.get_rank():
        assert not kept.scalars
        return
    losses = [(value, number) for name, value, number in kept.scalars if name == "loss"]
    assert losses == [(float(result.loss), 5 + place) for place, result in enumerate(results)]
    each = [name for name, *_ in kept.scalars]
    assert each.count("tokens_per_second") == each.count("memory_bytes") == each.count("steps_per_second") == 2
    values = {name: value for name, value, _ in kept.scalars}
    assert values["tokens_per_second"] == pytest.approx(values["steps_per_second"] * 28 * 2)
    assert 10**7 < values["memory_bytes"] < 10**11


@on_ranks(1)
def test_what_is_no_callback_is_refused() -> None:
    has(message(lambda: step_of(sharded(Net()), callback=3), ConfigError), ["callback=3", "a function of the step's"])
    has(message(lambda: zerofx.TensorBoard(Kept(), every=0), ConfigError), ["every=0"])
