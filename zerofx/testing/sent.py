"""Which collectives a program issues."""

from __future__ import annotations

from collections.abc import Sequence

from zerofx.capture import has_markers
from zerofx.inspection import Collective, program_collectives
from zerofx.program import Program
from zerofx.text import show
from zerofx.textgraph import read

KINDS = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce"}


def collectives(program: Program) -> list[Collective]:
    """The collectives of parameters and gradients, graph by graph, in the order of issue; a bucket is one."""
    return program_collectives(read(show(program)))


def assert_collectives(program: Program, sent: int | None = None, **expected: Sequence[str]) -> None:
    """Compares the collectives of each named graph, and the bytes that each rank sends in all, with what is expected.

    A collective is written `kind parameters: dtype bytes`, where bytes are those that a rank sends:

        assert_collectives(program, joint=["all-gather w: f32 168", "reduce-scatter w: f32 168"], sent=336)

    Raises AssertionError for the first graph that differs, ValueError for a graph that the program does not have and
    for a program before its physical passes, which has no collectives yet, and TypeError for what is no program.
    """
    if not isinstance(program, Program):
        raise TypeError(f"assert_collectives takes a Program, not a {type(program).__name__}: pass what traced returns")
    if missing := [part for part in expected if part not in program.graphs]:
        raise ValueError(f"the program has the graphs {', '.join(program.graphs)}, and not {missing[0]!r}: name those")
    found: dict[str, list[str]] = {part: [] for part in program.graphs}
    rows = collectives(program)
    for row in rows:
        kind = KINDS.get(row.kind, row.kind)
        found[row.part].append(f"{kind} {', '.join(row.params)}: {row.dtype} {row.bytes_sent}")
    if not rows and any(map(has_markers, program.graphs.values())):
        raise ValueError(
            "the program has no collectives yet, only zerofx::unshard and zerofx::reduce_grad: apply InsertAllGather "
            "and InsertReduceScatter first, or give the program of zerofx.testing.traced"
        )
    for part, wanted in expected.items():
        assert found[part] == list(wanted), f"collectives of the graph {part!r}"
    total = sum(row.bytes_sent for row in rows)
    assert sent is None or total == sent, f"each rank sends {total} bytes, not {sent}"
