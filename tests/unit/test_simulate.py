"""The simulator: every rank's outputs are those of the collectives' definitions, computed with plain torch."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from zerofx.layout import ParamLayout
from zerofx.mesh import Mesh
from zerofx.program import Program
from zerofx.simulate import feed, scatter, simulate
from zerofx.text import parse


def program(mesh: str, inputs: str, *calls: str) -> Program:
    """A graph named joint of calls `a = ...`, `b = ...`; the last one's result is its output."""
    lines = [f"    {line}" for line in calls]
    return parse(
        "\n".join([f"mesh({mesh})", f"def joint({inputs}):", *lines, f"    return [{calls[-1].split(':')[0]}]"])
    )


def only(results: list[list[Any]]) -> list[Any]:
    return [result for (result,) in results]


def values(world: int, *size: int) -> list[Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and torch.equal(one, other)


C10D = {
    "all_gather_into_tensor.default(x, 3, 'dp')": ("f32[18, 2]", lambda xs: [torch.cat(xs)] * 3),
    "reduce_scatter_tensor.default(x, 'sum', 3, 'dp')": (
        "f32[2, 2]",
        lambda xs: list((xs[0] + xs[1] + xs[2]).split(2)),
    ),
    "reduce_scatter_tensor.default(x, 'avg', 3, 'dp')": (
        "f32[2, 2]",
        lambda xs: list(((xs[0] + xs[1] + xs[2]) / 3).split(2)),
    ),
    "all_reduce.default(x, 'sum', 'dp')": ("f32[6, 2]", lambda xs: [xs[0] + xs[1] + xs[2]] * 3),
    "all_reduce.default(x, 'avg', 'dp')": ("f32[6, 2]", lambda xs: [(xs[0] + xs[1] + xs[2]) / 3] * 3),
    "all_reduce.default(x, 'max', 'dp')": ("f32[6, 2]", lambda xs: [torch.stack(xs).amax(0)] * 3),
    "all_reduce.default(x, 'min', 'dp')": ("f32[6, 2]", lambda xs: [torch.stack(xs).amin(0)] * 3),
    "broadcast.default(x, 1, 'dp')": ("f32[6, 2]", lambda xs: [xs[1]] * 3),
    "all_to_all_single.default(x, [2, 2, 2], [2, 2, 2], 'dp')": (
        "f32[6, 2]",
        lambda xs: [torch.cat([x[2 * rank : 2 * rank + 2] for x in xs]) for rank in range(3)],
    ),
}


@pytest.mark.parametrize("call", C10D)
def test_collective_gives_each_rank_its_definition(call: str) -> None:
    kind, definition = C10D[call]
    graph = program("dp=3", "x: f32[6, 2]", f"a: {kind} = c10d.{call}", f"b: {kind} = c10d.wait_tensor.default(a)")
    xs = values(3, 6, 2)
    same(only(simulate(graph, [xs])), definition(xs))


@pytest.mark.parametrize(
    ("coalesced", "kind", "single"),
    [
        (
            "all_gather_into_tensor_coalesced.default([x, y], 2, 'dp')",
            "f32[8]",
            "all_gather_into_tensor.default(y, 2, 'dp')",
        ),
        ("all_reduce_coalesced.default([x, y], 'avg', 'dp')", "f32[4]", "all_reduce.default(y, 'avg', 'dp')"),
        (
            "reduce_scatter_tensor_coalesced.default([x, y], 'sum', 2, 'dp')",
            "f32[2]",
            "reduce_scatter_tensor.default(y, 'sum', 2, 'dp')",
        ),
    ],
)
def test_coalesced_collective_is_the_single_one_for_each_tensor(coalesced: str, kind: str, single: str) -> None:
    inputs = [values(2, 4), values(2, 4)[::-1]]
    many = (f"a: ({kind}, {kind}) = c10d.{coalesced}", f"b: {kind} = operator.getitem(a, 1)")
    found = simulate(program("dp=2", "x: f32[4], y: f32[4]", *many), inputs)
    expected = simulate(program("dp=2", "x: f32[4], y: f32[4]", f"b: {kind} = c10d.{single}"), inputs)
    same(only(found), only(expected))


@pytest.mark.parametrize(("axis", "groups"), [("dp", [(0, 2), (1, 3)]), ("tp", [(0, 1), (2, 3)])])
def test_collective_stays_in_its_groups(axis: str, groups: list[tuple[int, int]]) -> None:
    xs = values(4, 3)
    found = only(
        simulate(
            program("dp=2, tp=2", "x: f32[3]", f"a: f32[6] = c10d.all_gather_into_tensor.default(x, 2, '{axis}')"), [xs]
        )
    )
    for first, second in groups:
        same([found[first], found[second]], [torch.cat([xs[first], xs[second]])] * 2)


def test_all_to_all_cuts_by_the_split_sizes_of_each_rank() -> None:
    xs = values(2, 4)
    graph = program(
        "dp=2", "x: f32[4]", "a: f32[4] = c10d.all_to_all_single.default(x, [rows(3, 2), rows(3, 2)], [2, 2], 'dp')"
    )
    with pytest.raises(ValueError, match=r"output_split_sizes \[1, 1\] aren't what the other ranks send"):
        simulate(graph, [xs])


def test_no_rank_sees_what_another_writes_to_its_result() -> None:
    calls = ("a: f32[2] = c10d.all_reduce.default(x, 'sum', 'dp')", "b: f32[2] = aten.add_.Tensor(a, x)")
    xs = values(2, 2)
    same(only(simulate(program("dp=2", "x: f32[2]", *calls), [xs])), [xs[0] + xs[1] + x for x in xs])


UNEVEN = [(13, 2), (13, 3), (13, 4), (3, 4), (8, 2)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("rows", "world"), UNEVEN)
def test_unshard_gives_every_rank_the_whole_parameter(rows: int, world: int, dim: int) -> None:
    whole = values(1, *((rows, 4) if dim == 0 else (4, rows)))[0]
    param = ParamLayout("w", tuple(whole.shape), torch.float32, dim)
    local, size = param.local_size(world, 0), list(whole.shape)
    call = f"a: f32{size} = zerofx.unshard.default(w, {size}, {dim}, rows({rows}, {world}), 'dp')"
    graph = program(f"dp={world}", f"w: f32{list(local)}", call)
    shards = scatter(whole, param, graph.mesh)
    assert [tuple(shard.shape) for shard in shards] == [param.local_size(world, rank) for rank in range(world)]
    same(only(simulate(graph, [shards])), [whole] * world)


@pytest.mark.parametrize(("rows", "world"), UNEVEN)
def test_reduce_grad_is_bitwise_its_lowering(rows: int, world: int) -> None:
    chunk = -(-rows // world)
    local = f"f32[{chunk}, 4]"
    missing = chunk * world - rows
    marked = f"a: {local} = zerofx.reduce_grad.default(g, 0, rows({rows}, {world}), 'dp')"
    lowered = (
        f"p: f32[{chunk * world}, 4] = aten.constant_pad_nd.default(g, [0, 0, 0, {missing}])",
        f"r: {local} = c10d.reduce_scatter_tensor.default(p, 'avg', {world}, 'dp')",
        f"v: {local} = c10d.wait_tensor.default(r)",
        f"a: {local} = aten.slice.Tensor(v, 0, 0, rows({rows}, {world}))",
    )
    grads = values(world, rows, 4)
    found = only(simulate(program(f"dp={world}", f"g: f32[{rows}, 4]", marked), [grads]))
    same(found, only(simulate(program(f"dp={world}", f"g: f32[{rows}, 4]", *lowered), [grads])))
    assert torch.allclose(torch.cat(found), torch.stack(grads).mean(0))


def test_reduce_grad_cuts_dim_1_and_keeps_a_replicated_parameter_whole() -> None:
    grads = values(2, 2, 3)
    mean = (grads[0] + grads[1]) / 2
    cut = program("dp=2", "g: f32[2, 3]", "a: f32[2, 2] = zerofx.reduce_grad.default(g, 1, rows(3, 2), 'dp')")
    same(only(simulate(cut, [grads])), [mean[:, :2], mean[:, 2:]])
    whole = program("dp=2", "g: f32[2, 3]", "a: f32[2, 3] = zerofx.reduce_grad.default(g, -1, 0, 'dp')")
    same(only(simulate(whole, [grads])), [mean, mean])


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    xs = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    graph = program("dp=3", "x: f32[1]", "a: f32[1] = c10d.all_reduce.default(x, 'sum', 'dp')")
    assert only(simulate(graph, [xs])) == [1.0] * 3
    assert only(simulate(graph, [[xs[1], xs[2], xs[0]]])) == [0.0] * 3


PAIR = """\
mesh(dp=2)
param('w', f32[3, 2], dim=0)

def forward(w: f32[2, 2] @ shard('w'), n: sym(s1, 4), x: f32[s1, 2]):
    whole: f32[3, 2] @ unshard('w') = zerofx.unshard.default(w, [3, 2], 0, rows(3, 2), 'dp')
    t: f32[2, 3](1, 2) = aten.t.default(whole)
    y: f32[s1, 3] = aten.mm.default(x, t)
    return [y @ out, x @ saved, n @ saved]

def backward(n: sym(s1, 4), x: f32[s1, 2], tangents_1: f32[s1, 3] @ tangent):
    t: f32[3, s1](1, 3) = aten.t.default(tangents_1)
    grad: f32[3, 2] = aten.mm.default(t, x)
    mine: f32[2, 2] = zerofx.reduce_grad.default(grad, 0, rows(3, 2), 'dp')
    rows_of_x: f32[s1, 2] = aten.new_zeros.default(x, [n, 2])
    return [mine @ grad('w'), None, rows_of_x @ grad]
"""


def test_a_backward_reads_what_the_forward_saves_and_then_its_tangents() -> None:
    whole = torch.randn(3, 2)
    pair, xs, tangents = parse(PAIR), values(2, 5, 2), values(2, 5, 3)
    results = simulate(pair, feed(pair, {"w": whole}, [[5, 5], xs, tangents]))
    grad = (tangents[0].t() @ xs[0] + tangents[1].t() @ xs[1]) / 2
    for rank, (y, mine, none, rest) in enumerate(results):
        same([y, mine, rest], [xs[rank] @ whole.t(), grad[:2] if rank == 0 else grad[2:], torch.zeros(5, 2)])
        assert none is None


def test_values_are_freed_after_their_last_use() -> None:
    calls = ("a: f32[2] = aten.neg.default(x)", "b: f32[2] = aten.neg.default(a)", "c: f32[2] = aten.neg.default(b)")
    graph = program("dp=1", "x: f32[2]", *calls)
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def neg(x: Tensor) -> Tensor:
        seen.append(weakref.ref(x))
        alive.append(sum(ref() is not None for ref in seen))
        return torch.neg(x)

    for node in graph.graphs["joint"].find_nodes(op="call_function", target=torch.ops.aten.neg.default):
        node.target = neg
    simulate(graph, [[torch.ones(2)]])
    assert alive == [1, 2, 2]  # the caller holds the input


@pytest.mark.parametrize(
    ("call", "inputs", "message"),
    [
        ("a: f32[2] = c10d.all_reduce_.default(x, 'sum', 'dp')", [[1, 2]], "doesn't know the collective"),
        ("a: f32[2] = c10d.all_reduce.default(x, 'product', 'dp')", [values(2, 2)], "not 'product'"),
        ("a: f32[6] = c10d.all_gather_into_tensor.default(x, 3, 'dp')", [values(2, 2)], "group_size is 3"),
        ("a: f32[2] = c10d.all_reduce.default(x, 'sum', 'dp')", [[torch.ones(2), torch.ones(3)]], "that differ"),
        ("a: f32[4] = zerofx.unshard.default(x, [4], 0, 2, 'dp')", [[torch.ones(2), torch.ones(1)]], "has 1 rows"),
        ("a: f32[1] = zerofx.reduce_grad.default(x, 0, 1, 'dp')", [values(2, 3)], "says 1 rows, the rank stores 2"),
        ("a: f32[2] = aten.neg.default(x)", [], "no input is left for the placeholder x"),
        ("a: f32[2] = aten.neg.default(x)", [[torch.ones(2)]], "x has 1 values for 2 ranks"),
        ("a: f32[2] = aten.neg.default(x)", [values(2, 2)] * 2, "2 inputs are more"),
    ],
)
def test_what_cannot_run_on_all_ranks_is_refused(call: str, inputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(program("dp=2", "x: f32[2]", call), inputs)


def test_an_error_names_the_node() -> None:
    graph = program("dp=2", "x: f32[2]", "a: f32[1] = c10d.reduce_scatter_tensor.default(x, 'sum', 2, 'dp')")
    with pytest.raises(ValueError, match="3 rows can't be scattered") as raised:
        simulate(graph, [values(2, 3)])
    assert raised.value.__notes__[0].startswith("while simulating a = _c10d_functional.reduce_scatter_tensor.default")


def test_scatter_refuses_a_value_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"w has the shape \(2, 2\), but \(3, 2\) in the layout"):
        scatter(torch.ones(2, 2), ParamLayout("w", (3, 2), torch.float32, 0), Mesh.of(dp=2))
