"""A backward is cut into the half for the inputs and the half for the weights, which together give what it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter

from zerofx.stage_halves import Halves, cut_backward

aten = torch.ops.aten


def backward() -> GraphModule:
    """Of y = x @ w + b: gradients of w, of an input without one, of b, and of x, all from one scaled tangent."""
    graph = Graph()
    x, w, tangent = (graph.placeholder(name) for name in ("x", "w", "tangent"))
    scaled = graph.call_function(aten.mul.Tensor, (tangent, 2.0))
    of_w = graph.call_function(aten.mm.default, (graph.call_function(aten.t.default, (x,)), scaled))
    of_b = graph.call_function(aten.sum.dim_IntList, (scaled, [0]))
    of_x = graph.call_function(aten.mm.default, (scaled, graph.call_function(aten.t.default, (w,))))
    graph.output((of_w, None, of_b, of_x))
    return GraphModule({}, graph)


VALUES = [torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)]


def halves() -> tuple[Halves, Any]:
    made = Halves([0, 2], lambda part: lambda args: Interpreter(part).run(*args))
    return made, made.compile(backward())


def test_the_first_half_computes_nothing_for_weights_alone() -> None:
    first, second = cut_backward(backward(), [0, 2])
    names = [[str(node.target) for node in part.graph.nodes if node.op == "call_function"] for part in (first, second)]
    assert names == [["aten.mul.Tensor", "aten.t.default", "aten.mm.default"], [
        "aten.t.default", "aten.mm.default", "aten.sum.dim_IntList"
    ]]  # fmt: skip
    assert [node.name for node in second.graph.find_nodes(op="placeholder")] == ["x", "mul_tensor"]


def test_both_halves_give_what_the_whole_gives_together_or_apart() -> None:
    expected = Interpreter(backward()).run(*VALUES)
    made, run = halves()
    together = run(list(VALUES))
    assert made.later == [] and together[1] is None
    made.apart = True
    apart = run(list(VALUES))
    (later,) = made.later
    assert apart[0] is None and apart[2] is None
    for place in (0, 2, 3):
        assert torch.equal(together[place], expected[place])
    assert torch.equal(apart[3], expected[3])
    assert all(torch.equal(a, b) for a, b in zip(later(), (expected[0], expected[2]), strict=True))


def test_a_weight_without_a_gradient_has_none() -> None:
    made = Halves([0, 1], lambda part: lambda args: Interpreter(part).run(*args))
    run = made.compile(backward())
    made.apart = True
    run(list(VALUES))
    of_w, nothing = made.later[0]()
    assert of_w is not None and nothing is None
