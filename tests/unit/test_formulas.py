"""Closed forms against the tables that papers print, and the planner of transformers against the closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy as sp

from tests.published import read, rows
from zerofx.planning import formulas
from zerofx.planning.formulas import evaluate
from zerofx.planning.shapes import RECOMPUTE, SCHEDULES, Layouts, Shape
from zerofx.planning.software import MEGATRON, ZEROFX
from zerofx.planning.transformer import foresee, model_flops
from zerofx.planning.transformer_memory import activations

STAGE = {"baseline": 0, "os": 1, "os_g": 2, "os_g_p": 3}
GPT = Shape(layers=48, hidden=8192, heads=64, vocabulary=51_200, sequence=2048)


def unit(printed: str) -> float:
    """One unit of the last printed digit."""
    return 10.0 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize(
    "row", rows("zero_table1_memory.csv"), ids=lambda r: f"{r['model']}-{r['dp_degree']}-{r['stage']}"
)
def test_each_cell_of_zeros_table_1(row: dict[str, str]) -> None:
    values = {"Psi": float(row["params"]), "N": float(row["dp_degree"]), "K": 12}
    found = evaluate(formulas.model_states(STAGE[row["stage"]]), values) / 1e9
    assert abs(found - float(row["printed_GB"])) < unit(row["printed_GB"]) + 1e-9


@pytest.mark.parametrize("row", rows("zero_table2_max_model.csv"), ids=lambda r: f"mp{r['mp']}")
@pytest.mark.parametrize("name", STAGE)
def test_each_cell_of_theory_in_zeros_table_2(row: dict[str, str], name: str) -> None:
    """The largest model whose states fit 32 GB a rank; the paper multiplies its first row by the degree of slicing."""
    mp, printed = int(row["mp"]), row[f"theory_{name}_B"]
    states = formulas.model_states(STAGE[name]).subs({formulas.K: 12, formulas.N: int(row["gpus"]) // mp})
    (largest,) = sp.solve(sp.Eq(states, 32_000_000_000), formulas.Psi)
    first = rows("zero_table2_max_model.csv")[0][f"theory_{name}_B"]
    assert abs(float(largest) / 1e9 - float(printed) / mp) < unit(first)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_activations_of_the_planner_are_the_closed_form(recompute: str, sequence_parallel: bool, fused: bool) -> None:
    layouts = Layouts(1, [1, 2, 8], 1, 0, 4, 1, RECOMPUTE.index(recompute), 0, 1, sequence_parallel)
    found = activations(GPT, layouts, ZEROFX if fused else MEGATRON)
    formula = formulas.activations(recompute, sequence_parallel, fused)
    for tp, each in zip((1, 2, 8), found, strict=True):
        assert each == evaluate(formula, {"s": 2048, "b": 4, "h": 8192, "a": 64, "t": tp})


def test_activations_are_korthikantis_table_2() -> None:
    printed = read("korthikanti_activation_formulas.json")["data"]
    cases: dict[str, tuple[Any, ...]] = {
        "tp": ("none",),
        "tp_sp": ("none", True),
        "tp_selective": ("selective",),
        "tp_sp_selective": ("selective", True),
        "full_recompute": ("full",),
    }
    for name, arguments in cases.items():
        expected = sp.sympify(printed[name], locals=formulas.BY_NAME)
        assert sp.simplify(formulas.activations(*arguments) - expected) == 0
    assert sp.simplify(formulas.activations().subs(formulas.t, 1) - sp.sympify(printed["none"], formulas.BY_NAME)) == 0


@pytest.mark.parametrize("row", rows("megatron2021_table1.csv"), ids=lambda r: r["params_B"])
def test_parameters_and_flops_are_megatrons(row: dict[str, str]) -> None:
    layers, hidden, heads, batch = (int(row[name]) for name in ("layers", "hidden", "heads", "batch"))
    shape = Shape(layers, hidden, heads, 51_200, 2048)
    values = {"L": layers, "h": hidden, "V": 51_200, "s": 2048, "B": batch}
    assert shape.parameters == pytest.approx(evaluate(formulas.parameters(), values), rel=1e-4)
    assert shape.parameters / 1e9 == pytest.approx(float(row["params_B"]), rel=0.03)
    assert model_flops(shape, batch) == pytest.approx(evaluate(formulas.flops(), values), rel=1e-12)
    seconds = evaluate(formulas.flops(recompute=True), values) / (
        float(row["tflops_per_gpu"]) * 1e12 * int(row["gpus"])
    )
    assert seconds == pytest.approx(float(row["derived_iter_time_s"]), rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 4])
def test_bytes_that_the_planner_sends_are_the_closed_forms(stage: int, pp: int) -> None:
    found = foresee(GPT, Layouts(8, 4, pp, stage, 2, 6, 2), "h100-8x400g")
    layer = GPT.matrices / 4 + GPT.layer - GPT.matrices
    held = GPT.layers / pp * layer + (GPT.embedding + (GPT.head if pp == 1 else 0)) / 4
    values = {"N": 8, "k": 6, "Psi": held, "w": 2, "t": 4, "b": 2, "s": 2048, "h": 8192}
    sent = {name: float(each[0]) for name, each in found.sent.items()}
    assert sent["dp"] == pytest.approx(
        evaluate(formulas.data_bytes(stage, deferred=pp > 1).subs(formulas.k, 6), values)
    )
    assert sent["tp"] == pytest.approx(6 * GPT.layers / pp * evaluate(formulas.tensor_bytes(recompute=True), values))
    assert sent["pp"] == (evaluate(formulas.pipeline_bytes(), values) if pp > 1 else 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_the_closed_form_where_stages_balance(schedule: str) -> None:
    """Without a head to speak of all stages are alike."""
    shape = Shape(layers=64, hidden=4096, heads=32, vocabulary=1, sequence=2048)
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    found = foresee(shape, Layouts(1, 1, 8, 0, 16, 32, 0, SCHEDULES.index(schedule), chunks), "h100-8x400g")
    expected = evaluate(formulas.bubble(schedule), {"p": 8, "k": 32, "v": 2})
    assert found.bubble[0] / (found.step[0] - found.bubble[0]) == pytest.approx(expected, rel=0.02)


def test_states_of_the_planner_are_zeros() -> None:
    stages, ranks = (grid.flatten() for grid in np.meshgrid([0, 1, 2, 3], [4, 64]))
    found = foresee(GPT, Layouts(ranks, stage=stages), "h100-8x400g")
    states = found.memory["parameters"] + found.memory["gradients"] + found.memory["states"]
    for stage, n, each in zip(stages, ranks, states, strict=True):
        values = {"Psi": GPT.parameters, "N": float(n), "K": 12}
        assert each == pytest.approx(evaluate(formulas.model_states(int(stage)), values))


def test_a_formula_that_lacks_a_value_says_which() -> None:
    with pytest.raises(ValueError, match="the formula still has K, N: give each a value"):
        evaluate(formulas.model_states(1), {"Psi": 1e9})
    with pytest.raises(ValueError, match="schedule is one of gpipe"):
        formulas.bubble("zb")
    with pytest.raises(ValueError, match="recompute is 'none', 'selective' or 'full'"):
        formulas.activations("some")
