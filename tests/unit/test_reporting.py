"""What a record keeps comes back, and what the report is built of is what the program's text says."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.synthetic_record import PER_LAYER, record
from zerofx.manager import Step
from zerofx.origins import module_name, source_line
from zerofx.reporting.build import build
from zerofx.reporting.compare import differences, named
from zerofx.reporting.lines import Lines, text_of
from zerofx.reporting.measures import measures_of, measures_of_text
from zerofx.reporting.recording import RankRecord, RecordError, clear_beyond, read_ranks, write_rank
from zerofx.reporting.rows import Rows
from zerofx.reporting.terminal import show_run
from zerofx.text import parse, show
from zerofx.textgraph import read

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/*.txt"))
NOTHING = {"step": None, "diff": None, "collectives": False, "memory": False}


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=12), max_size=6))
def test_texts_come_back_from_their_runs_and_lines_are_kept_once(texts: list[list[str]]) -> None:
    lines = Lines()
    runs = [lines.runs(text) for text in texts]
    assert len(lines.all) == len({line for text in texts for line in text})
    assert [text_of(lines.all, each) for each in runs] == ["".join(f"{line}\n" for line in text) for text in texts]


def test_a_text_that_differs_in_one_line_costs_three_runs() -> None:
    lines = Lines()
    text = [str(i) for i in range(100)]
    assert lines.runs(text) == [(0, 100)]
    assert lines.runs([*text[:40], "new", *text[41:]]) == [(0, 40), (100, 1), (41, 59)]


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_rows_are_the_nodes_of_the_program(file: Path) -> None:
    for written in file.read_text().split("# ---\n"):
        text = written[written.index("mesh(") :]
        found = Rows([Step("it", text, 0.0)], {})
        (step,), rows = found.steps, found.lines
        for graph, wanted in zip(step.graphs, read(text).graphs, strict=True):
            assert graph.name == wanted.name
            assert [rows[n] for n in graph.ops] == list(wanted.lines)
            assert [rows[n] for n in graph.inputs] == list(wanted.inputs)
            assert [(rows[n].name, rows[n].role) for n in graph.outputs] == [(o.name, o.role) for o in wanted.outputs]


def test_a_record_comes_back_from_its_folder(tmp_path: Path) -> None:
    ranks = [record(3), record(3, rank=1)]
    for each in ranks:
        write_rank(tmp_path, each)
    assert read_ranks(tmp_path) == ranks
    write_rank(tmp_path, replace(ranks[1], graphs=()))  # a new run replaces what an earlier one has left
    assert read_ranks(tmp_path)[1].graphs == ()


def test_a_folder_without_a_record_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no record of zerofx: give the folder"):
        read_ranks(tmp_path)
    write_rank(tmp_path, record(1))
    file = next(tmp_path.glob("*/graph-*.json.gz"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(RecordError, match=r"graph-000.json.gz cannot be read .* record the run again"):
        read_ranks(tmp_path)
    file.write_bytes(whole)
    head = next(tmp_path.glob("*/rank.json.gz"))
    head.write_bytes(gzip.compress(json.dumps({"format": 0, "other": 1}).encode()))
    with pytest.raises(RecordError, match="was written by another version of zerofx"):
        read_ranks(tmp_path)


def test_equal_ranks_share_a_program_and_have_no_difference() -> None:
    data = build([record(3), record(3, rank=1)])
    assert data["differences"] == []
    (program,) = data["programs"]
    assert program["label"] == "graph 0 · inference · all ranks" and program["ranks"] == [0, 1]
    assert [step["nodes"] for step in program["steps"]] == [3 * (PER_LAYER - 1), 3 * PER_LAYER]
    assert program["words"][0] == "The forward issues 3 all-gathers of 3 parameters; each rank sends 24 KiB."


def test_each_collective_has_its_bytes_and_the_nodes_before_its_wait() -> None:
    (program,) = build([record(2)])["programs"]
    assert [(row["kind"], row["params"], row["bytes"], row["ahead"]) for row in program["collectives"]] == [
        ("all_gather_into_tensor", (f"h.{i}.weight",), 64 * 64 * 4 // 2, 0) for i in range(2)
    ]
    assert program["params"][0] == ["h.0.weight", "f32", [64, 64], 0, 16384, 8192, 1, 0, []]


def test_the_first_difference_of_two_programs_is_told() -> None:
    (found,) = differences([record(3), record(3, rank=1, differs=True)])
    assert found.what.startswith("graph 0 after capture, first in line ")
    assert [(ranks, value.split(" = ")[1]) for ranks, value in found.groups] == [
        ((0,), "aten.relu.default(op_0_0)"),
        ((1,), "aten.gelu.default(op_0_0)"),
    ]


def batch_of(rows: int, offset: str, differs: bool = False, rank: int = 0) -> RankRecord:
    """A rank whose batch has so many rows, and an offset in its storage that is an input unless it is 0."""
    text = f"mesh(dp=2)\n\ndef inference(s77: sym({rows}){offset}, x: f32[s77, 4]):\n"
    text += f"    y: f32[s77, 4] = aten.{'tanh' if differs else 'relu'}.default(x)\n"
    text += f"    return [y @ out{', None' if offset else ''}]\n"
    one = record(1, rank)
    return replace(one, graphs=(replace(one.graphs[0], steps=(Step("capture", text, 0.0),), origins={}),))


def test_other_sizes_and_offsets_of_batches_are_no_difference() -> None:
    first, second = batch_of(8, ""), batch_of(9, ", offset: sym(s2, 12)", rank=1)
    assert differences([first, second]) == []
    (program,) = build([first, second])["programs"]
    assert program["ranks"] == [0, 1]
    (found,) = differences([first, batch_of(8, ", offset: sym(s2, 12)", differs=True, rank=1)])
    assert found.what == (
        "graph 0 after capture, first in line 4 (all issue the same collectives, so that no rank waits for another)"
    )
    assert found.groups == (
        ((0,), "y: f32[s77, 4] = aten.relu.default(x)"),
        ((1,), "y: f32[s77, 4] = aten.tanh.default(x)"),
    )


def test_programs_beside_the_model_come_last(tmp_path: Path) -> None:
    one = record(1)
    gather = replace(one.graphs[0], kind="gather")
    write_rank(tmp_path, replace(one, graphs=(gather, replace(one.graphs[0], index=1))))
    (found,) = read_ranks(tmp_path)
    assert [(graph.index, graph.kind) for graph in found.graphs] == [(0, "inference"), (1, "gather")]
    labels = [program["label"] for program in build([found])["programs"]]
    assert labels == ["graph 0 · inference · rank 0", "graph 1 · gather beside the model's graphs · rank 0"]


def test_ranks_of_an_earlier_run_are_gone(tmp_path: Path) -> None:
    for rank in range(4):
        write_rank(tmp_path, record(1, rank))
    clear_beyond(tmp_path, 2)
    assert [each.head.rank for each in read_ranks(tmp_path)] == [0, 1]
    assert sorted(file.parent.name for file in tmp_path.glob("*/*.gz")) == [
        "rank-00000",
        "rank-00000",
        "rank-00001",
        "rank-00001",
    ]


def test_sizes_that_are_symbols_are_measured_by_their_values_or_said_to_be_missing() -> None:
    text = batch_of(8, "").graphs[0].steps[0].text
    assert measures_of_text(text).memory[0].storages == (("y", 0, 8 * 4 * 4, 2, 3),)
    unknown = measures_of_text(text.replace("sym(8)", "sym(s77)").replace("s77:", "n:"))
    assert "cannot be measured" in unknown.missing
    one = record(1)
    program = build([replace(one, graphs=(replace(one.graphs[0], measures=unknown),))])["programs"][0]
    assert unknown.missing in program["words"]


def test_settings_missing_ranks_and_problems_are_told() -> None:
    first, second = record(1), record(1, rank=1)
    second.head.config["stage"] = "2"
    assert [(d.what, d.groups) for d in differences([first, second])] == [
        ("the argument or version stage", (((0,), "3"), ((1,), "2")))
    ]
    assert [(d.what, d.groups) for d in differences([first])] == [
        ("the record is not whole", (((1,), "wrote nothing here"),))
    ]
    second = record(1, rank=1)
    second.head.problem = "ConfigError: no"
    assert differences([first, second])[0].groups == (((1,), "ConfigError: no"),)


def test_other_stages_of_a_pipeline_are_no_difference() -> None:
    first, second = record(1), record(2, rank=1)
    first.head.place, second.head.place = {"pp": 0, "dp": 0}, {"pp": 1, "dp": 0}
    assert differences([first, second]) == []


def test_ranks_are_named_shortly() -> None:
    assert [named(ranks) for ranks in ([3], [0, 2], [0, 1, 2, 3], [0, 2, 3])] == [
        "rank 3",
        "ranks 0 and 2",
        "ranks 0-3",
        "ranks 0, 2 and 3",
    ]


def test_what_is_measured_of_a_program_is_measured_of_its_text() -> None:
    file = next(file for file in GOLDEN if file.parent.name == "insert_all_gather")
    program = parse(file.read_text().split("# ---\n")[1])
    measured, again = measures_of(program), measures_of_text(show(program))
    assert measured == again and measured.missing == "" and measured.memory[0].storages and measured.spans
    assert "cannot be measured from its text" in measures_of_text("nothing").missing


def test_modules_and_lines_are_named_as_in_the_model() -> None:
    stack = {"a": ("L['model']", object), "b": ("L['model']._modules['h']._modules['0']", object)}
    assert module_name(stack) == "h.0" and module_name(None) == "" == module_name({"a": ("L['self']", object)})
    assert module_name({"b": ("L['model'].h.0.mlp", object)}) == "h.0.mlp"  # the root may be missing
    here = Path.cwd() / "models" / "gpt.py"
    trace = f'  File "{here}", line 7, in forward\n    x\n  File "/lib/torch/nn/linear.py", line 9, in forward\n'
    assert source_line(trace) == "models/gpt.py:7 in forward" and source_line(None) == ""


def test_the_terminal_prints_passes_collectives_memory_steps_and_differences(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank(tmp_path, record(2, rank, differs=rank == 1))

    def printed(**wanted: object) -> str:
        console = Console(width=140, record=True, quiet=False, file=(tmp_path / "out").open("w"))
        show_run(tmp_path, 0, 0, {**NOTHING, **wanted}, console)
        return console.export_text()

    passes = printed()
    assert "Ranks differ: graph 0 after capture" in passes and "insert-all-gather" in passes and "0.25" in passes
    assert "16,384 bytes sent by each rank" in printed(collectives=True)
    assert "at most 52 KiB" in printed(memory=True) and "gather_0" in printed(memory=True)
    assert "gather_0: f32[64, 64] @ unshard('h.0.weight')" in printed(step="insert-all-gather")
    assert "+    gather_0: f32[64, 64]" in printed(diff=("0", "-1"))
    with pytest.raises(RecordError, match="has no step 'fuse': give one of capture, insert-all-gather"):
        printed(step="fuse")
    with pytest.raises(RecordError, match="no record of rank 5, but of ranks 0 and 1"):
        show_run(tmp_path, 5, 0, NOTHING)


def test_the_command_line_writes_a_report_and_says_what_is_wrong_in_a_sentence(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", record(1))
    command = [sys.executable, "-m", "zerofx", "report"]
    made = subprocess.run([*command, str(tmp_path / "run"), "-o", str(tmp_path / "it.html")], check=True)
    assert made.returncode == 0 and (tmp_path / "it.html").read_text().startswith("<!doctype html>")
    wrong = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1 and "holds no record" in wrong.stderr
