"""A plan stands beside a recorded run in the report, and says of the same training what the run's graphs say."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerofx
from tests.unit.test_plan import WORLD, batch, gpt
from zerofx.config import Config
from zerofx.manager import Step
from zerofx.planning.capture import Asked, Shapes
from zerofx.planning.hardware import H100
from zerofx.planning.report import Plan, PlanError, read_plan
from zerofx.reporting import planned
from zerofx.reporting.build import build
from zerofx.reporting.html import write_report
from zerofx.reporting.measures import measures_of_text
from zerofx.reporting.recording import GraphRecord, Head, RankRecord
from zerofx.text import show

PRECISION, BLOCKS = "bf16", 2


@pytest.fixture(scope="module")
def plan() -> Plan:
    return zerofx.plan(gpt(BLOCKS), batch(), world=WORLD, precision=PRECISION, bucket_mb=1)


@pytest.fixture(scope="module")
def run() -> RankRecord:
    """What a rank records of the same training."""
    shapes = Shapes(gpt(BLOCKS), batch())
    text = show(shapes.program(Asked(Config(precision=PRECISION, bucket_mb=1), WORLD, "nccl"), BLOCKS))
    graph = GraphRecord(0, "train", (Step("last", text, 0.0),), measures=measures_of_text(text, H100))
    return RankRecord(Head(world=WORLD, model="GPT"), (graph,))


def test_the_report_sets_a_plan_beside_what_was_recorded(plan: Plan, run: RankRecord) -> None:
    told = planned.told(plan, build([run]))
    ranks, elements, held, sent, seconds = told["rows"]
    assert ranks == ["ranks", "16", "16"]
    assert elements[1] == elements[2] == f"{sum(p.numel() for p in gpt(BLOCKS)().parameters()):,}"
    assert held[1] == held[2] != "0 B"
    assert sent[1] == sent[2] != "0 B"
    assert float(seconds[1]) == pytest.approx(float(seconds[2].split(" on ")[0]), rel=0.1)  # but for the update
    assert told["verdict"] == plan.verdict


def test_a_plan_comes_back_from_its_file(plan: Plan, run: RankRecord, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert read_plan(file) == plan
    assert write_report(tmp_path / "report.html", [run], read_plan(file)).stat().st_size > 100_000
    for wrong in ("{}", "[]", "no JSON", '{"stages": 3}'):
        file.write_text(wrong)
        with pytest.raises(PlanError, match=r"plan\.json holds no plan .*: give what `python -m zerofx plan --json`"):
            read_plan(file)
