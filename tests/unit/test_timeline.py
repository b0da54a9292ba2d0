"""Timelines of small programs, computed by hand: a matrix product and an all-gather take a second each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zerofx.cost import Link
from zerofx.kernels import Kernel, steps
from zerofx.planning.hardware import H100, Hardware
from zerofx.planning.networks import ring_bytes
from zerofx.program import Level
from zerofx.text import parse
from zerofx.timeline import Timeline, timeline

PRODUCT = 2 * 10**3  # FLOP of f32[10, 10] @ f32[10, 10]
TENSOR = 400  # bytes of f32[10, 10]; a rank of two sends half of them
LINK = Link(0, TENSOR / 2)
TOY = Hardware("toy", "", "cuda", 1, 1e30, 1, {"fp32": PRODUCT}, {"fp32": PRODUCT}, 0, 8, 0, LINK, LINK)
MATRIX = "f32[10, 10]"
GATHER = f"g: {MATRIX} @ unshard('w') = c10d.all_gather_into_tensor.default(w, 2, 'dp')"
WAIT = f"whole: {MATRIX} @ unshard('w') = c10d.wait_tensor.default(g)"


def mm(name: str, left: str, right: str) -> str:
    return f"{name}: {MATRIX} = aten.mm.default({left}, {right})"


def run(*lines: str, result: str, machine: Hardware = TOY) -> Timeline:
    """The timeline of an inference on two by two ranks that reads the weights v and w, stored in parts, and x."""
    inputs = f"v: f32[5, 10] @ shard('v'), w: f32[5, 10] @ shard('w'), x: {MATRIX}"
    params = "".join(f"param('{name}', {MATRIX}, dim=0)\n" for name in "vw")
    body = "".join(f"    {line}\n" for line in lines)
    program = parse(f"mesh(dp=2, tp=2)\n{params}\ndef inference({inputs}):\n{body}    return [{result} @ out]\n")
    program.level = Level.PHYSICAL
    return timeline(program, machine)


def shown(found: Timeline) -> list[tuple[str, float, float]]:
    return [(span.name.split(" ")[0], span.start, span.end) for span in found.spans]


def test_a_gather_runs_beside_two_products() -> None:
    found = run(GATHER, mm("a", "x", "x"), mm("b", "a", "x"), WAIT, mm("c", "b", "whole"), result="c")
    assert shown(found) == [("all_gather_into_tensor", 0, 1), ("mm", 0, 1), ("mm", 1, 2), ("mm", 2, 3)]
    assert (found.step, found.compute, found.communication, found.exposed) == (3, 3, 1, 0)


def test_what_a_slow_gather_takes_beyond_the_products_is_exposed() -> None:
    slow = replace(TOY, intra=Link(0.5, TENSOR / 7))
    found = run(GATHER, mm("a", "x", "x"), mm("b", "a", "x"), WAIT, mm("c", "b", "whole"), result="c", machine=slow)
    assert shown(found)[-2:] == [("wait", 2, 4), ("mm", 4, 5)]
    assert (found.step, found.exposed, found.exposed_share) == (5, 2, 0.4)


def test_a_wait_right_behind_its_collective_exposes_all_of_it() -> None:
    found = run(GATHER, WAIT, mm("a", "x", "x"), mm("b", "a", "whole"), result="b")
    assert shown(found) == [("all_gather_into_tensor", 0, 1), ("wait", 0, 1), ("mm", 1, 2), ("mm", 2, 3)]
    assert found.exposed == found.communication == 1


def test_a_collective_starts_behind_the_kernels_issued_before_it() -> None:
    found = run(mm("a", "x", "x"), GATHER, WAIT, mm("b", "a", "whole"), result="b")
    assert shown(found) == [("mm", 0, 1), ("all_gather_into_tensor", 1, 2), ("wait", 1, 2), ("mm", 2, 3)]


SECOND = f"h: {MATRIX} @ unshard('v') = c10d.all_gather_into_tensor.default(v, 2, '{{}}')"
SECOND_WAIT = f"other: {MATRIX} @ unshard('v') = c10d.wait_tensor.default(h)"


@pytest.mark.parametrize(("group", "start"), [("dp", 1), ("tp", 0)])
def test_collectives_of_one_group_run_in_order_and_those_of_two_side_by_side(group: str, start: float) -> None:
    found = run(GATHER, SECOND.format(group), SECOND_WAIT, WAIT, mm("a", "whole", "other"), result="a")
    assert [(span.stream, span.start, span.end) for span in found.spans if span.kind == "collective"] == [
        ("dp", 0, 1),
        (group, start, start + 1),
    ]
    assert found.exposed == start + 1
    assert found.step == found.compute + found.exposed


def test_a_bucket_is_sent_as_one_and_has_one_latency() -> None:
    gathered = f"({MATRIX}, {MATRIX}) @ unshard('v', 'w')"
    lines = [f"g: {gathered} = c10d.all_gather_into_tensor_coalesced.default([v, w], 2, 'dp')"]
    for place, name in enumerate("vw"):
        lines.append(f"g{name}: {MATRIX} @ unshard('{name}') = operator.getitem(g, {place})")
        lines.append(f"all_{name}: {MATRIX} @ unshard('{name}') = c10d.wait_tensor.default(g{name})")
    late = replace(TOY, intra=Link(0.5, TENSOR / 2))
    found = run(*lines, mm("a", "all_v", "all_w"), result="a", machine=late)
    assert shown(found) == [("all_gather_into_tensor", 0, 2.5), ("wait", 0, 2.5), ("mm", 2.5, 3.5)]


def test_point_to_point_messages_run_beside_the_computation_before_their_wait() -> None:
    bucket = f"g: ({MATRIX},) @ unshard('w') = zerofx.all_gather_p2p.default([w], 2, 'dp')"
    taken = f"one: {MATRIX} @ unshard('w') = operator.getitem(g, 0)"
    whole = f"whole: {MATRIX} @ unshard('w') = c10d.wait_tensor.default(one)"
    found = run(bucket, mm("a", "x", "x"), taken, whole, mm("b", "a", "whole"), result="b")
    assert shown(found) == [("all_gather_into_tensor", 0, 1), ("mm", 0, 1), ("mm", 1, 2)]


def kernels(*lines: str, result: str) -> list[Kernel]:
    body = "".join(f"    {line}\n" for line in lines)
    program = parse(f"mesh(dp=2)\n\ndef inference(x: {MATRIX}, y: {MATRIX}):\n{body}    return [{result} @ out]\n")
    return [step for step in steps(program.graphs["inference"]) if isinstance(step, Kernel)]


def test_a_chain_reads_its_inputs_and_writes_its_results_once() -> None:
    (chain,) = kernels(
        f"a: {MATRIX} = aten.neg.default(x)",
        f"b: {MATRIX} = aten.mul.Tensor(a, y)",
        f"t: {MATRIX}(1, 10) = aten.t.default(b)",
        f"c: {MATRIX}(1, 10) = aten.add.Tensor(t, x)",
        result="c",
    )
    assert (chain.name, chain.nbytes, chain.flops) == ("neg+mul+add", 3 * TENSOR, 0)


def test_a_chain_ends_at_a_product_and_what_is_read_later_is_written() -> None:
    made = kernels(
        f"a: {MATRIX} = aten.neg.default(x)",
        mm("b", "a", "y"),
        f"c: {MATRIX} = aten.add.Tensor(b, a)",
        result="c",
    )
    assert [(kernel.name, kernel.nbytes) for kernel in made] == [
        ("neg", 2 * TENSOR),
        ("mm", 3 * TENSOR),
        ("add", 3 * TENSOR),
    ]


def test_an_embedding_reads_the_rows_that_it_takes() -> None:
    (lookup,) = kernels(
        "i: i64[3] = aten.arange.default(3)", "a: f32[3, 10] = aten.embedding.default(x, i)", result="a"
    )
    assert lookup.nbytes == 2 * 3 * 10 * 4


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, 0.0{})"


@pytest.mark.parametrize(("causal", "share"), [("", 1), (", True", 0.5)])
def test_attention_counts_both_products_and_half_of_them_under_a_causal_mask(causal: str, share: float) -> None:
    (attention,) = kernels(
        "q: bf16[1, 2, 8, 4] = aten.new_zeros.default(x, [1, 2, 8, 4], dtype=bf16)",
        f"a: (bf16[1, 2, 8, 4], f32[1, 2, 8](16, 1, 2)) = {ATTENTION.format(causal)}",
        "b: bf16[1, 2, 8, 4] = operator.getitem(a, 0)",
        result="b",
    )[1:]
    assert (attention.flops, attention.dtype) == (2 * 2 * 2 * 8 * 8 * 4 * share, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all_gather_into_tensor", 700), ("reduce_scatter_tensor", 700), ("all_reduce", 1400)],
)
def test_a_rank_sends_what_a_ring_needs(kind: str, sent: float) -> None:
    assert ring_bytes(kind, 800, ranks=8) == sent
    steps = 14 if kind == "all_reduce" else 7
    seconds = H100.collective_latency + steps * H100.intra.latency + sent / H100.intra.bandwidth
    assert H100.collective_seconds(kind, 800, 8) == pytest.approx(seconds)
    assert ring_bytes(kind, 800, ranks=1) == 0


def test_a_kernel_is_bound_by_arithmetic_or_by_memory() -> None:
    assert H100.kernel_seconds(989e12, 0, torch.bfloat16) == pytest.approx(1 / 0.7 + 2e-6)
    assert H100.kernel_seconds(67e12, 0, torch.float32) == pytest.approx(1 / 0.7 + 2e-6)
    assert H100.kernel_seconds(1e12, 3.35e12, torch.bfloat16) == pytest.approx(1 / 0.9 + 2e-6)
    assert H100.kernel_seconds(0, 0, torch.int64) == 2e-6


def test_the_trace_has_every_span_under_its_stream() -> None:
    found = run(GATHER, mm("a", "x", "x"), WAIT, mm("b", "a", "whole"), result="b")
    events = json.loads(found.chrome_trace())["traceEvents"]
    streams = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    drawn = [(streams[e["tid"]], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [("dp", "collective", 0, 1e6), ("compute", "kernel", 0, 1e6), ("compute", "kernel", 1e6, 1e6)]


def test_the_drawing_has_every_span(tmp_path: Path) -> None:
    found = run(GATHER, WAIT, mm("a", "x", "whole"), result="a")
    found.draw(tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    assert text.count("<rect") == 3 and "inference: wait for all_gather_into_tensor w, 1000.000 ms" in text


def test_a_program_with_markers_is_refused() -> None:
    marker = f"whole: {MATRIX} @ unshard('w') = zerofx.unshard.default(w, [10, 10], 0, rows(10, 2), 'dp')"
    with pytest.raises(ValueError, match="a timeline needs a program behind its physical passes: run them first"):
        run(marker, mm("a", "x", "whole"), result="a")
