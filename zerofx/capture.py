"""Carries graphs of torch.compile into programs, through the passes, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch
from zerofx.blocks import Users
from zerofx.decide import NOTHING_DECIDED, Decision, Forecast
from zerofx.edit import map_per_rank, set_local_rows
from zerofx.layout import Layout, ParamLayout, PerRank
from zerofx.manager import Pass, Step, run
from zerofx.mesh import Mesh
from zerofx.need import need_of
from zerofx.ops import REPLICATED
from zerofx.origins import Origins, note_origins
from zerofx.passes.fuse_optimizer import FuseOptimizer
from zerofx.program import (
    Level,
    Program,
    Tag,
    is_kept,
    marked_param,
    output_node,
    output_tags,
    outputs,
    placeholders,
    source,
    tag,
)
from zerofx.recompute import Chosen, choose, graph_name, put
from zerofx.text import show
from zerofx.unrepeatable import describe_states, save_unrepeatable

aten, zerofx = torch.ops.aten, torch.ops.zerofx
MARKERS = {zerofx.unshard.default, zerofx.unshard_apart.default, zerofx.reduce_grad.default}


@dataclass
class Capture:
    """One graph that Dynamo has captured: the parameters among its inputs, and the passes that ran on it.

    Parameters that are DTensors, or all where `in_parts`, are stored as `layout` says; others are whole. `wholes` are
    inputs that stand beside parameters, kept gathered or for their gradients. The parameters `updated` are updated in
    the backward, if the passes fuse that.
    """

    params: Mapping[int, str]
    passes: Sequence[Pass]
    mesh: Mesh
    layout: Layout
    rank: int
    decision: Decision = NOTHING_DECIDED
    in_parts: bool = False
    wholes: Mapping[int, str] = field(default_factory=dict)
    kind: str = ""
    chosen: Chosen | None = None
    steps: list[Step] = field(default_factory=list)
    users: Users | None = None
    updated: tuple[str, ...] = ()
    origins: Origins = field(default_factory=dict)
    before_pass: Callable[[str], None] | None = None
    name: str = ""

    def update_in_backward(self, names: Iterable[str]) -> None:
        """Lets the backward update these parameters."""
        self.updated = tuple(sorted(set(names)))
        self.passes = tuple(
            replace(step, params=self.updated) if isinstance(step, FuseOptimizer) else step for step in self.passes
        )

    @property
    def blocks(self) -> tuple[Mapping[str, str], ...]:
        """The blocks that run the graph: their parameters' names by those in the graph."""
        return self.users.blocks if self.users else ({},)

    def partition(self, joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Runs the logical passes on a joint graph, cuts it into forward and backward, and runs the physical passes."""
        program, forward, backward = self._cut(joint, inputs, **kwargs)
        self._localise(program)
        forward.recompile()
        backward.recompile()
        return forward, backward

    def infer(self, graph: Graph) -> None:
        """Runs all passes on a graph that has no backward."""
        self.kind = "inference"
        program = self._start("inference", graph)
        program.level = Level.PHYSICAL
        self._run(program)
        self._localise(program)

    def write_artifacts(self, graph: int) -> None:
        """Writes the program as captured and after each pass where TORCH_TRACE collects such texts, for tlparse."""
        for number, step in enumerate(self.steps):
            _torch.trace_artifact(f"zerofx_graph_{graph}_{number:02}_{step.name}", step.text)

    def run_alone(self, program: Program) -> None:
        """Runs the physical passes on a program of one graph that no model was traced for."""
        (self.kind,) = program.graphs
        self.steps = [Step("capture", show(program), 0.0)]
        self._run(program)
        self._localise(program)

    def forecast(self, joint: GraphModule, inputs: Sequence[Any], steady: int, **kwargs: Any) -> Forecast:
        """What a step will hold beside `steady` bytes, when the graph, which stays as it is, is cut as decided."""
        module = GraphModule(joint, copy.deepcopy(joint.graph))
        program, *_ = self._cut(module, inputs, **kwargs)
        return Forecast(need_of(program, steady), self.chosen)

    def _start(self, name: str, graph: Graph) -> Program:
        program = Program({name: graph}, self.mesh, self.layout)
        _tag_whole(graph, self.params, self.wholes, self.layout, self.mesh, self.in_parts)
        self.steps = [Step("capture", show(program), 0.0)]
        self._run(program)
        return program

    def _cut(
        self, joint: GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[Program, GraphModule, GraphModule]:
        """The program of rank 0 after all passes, and its two halves."""
        self.kind = "train"
        program = self._start("joint", joint.graph)
        save_unrepeatable(joint.graph)
        joint.recompile()
        self.chosen = self._choose(joint, inputs, **kwargs)
        with nullcontext() if self.chosen is None else _torch.activation_budget(1.0):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        describe_states(forward.graph)
        describe_states(backward.graph)
        _put_objects_last(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
        program.graphs = {"forward": forward.graph, "backward": backward.graph}
        _tag_halves(program, output_tags(joint.graph), kwargs["num_fwd_outputs"])
        program.level = Level.PHYSICAL
        self.steps.append(Step("partition", show(program), 0.0))
        self._run(program)
        return program, forward, backward

    def _run(self, program: Program) -> None:
        """Runs the passes of the program's level, and notes where all nodes that they see or make come from."""
        self.steps += run(program, self.passes, self._before)
        note_origins(program, self.origins)

    def _before(self, name: str, program: Program) -> None:
        note_origins(program, self.origins)
        if self.before_pass is not None:
            self.before_pass(name)

    def _choose(self, joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Chosen | None:
        """Tells the partition what to compute again, as decided for such graphs or else for this one alone."""
        if not self.decision.recompute:
            return None
        chosen = self.decision.chosen
        if chosen is None or chosen.graph != graph_name(joint.graph):
            chosen = choose(joint, inputs, self.decision.recompute, **kwargs)
        put(chosen, joint.graph)
        return chosen

    def _localise(self, program: Program) -> None:
        """Makes the program that of this rank."""
        place = self.mesh.coordinate(self.rank, "dp")
        sizes = {param.name: param.local_size(self.mesh.axis("dp").size, place) for param in program.layout}
        for graph in program.graphs.values():
            ragged = map_per_rank(graph, lambda value: value.at(place))
            set_local_rows(graph, sizes, ragged)


def has_markers(graph: Graph) -> bool:
    return any(node.target in MARKERS for node in graph.nodes)


def reads_parameters(gm: GraphModule) -> bool:
    """Whether a graph of Dynamo, or one inside it, reads a sharded parameter."""
    return any(node.target in MARKERS for node in nodes_of(gm))


def nodes_of(gm: GraphModule) -> Iterator[Node]:
    """The nodes of a graph of Dynamo and of those inside it, such as regions of activation checkpointing."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def _tag_whole(
    graph: Graph,
    params: Mapping[int, str],
    wholes: Mapping[int, str],
    layout: Layout,
    mesh: Mesh,
    in_parts: bool,
) -> None:
    """Tags inputs, markers and outputs, and makes the graph that of rank 0."""
    for node in placeholders(graph):
        desc = node.meta.get("desc")
        name, whole = _named(desc, params), _named(desc, wholes)
        if _torch.is_tangent(desc):
            node.meta["zerofx"] = Tag("tangent")
        elif whole is not None:
            node.meta["zerofx"] = Tag("whole", (whole,))
        elif name is not None and isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["zerofx"] = Tag(_input_role(layout[name], in_parts or _torch.is_subclass_part(desc)), (name,))
    _drop_own_views(graph)
    _split_apart(graph)
    tags: list[Tag | None] = []
    out = output_node(graph)
    for value, desc in zip(outputs(graph), out.meta["desc"], strict=True):
        if not _torch.is_gradient(desc):
            tags.append(Tag("out") if value is not None else None)
            continue
        name, whole = _named(desc, params), _named(desc, wholes)
        if whole is not None and value is not None:
            tags.append(Tag("partial", (whole,)))
            continue
        if name is None or value is None or not isinstance(value.meta.get("val"), torch.Tensor):
            tags.append(None)
            continue
        tags.append(Tag("grad", (name,)))
        _tag_reductions(value, name)
    out.meta["zerofx"] = tuple(tags)
    _make_neutral(graph, layout, mesh.axis("dp").size)


def _named(desc: Any, names: Mapping[int, str]) -> str | None:
    """The name of the input that `desc` describes, or whose gradient it does, if it has one."""
    index = _torch.input_index(desc)
    return None if index is None else names.get(index)


def _input_role(param: ParamLayout, stored: bool) -> str:
    if not stored:
        return "param"
    return "replica" if param.dim is None else "shard"


def _drop_own_views(graph: Graph) -> None:
    """DTensor views a stored part as itself on the way in and out; such views name rows that differ by rank."""
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        part, known = source(node), tag(source(node))
        stored = part.op == "placeholder" and known is not None and known.role in ("shard", "replica")
        same = part.meta["val"].shape == node.meta["val"].shape
        if same and (stored or part.target is zerofx.reduce_grad.default):
            node.replace_all_uses_with(part)
            graph.erase_node(node)


def _split_apart(graph: Graph) -> None:
    """Makes each read with a whole tensor beside it a plain one: of the part, or, as of a replica, of what is kept."""
    for node in graph.find_nodes(op="call_function", target=zerofx.unshard_apart.default):
        part, whole, size, dim, rows, group, kept, _ = node.args
        node.target = zerofx.unshard.default
        node.args = (whole, size, REPLICATED, 0, group) if kept else (part, size, dim, rows, group)
        node.kwargs = {}


def _tag_reductions(grad: Node, name: str) -> None:
    todo, seen = [grad], set[Node]()
    while todo:
        node = todo.pop()
        if node.target is zerofx.reduce_grad.default:
            node.meta["zerofx"] = Tag("reduce_grad", (name,))
        elif node.op == "call_function" and "zerofx" not in node.meta and node not in seen:
            seen.add(node)
            todo += [n for n in node.all_input_nodes if n.op == "call_function"]


def _make_neutral(graph: Graph, layout: Layout, world: int) -> None:
    """Replaces what differs by rank: the number of rows that this one stores."""
    for node in graph.nodes:
        if node.target is zerofx.unshard.default:
            node.meta["zerofx"] = Tag("unshard", (marked_param(source(node)),))
            if is_kept(node):
                continue
            rows_at = 3
        elif node.target is zerofx.reduce_grad.default:
            rows_at = 2
        else:
            continue
        param = layout[marked_param(node)]
        if param.dim is not None:
            args = list(node.args)
            args[rows_at] = PerRank("rows", param.size[param.dim], world)
            node.args = tuple(args)
    set_local_rows(graph, {param.name: param.local_size(world, 0) for param in layout}, set())


def _put_objects_last(forward: Graph, backward: Graph, seen: int) -> None:
    """Puts a DTensor's mesh behind the saved tensors, where AOTAutograd looks for objects.

    The partition itself puts the random-number states of checkpointed regions behind the objects.
    """
    out = output_node(forward)
    values = outputs(forward)
    tensors = [value for value in values[seen:] if _is_tensor(value)]
    out.args = ((*values[:seen], *tensors, *(value for value in values[seen:] if not _is_tensor(value))),)
    inputs = placeholders(backward)
    tangent = next((node for node in inputs if _torch.is_tangent(node.meta.get("desc"))), None)
    if tangent is None:
        return
    for node in inputs[: inputs.index(tangent)]:
        if _torch.is_handed_object(node.meta.get("val")):
            tangent.prepend(node)


def _is_tensor(value: Node | None) -> bool:
    return value is not None and isinstance(value.meta.get("val"), torch.Tensor)


def _tag_halves(program: Program, joint: tuple[Tag | None, ...], seen: int) -> None:
    """Tags the outputs of forward and backward; their other nodes bring their tags along.

    The first `seen` outputs of the forward are those of the joint graph, the others are kept for the backward.
    """
    forward, backward = program.graphs["forward"], program.graphs["backward"]
    saved = len(outputs(forward)) - seen
    output_node(forward).meta["zerofx"] = (Tag("out"),) * seen + (Tag("saved"),) * saved
    output_node(backward).meta["zerofx"] = joint[seen:]
    for node in placeholders(backward):
        if (known := tag(node)) and known.role not in ("tangent", "shard", "replica", "param", "whole"):
            del node.meta["zerofx"]
