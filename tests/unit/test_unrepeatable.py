"""What the partition must not compute again in the backward."""

from __future__ import annotations

import torch
from torch.fx import Graph

from zerofx.program import is_saved
from zerofx.unrepeatable import save_unrepeatable

c10d, aten = torch.ops._c10d_functional, torch.ops.aten


def test_collectives_of_the_models_own_are_not_issued_again() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    summed = graph.call_function(c10d.all_reduce.default, (doubled, "sum", "3"))
    waited = graph.call_function(c10d.wait_tensor.default, (summed,))
    graph.output((waited,))
    save_unrepeatable(graph)
    assert [is_saved(node) for node in (doubled, summed, waited)] == [False, True, True]
