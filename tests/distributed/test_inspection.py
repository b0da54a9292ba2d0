"""zerofx.inspect prints, compares, counts and draws what the passes made of a model's graphs."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

import zerofx
from tests.distributed.ranks import Net, has, message, on_ranks, rows, sharded, square
from zerofx.inspection import Inspection

STEPS = [
    "capture",
    "choose-layout",
    "merge-reads",
    "sink-casts",
    "release-after-use",
    "partition",
    "insert-all-gather",
    "bucket-all-gathers",
    "insert-reduce-scatter",
    "bucket-reductions",
    "prefetch-all-gathers",
    "delay-waits",
    "fuse-optimizer",
    "use-point-to-point",
]
F32 = 4
WEIGHTS = 14 * 7 * F32, 7 * 14 * F32  # of a and b, with a row of padding: a is cut on its rows, b on its columns
VECTORS = 14 * F32, 14 * F32, 14 * F32  # a.bias, norm.weight and norm.bias
B_BIAS = 8 * F32


class Seen(NamedTuple):
    """What rank 0 sees of a trained and evaluated model."""

    inspection: Inspection
    printed: list[str]


def inspected() -> Seen:
    model = sharded(Net(), bucket_mb=1e-6)  # a collective for each parameter
    square(model, 0).backward()
    with torch.no_grad():
        model(rows(0))
    inspection = zerofx.inspect(model)
    printed = []
    for step, graph in ((-1, 0), (0, 0), ("merge-reads", 0), (-1, 1)):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            inspection.print(step, graph)
        printed.append(text.getvalue())
    return Seen(inspection, printed)


@pytest.fixture(scope="module")
def seen(pool: object) -> Seen:
    ranks = pool(2).run(inspected)
    assert ranks[0].printed == ranks[1].printed
    return ranks[0]


def test_each_graph_has_its_kind_and_its_steps_by_name(seen: Seen) -> None:
    assert [graph.kind for graph in seen.inspection.graphs] == ["train", "inference"]
    train, inference = seen.inspection.graphs
    assert [step.name for step in train.steps] == STEPS
    assert [step.name for step in inference.steps] == [name for name in STEPS if name != "partition"]
    assert train.step("merge-reads") is train.steps[2] and train.step(-1) is train.steps[-1]
    assert 0 < train.seconds < 60
    has(
        message(lambda: train.step("fuse"), LookupError),
        ["graph 0 has no step 'fuse'", "insert-all-gather", "-14 to 13"],
    )
    has(message(lambda: seen.inspection.print(14), LookupError), ["graph 0 has no step 14", "-14 to 13"])
    has(message(lambda: seen.inspection.diff(0, 1, graph=2), LookupError), ["no graph 2", "the graphs 0 to 1"])


def test_the_program_after_any_step_is_printed(seen: Seen) -> None:
    last, captured, merged, inference = seen.printed
    has(captured, ["mesh(dp=2)", "param('a.weight', f32[13, 7], dim=0)", "def joint(", "zerofx.unshard.default("])
    has(merged, ["def joint(", "@ reduce_grad('a.weight')"])
    has(last, ["def forward(", "def backward(", "zerofx.all_gather_p2p", "zerofx.reduce_scatter_p2p"])
    has(inference, ["def inference(", "zerofx.all_gather_p2p"])
    assert "p2p" not in captured + merged and "zerofx.unshard" not in last + inference
    assert "reduce" not in inference


def test_the_difference_between_two_steps_is_a_unified_diff(seen: Seen) -> None:
    assert seen.inspection.diff(0, 0) == ""
    lines = seen.inspection.diff("partition", "insert-all-gather").splitlines()
    assert lines[:2] == ["--- partition", "+++ insert-all-gather"]
    assert any(line.startswith("-") and "zerofx.unshard.default" in line for line in lines)
    assert any(line.startswith("+") and "c10d.all_gather_into_tensor" in line for line in lines)
    assert not any("reduce_scatter" in line for line in lines)


def test_collectives_tell_role_parameters_type_group_and_bytes(seen: Seen) -> None:
    rows_of = {(row.graph, row.part): [] for row in seen.inspection.collectives().rows}
    for row in seen.inspection.collectives().rows:
        assert (row.dtype, row.group, len(row.params)) == ("f32", "dp", 1)
        rows_of[row.graph, row.part].append((row.kind, row.role, row.params[0], row.bytes_sent))
    gather, scatter = ("all_gather_into_tensor", "unshard"), ("reduce_scatter_tensor", "reduce_grad")
    names = ("a.weight", "b.weight", "a.bias", "norm.weight", "norm.bias", "b.bias")
    sizes = dict(zip(names, (size // 2 for size in (*WEIGHTS, *VECTORS, B_BIAS)), strict=True))
    forward = sorted((*gather, name, size) for name, size in sizes.items())
    assert sorted(rows_of[0, "forward"]) == sorted(rows_of[1, "inference"]) == forward
    again = [(*gather, name, sizes[name]) for name in ("norm.weight", "norm.bias", "b.weight")]
    backward = again + [(*scatter, name, size) for name, size in sizes.items()]
    assert sorted(rows_of[0, "backward"]) == sorted(backward)


def test_the_table_shows_the_sum_beside_the_bound(seen: Seen) -> None:
    table = seen.inspection.collectives()
    assert table.bytes_sent == sum(row.bytes_sent for row in table.rows)
    once = sum(size * F32 // 2 for size in (13 * 7, 13 * 7, 13, 13, 13, 7))
    again = sum(size * F32 // 2 for size in (13, 13, 13 * 7))
    assert table.bound == 3 * once + again
    text = str(table)
    has(
        text,
        ["collective", "role", "parameters", "dtype", "group", "bytes sent", "norm.weight", "reduce_scatter_tensor"],
    )
    padding = table.bytes_sent - table.bound
    has(text, [f"{table.bytes_sent:,} bytes sent by each rank; bound {table.bound:,}, padding {padding:,}"])


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz")
def test_drawing_writes_every_node(seen: Seen, tmp_path: Path) -> None:
    pytest.importorskip("pydot")
    file = tmp_path / "program.svg"
    seen.inspection.draw(file)
    drawn = file.read_text()
    has(drawn, ["<svg", "forward", "backward", "zerofx.all_gather_p2p", "aten.gelu", "reduce_grad a.weight"])
    seen.inspection.draw(str(file), step=0)
    has(file.read_text(), ["joint", "zerofx.unshard", "unshard b.bias"])


def test_drawing_without_graphviz_says_what_to_install(seen: Seen, tmp_path: Path) -> None:
    with mock.patch("shutil.which", return_value=None):
        text = message(lambda: seen.inspection.draw(tmp_path / "program.svg"), RuntimeError)
    has(text, ["drawing needs the program `dot`: install graphviz"])
    assert "\n" not in text


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz")
def test_drawing_without_pydot_says_what_to_install(seen: Seen, tmp_path: Path) -> None:
    with mock.patch.dict("sys.modules", {"pydot": None}):
        text = message(lambda: seen.inspection.draw(tmp_path / "program.svg"), RuntimeError)
    has(text, ["drawing needs pydot: pip install 'zerofx[draw]'"])


@on_ranks(2)
def test_what_cannot_be_inspected_is_refused_with_the_reason() -> None:
    has(message(lambda: zerofx.inspect(Net()), TypeError), ["needs a model that zerofx.compile was called on"])
    has(message(lambda: zerofx.inspect(None), TypeError), ["needs a model that zerofx.compile was called on"])
    model = sharded(Net())
    has(message(lambda: zerofx.inspect(model), ValueError), ["nothing has been captured yet: call the model once"])
    has(message(lambda: zerofx.inspect(model.a), TypeError), ["needs a model that zerofx.compile was called on"])
    eager = sharded(Net(), backend="eager")
    square(eager, 0)
    has(message(lambda: zerofx.inspect(eager), ValueError), ["makes no graph to inspect", "backend='interpreter'"])
