"""Inputs for programs, and what their outputs are on every rank, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from zerofx.program import Program, Tag, output_tags, placeholders, tag
from zerofx.simulate import scatter, simulate
from zerofx.text import parse

Ranks = list[list[Any]]
STORED = ("shard", "replica", "param")
EXACT = 12  # sums of its small multiples, and their means over 2, 3 or 4 ranks, are not rounded


def random_like(value: Any, numbers: torch.Generator, exact: bool = False) -> Tensor:
    """A tensor of the shape and dtype of a fake one; with `exact`, of small multiples of 12."""
    if value.dtype is torch.int64:
        return torch.randint(0, 7, value.shape, generator=numbers)
    if exact:
        return EXACT * torch.randint(-3, 4, value.shape, generator=numbers).to(value.dtype)
    return torch.randn(value.shape, generator=numbers).to(value.dtype)


def given(program: Program) -> list[Node]:
    """The inputs that a caller gives besides parameters: those of the first graph, and the tangents of a second one."""
    first, *later = program.graphs.values()
    own = [node for node in placeholders(first) if (known := tag(node)) is None or known.role not in STORED]
    return own + [node for graph in later for node in placeholders(graph) if tag(node) == Tag("tangent")]


def random_inputs(program: Program, exact: bool = False) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Whole parameters by name, and one value a rank for each other input."""
    numbers = torch.Generator().manual_seed(0)
    whole = {
        param.name: random_like(torch.empty(param.size, dtype=param.dtype), numbers, exact) for param in program.layout
    }
    rest = [
        [random_like(node.meta["val"], numbers, exact) for _ in range(program.mesh.world)] for node in given(program)
    ]
    return whole, rest


def results(program: Program, whole: Mapping[str, Tensor], rest: Sequence[Sequence[Tensor]]) -> Ranks:
    """The outputs of each rank, which stores its parts of the whole parameters as the program's layout says."""
    others = iter(rest)
    inputs: list[Sequence[Tensor]] = []
    for node in placeholders(next(iter(program.graphs.values()))):
        known = tag(node)
        if known is not None and known.role in STORED:
            (name,) = known.params
            inputs.append(scatter(whole[name], program.layout[name], program.mesh))
        else:
            inputs.append(next(others))
    return simulate(program, [*inputs, *others])


def mean(values: Sequence[Tensor]) -> Tensor:
    """Over the ranks, added in their order."""
    return reduce(torch.add, values) / len(values)


def sharded(found: Ranks, program: Program) -> Ranks:
    """What ranks that hold whole parameters find, as ranks should find it that store them as `program` does."""
    columns = [list(column) for column in zip(*found, strict=True)]
    for place, known in enumerate(output_tags(next(iter(program.graphs.values())))):
        if known is not None and known.role == "grad":
            param = program.layout[known.params[0]]
            columns[place] = scatter(mean(columns[place]), param, program.mesh)
    return [list(row) for row in zip(*columns, strict=True)]


def assert_same_bits(found: Ranks, expected: Ranks) -> None:
    """Raises AssertionError for the first output of a rank that differs in dtype, shape or a bit."""
    assert len(found) == len(expected)
    for rank, (row, wanted) in enumerate(zip(found, expected, strict=True)):
        for place, (one, other) in enumerate(zip(row, wanted, strict=True)):
            same = one is other if other is None else (one.dtype, one.shape) == (other.dtype, other.shape)
            assert same and (other is None or torch.equal(one, other)), f"output {place} of rank {rank}"


Made = Program | str | Callable[[int], "Program"]


def assert_same_meaning(
    before: Made, after: Made, ranks: int | None = None, *, exact: bool = False, atol: float | None = None
) -> None:
    """Runs two programs for all ranks in one process, on the same random inputs, and compares what each rank gets.

    Args:
        before: a program, the text of one, or a function that makes one for a number of ranks.
        after: the same. Where it stores parameters in parts that `before` has whole, each rank must get its part of the
            mean of the gradients.
        ranks: how many ranks, 4 by default for functions. A program or text has those of its mesh; another number is
            possible for texts of whole parameters.
        exact: give inputs of which sums and means are not rounded, for a pass that adds in another order.
        atol: how far results may be apart; without it they must be equal bit for bit.

    Raises AssertionError that names the output and the rank, and ValueError where the programs do not fit `ranks`.
    """
    first, second = (_at(each, ranks) for each in (before, after))
    whole, rest = random_inputs(first, exact)
    expected, found = results(first, whole, rest), results(second, whole, rest)
    if first.layout != second.layout:
        expected = sharded(expected, second)
    if atol is None:
        assert_same_bits(found, expected)
        return
    for rank, (row, wanted) in enumerate(zip(found, expected, strict=True)):
        for place, (one, other) in enumerate(zip(row, wanted, strict=True)):
            torch.testing.assert_close(one, other, atol=atol, rtol=0, msg=_where(place, rank))


def _where(place: int, rank: int) -> Callable[[str], str]:
    return lambda told: f"output {place} of rank {rank}: {told}"


def _at(made: Made, ranks: int | None) -> Program:
    if callable(made):
        return made(4 if ranks is None else ranks)
    if isinstance(made, str) and ranks is not None and "@ shard(" not in made:
        made = re.sub(r"mesh\(dp=\d+", f"mesh(dp={ranks}", made)
    program = parse(made) if isinstance(made, str) else made
    if not isinstance(program, Program):
        raise TypeError(f"a {type(program).__name__} is no program: give one, its text, or a function of ranks")
    if ranks is not None and program.mesh.world != ranks:
        raise ValueError(
            f"the program is one of {program.mesh.world} ranks, whose parameters are cut, and not of {ranks}: give a "
            "function that makes it for a number of ranks"
        )
    return program
