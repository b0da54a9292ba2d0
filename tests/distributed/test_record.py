"""zerofx.compile(record=...) keeps what every rank was asked for and what the passes made of each graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.distributed.ranks import Net, has, message, on_ranks, rows, sharded, square
from zerofx.config import ConfigError
from zerofx.reporting.build import build
from zerofx.reporting.compare import differences
from zerofx.reporting.html import write_report
from zerofx.reporting.recording import RankRecord, read_ranks


def recorded(folder: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Trains and evaluates a model, and returns what its inspection has of each graph."""
    model = sharded(Net(), record=folder)
    square(model, 0).backward()
    with torch.no_grad():
        model(rows(0))
    inspection = zerofx.inspect(model)
    inspection.record(folder / "again")
    inspection.report(folder / f"rank-{dist.get_rank()}.html")
    return [(graph.kind, [(step.name, step.text) for step in graph.steps]) for graph in inspection.graphs]


@pytest.fixture(scope="module")
def run(pool: object, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RankRecord]]:
    folder = tmp_path_factory.mktemp("run")
    (wanted, other) = pool(2).run(recorded, folder)
    assert wanted == other
    ranks = read_ranks(folder)
    for rank in ranks:
        assert [(g.kind, [(s.name, s.text) for s in g.steps]) for g in rank.graphs] == wanted
    return folder, ranks


def test_every_rank_records_all_graphs_after_each_pass(run: tuple[Path, list[RankRecord]]) -> None:
    folder, ranks = run
    assert [(rank.head.rank, rank.head.world, rank.head.place) for rank in ranks] == [
        (0, 2, {"dp": 0}),
        (1, 2, {"dp": 1}),
    ]
    assert [graph.kind for graph in ranks[0].graphs] == ["train", "inference"]
    assert ranks[0].head.config["stage"] == "3" and ranks[0].head.config["torch"] == torch.__version__
    names = [param["name"] for param in ranks[0].head.params]
    assert names == ["a.weight", "a.bias", "norm.weight", "norm.bias", "b.weight", "b.bias"]
    assert sum(file.stat().st_size for file in folder.glob("rank-*/*.gz")) < 60_000
    assert differences(ranks) == []


def test_what_is_recorded_later_of_a_model_is_the_same(run: tuple[Path, list[RankRecord]]) -> None:
    folder, ranks = run
    again = read_ranks(folder / "again")
    for rank, later in zip(ranks, again, strict=True):
        assert later.graphs == rank.graphs
        assert (later.head.config, later.head.params, later.head.place) == (
            rank.head.config,
            rank.head.params,
            rank.head.place,
        )


def test_nodes_know_their_module_and_their_line(run: tuple[Path, list[RankRecord]]) -> None:
    _, ranks = run
    origins = ranks[0].graphs[0].origins["joint"]
    found = {(origin.module, origin.source.split(" in ")[-1]) for origin in origins.values() if origin.module}
    assert {module for module, _ in found} == {"a", "norm", "b"}
    sources = {origin.source for origin in origins.values() if origin.source}
    assert sources and all(source.startswith("tests/distributed/ranks.py:") for source in sources)
    assert {origin.backward for origin in origins.values()} == {True, False}


def test_the_report_has_the_numbers_of_the_inspection(run: tuple[Path, list[RankRecord]]) -> None:
    folder, ranks = run
    program = build(ranks)["programs"][0]
    assert program["label"] == "graph 0 · train · all ranks"
    assert program["missing"] == "" and program["memory"] and program["time"]["exposed"] > 0
    assert {part["graph"] for part in program["memory"]} == {"forward", "backward"}
    assert {row["part"] for row in program["collectives"]} == {"forward", "backward"}
    modules = {program["modules"][node[7]] for node in program["nodes"].values()}
    assert {"a", "norm", "b"} <= modules
    page = (folder / "rank-0.html").read_text()
    assert page.startswith("<!doctype html>") and "http-equiv" not in page and "src=" not in page.split("<script")[0]


def test_ranks_that_ask_for_other_things_are_recorded_before_they_end(pool: object, tmp_path: Path) -> None:
    def other_stages() -> None:
        zerofx.compile(Net(), stage=3 - dist.get_rank(), backend="interpreter", record=tmp_path)

    errors = pool(2).run_errors(other_stages)
    assert all("RankMismatchError" in (error or "") for error in errors)
    found = {each.what: [value for _, value in each.groups] for each in differences(read_ranks(tmp_path))}
    assert found["the argument or version stage"] == ["3", "2"]
    assert write_report(tmp_path / "fault.html", read_ranks(tmp_path)).exists()


@on_ranks(2)
def test_a_record_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    has(message(lambda: sharded(Net(), record=7), ConfigError), ["record=7", "the name of a folder, or None"])
    file = tmp_path / f"file{dist.get_rank()}"
    file.write_text("")
    has(message(lambda: sharded(Net(), record=file / "run"), ConfigError), ["cannot be written"])


def pipelined(folder: Path) -> None:
    pipeline = zerofx.Pipeline(2, "1f1b", 2)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    zerofx.compile(
        model, backend="interpreter", pipeline=pipeline, example_inputs=((rows(0, 2, 8),), {}), record=folder
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = zerofx.train_step(model, lambda net, x: net(x).square().mean(), optimizer, microbatches=2)
    step(rows(1, 4, 8))


def test_a_pipeline_records_its_stages_and_its_chart(pool: object, tmp_path: Path) -> None:
    pool(2).run(pipelined, tmp_path)
    ranks = read_ranks(tmp_path)
    assert [rank.head.place["pp"] for rank in ranks] == [0, 1]
    assert [graph.name for rank in ranks for graph in rank.graphs if graph.kind == "train"] == ["stage 0", "stage 1"]
    assert differences(ranks) == []
    chart = build(ranks)["pipeline"]["chart"]
    assert [sorted(action[0] for action in rank) for rank in chart] == [["B", "B", "F", "F"]] * 2
