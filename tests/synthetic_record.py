"""Records of runs that never were: programs of any size in the form that zerofx writes."""

from __future__ import annotations

from zerofx.manager import Step
from zerofx.origins import Origin
from zerofx.pipeline import Pipeline
from zerofx.reporting.measures import Measures, Memory
from zerofx.reporting.recording import GraphRecord, Head, RankRecord
from zerofx.schedule_check import simulate
from zerofx.schedules import order_of
from zerofx.stage_report import PipelineReport, StageCosts
from zerofx.timeline import Span

PER_LAYER = 20


def program(layers: int, gathered: bool) -> tuple[str, dict[str, Origin]]:
    """A forward of so many layers of PER_LAYER ops and a parameter each."""
    head = "".join(f"param('h.{i}.weight', f32[64, 64], dim=0)\n" for i in range(layers))
    inputs = "".join(f"    w_{i}: f32[32, 64] @ shard('h.{i}.weight'),\n" for i in range(layers))
    lines, origins, last = [], {}, "x"
    for i in range(layers):
        tag = f"@ unshard('h.{i}.weight')"
        if gathered:
            lines += [
                f"gather_{i}: f32[64, 64] {tag} = c10d.all_gather_into_tensor.default(w_{i}, 2, 'dp')",
                f"whole_{i}: f32[64, 64] {tag} = c10d.wait_tensor.default(gather_{i})",
            ]
        else:
            lines.append(
                f"whole_{i}: f32[64, 64] {tag} = zerofx.unshard.default(w_{i}, [64, 64], 0, rows(64, 2), 'dp')"
            )
        for j in range(PER_LAYER - 2):
            name = f"op_{i}_{j}"
            second = f", whole_{i}" if j == 0 else ""
            op = "mm" if j == 0 else "relu"
            lines.append(f"{name}: f32[64, 64] = aten.{op}.default({last}{second})")
            origins[name] = Origin(f"h.{i}.part{j % 3}", f"model.py:{j + 10} in forward")
            last = name
    body = "".join(f"    {line}\n" for line in lines)
    text = f"mesh(dp=2)\n{head}\ndef forward(\n{inputs}    x: f32[64, 64],\n):\n{body}    return [{last} @ out]\n"
    return text, origins


def record(layers: int, rank: int = 0, differs: bool = False) -> RankRecord:
    """One rank of two; with `differs` its program has one op more than another rank's."""
    (before, origins), (after, _) = program(layers, False), program(layers, True)
    if differs:
        before, after = (
            text.replace("aten.relu.default(op_0_0)", "aten.gelu.default(op_0_0)") for text in (before, after)
        )
    steps = (Step("capture", before, 0.0), Step("insert-all-gather", after, 0.25))
    names = [line.split(":")[0].strip() for line in after.splitlines() if " = " in line]
    storages = tuple((name, 0, 64 * 64 * 4, layers + 1 + i, layers + 3 + i) for i, name in enumerate(names))
    memory = Memory("forward", 4096, layers + len(names) + 4, storages, {})
    spans = tuple(
        Span(f"all_gather_into_tensor h.{i}.weight", "collective", "dp", "forward", i * 2e-5, i * 2e-5 + 1e-5, 0, 8192)
        for i in range(layers)
    )
    spans += tuple(
        Span("mm+relu", "kernel", "compute", "forward", i * 2e-5 + 1e-5, i * 2e-5 + 2e-5, 1e6, 1e4)
        for i in range(layers)
    )
    graph = GraphRecord(0, "inference", steps, {"forward": origins}, ({},), Measures((memory,), "a machine", spans))
    params = [{"name": f"h.{i}.weight", "tied": []} for i in range(layers)]
    head = Head(rank, 2, "Synthetic", 0.0, {"dp": rank}, {"stage": "3"}, {"the passes": "all"}, params)
    return RankRecord(head, (graph,))


def even_report(stages: int = 4, microbatches: int = 8) -> PipelineReport:
    """The report of a pipeline whose stages are alike."""
    pipeline = Pipeline(stages, "1f1b", microbatches)
    costs = tuple(StageCosts(f"h.{i}", f"h.{i}", 1e-3, 2**20, 2**18, 2**22, 2**12) for i in range(stages))
    return PipelineReport(pipeline, "a machine", costs, simulate(pipeline, order_of(pipeline)), "")
