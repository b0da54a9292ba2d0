"""Which values of the forward the backward computes again: chosen on one graph, and put on graphs of other shapes.

The partition weighs values by their bytes, so that ranks whose batches differ, and later graphs of other shapes, would
choose otherwise and gather parameters in another order. What is chosen is therefore told by places in the sequence of
the graph's calls, which shapes do not change.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from zerofx import _torch
from zerofx.edit import fake_mode
from zerofx.program import outputs, placeholders

aten = torch.ops.aten
SAVES_NOTHING = 1e-9  # a budget of 0 would ignore what has to be saved


@dataclass(frozen=True)
class Chosen:
    """The calls of a graph, by place, whose values are saved, and those that are made again in the backward.

    `graph` names the graphs for which this holds.
    """

    graph: str
    saved: tuple[int, ...]
    again: tuple[int, ...]

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Chosen:
        return cls(told["graph"], tuple(told["saved"]), tuple(told["again"]))


def choose(joint: GraphModule, inputs: Sequence[Any], share: float, **kwargs: Any) -> Chosen:
    """Lets torch's partition choose, for a share of the bytes of activations that is not to be saved."""
    module = GraphModule(joint, _with_free_inputs(joint.graph))
    with _torch.activation_budget(max(1 - share, SAVES_NOTHING)):
        halves = min_cut_rematerialization_partition(module, inputs, **kwargs)
    forward, backward = ({node.name for node in half.graph.nodes if node.op == "call_function"} for half in halves)
    kept = {node.name for node in outputs(halves[0].graph)[kwargs["num_fwd_outputs"] :] if node is not None}
    calls = _calls(joint.graph)
    saved, again = (
        tuple(place for place, node in enumerate(calls) if node.name in names) for names in (kept, forward & backward)
    )
    return Chosen(graph_name(joint.graph), saved, again)


def put(chosen: Chosen, graph: Graph) -> None:
    """Tells the partition what was chosen; what a pass or the user said of a call stays."""
    calls = _calls(graph)
    for places, policy in ((chosen.saved, CheckpointPolicy.MUST_SAVE), (chosen.again, CheckpointPolicy.MUST_RECOMPUTE)):
        for place in places:
            calls[place].meta.setdefault("recompute", policy)


def graph_name(graph: Graph) -> str:
    """The same for graphs that make the same calls on the same values, whatever the shapes."""
    calls = _calls(graph)
    places = {node: place for place, node in enumerate([*filter(_has_tensor, placeholders(graph)), *calls])}
    told = [(str(node.target), [places[read] for read in node.all_input_nodes if read in places]) for node in calls]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _calls(graph: Graph) -> list[Node]:
    """The calls that make tensors; others compute sizes, where a graph has symbols."""
    return [node for node in graph.nodes if node.op == "call_function" and _has_tensor(node)]


def _has_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return any(isinstance(part, torch.Tensor) for part in (value if isinstance(value, (tuple, list)) else [value]))


def _with_free_inputs(graph: Graph) -> Graph:
    """A copy in which inputs have no bytes: the caller holds them, whether they are saved or not.

    Otherwise the partition takes its share of activations and of all parameters together, and if what it would save is
    less than all inputs it computes nothing again.
    """
    graph = copy.deepcopy(graph)
    inputs = placeholders(graph)
    with fake_mode(graph):
        for node in inputs:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or _torch.is_tangent(node.meta.get("desc")):
                continue
            if all(isinstance(size, int) for size in value.shape):
                _read_as(node, inputs[-1])
                node.meta["val"] = value.new_empty(0)
    return graph


def _read_as(node: Node, last: Node) -> None:
    """Lets readers find the input's shape in a view of it, which is never saved."""
    with node.graph.inserting_after(last):
        view = node.graph.call_function(aten.alias.default, (node,))
    view.meta = {"val": node.meta["val"], "recompute": CheckpointPolicy.MUST_RECOMPUTE}
    node.replace_all_uses_with(view, lambda user: user is not view and user.target is not aten.copy_.default)
