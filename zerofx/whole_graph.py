"""Captures a model's whole forward as one graph, without data: what a pipeline's stages are cut from."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from zerofx import _torch
from zerofx.check_model import tensors_in
from zerofx.pipeline import PipelineError
from zerofx.unfit import unfit, untraced

Kind = str
"""What an input of a graph is: `param`, `buffer`, `batch` or `constant`."""


@dataclass(frozen=True)
class Input:
    """An input of the whole graph: a parameter or buffer by its name, a leaf of the batch by its place, or what is
    neither: a tensor that a module keeps as a plain attribute, or the DeviceMesh of a hook of `parallelize_module`.
    """

    kind: Kind
    name: str = ""
    place: int = -1
    value: Any = field(default=None, compare=False)


@dataclass
class WholeGraph:
    """The forward of a model for batches of one kind.

    `outputs` are the graph's nodes whose values the model returns, and `leaves` say of each leaf of what it returns
    which of them it is, or else its value.
    """

    module: GraphModule
    inputs: dict[Node, Input]
    outputs: list[Node]
    leaves: list[tuple[int, Any]]
    spec: TreeSpec

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def result(self, values: Sequence[Tensor]) -> Any:
        """What the model returns, with these values of its outputs."""
        return self.spec.unflatten([value if place < 0 else values[place] for place, value in self.leaves])


class WithoutData:
    """A copy of a model whose parameters and buffers have no data; modules keep their attributes."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.mode, self.device = _torch.fake_tensors(), device
        known: dict[int, Any] = {id(group): group for group in _torch.process_groups()}  # they are not copied
        known |= {id(p.device_mesh): p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        for tensor in (*model.parameters(), *model.buffers()):
            known[id(tensor)] = self.blank(tensor)
        self.model = copy.deepcopy(model, known)
        self.names = {id(p): Input("param", name) for name, p in self.model.named_parameters()}
        self.names |= {id(b): Input("buffer", name) for name, b in self.model.named_buffers()}

    def blank(self, tensor: Tensor) -> Tensor:
        """A tensor without data of the same shape, strides and dtype, on the device that the model trains on."""
        if isinstance(tensor, DTensor):
            local = self.blank(_torch.local_tensor(tensor))
            with self.mode:
                made: Tensor = DTensor.from_local(
                    local,
                    tensor.device_mesh,
                    tensor.placements,
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
                return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        with self.mode:
            made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=self.device)
            return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], autocast: Callable[[], AbstractContextManager[Any]]
    ) -> WholeGraph:
        """The graph of `model(*args, **kwargs)`, of which only shapes, dtypes and what is no tensor are read.

        Raises PipelineError where torch.compile makes no single graph of it.
        """
        found = dict[str, Any]()

        def backend(gm: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            (end,) = gm.graph.find_nodes(op="output")
            values = [node.meta["example_value"] if isinstance(node, Node) else node for node in end.args[0]]
            found.update(gm=gm, given=list(given), values=values)
            return lambda *inputs: values

        model = self.model

        def call(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        compiled = torch.compile(
            _torch.own_code(call), backend=backend, fullgraph=True, dynamic=False, **_torch.own_limit()
        )
        with self.mode, autocast(), torch.enable_grad(), _torch.quiet_tracing():
            args, kwargs = tree_map_only(Tensor, self.blank, (args, dict(kwargs)))
            try:
                result = compiled(*args, **kwargs)
            except Exception as error:
                if why := unfit(model.forward, args, kwargs):
                    raise PipelineError(
                        f"the model does not take what it is called with ({why}): give example_inputs=(args, kwargs) "
                        "as in a call of the model"
                    ) from None
                breaks = "take what breaks the graph out of the forward, or mend example_inputs if they do not fit it"
                raise PipelineError(
                    "the model cannot be cut into stages, because torch.compile makes no single graph of its forward "
                    f"on example_inputs: {untraced(error)}; {breaks}"
                ) from None
        if "gm" not in found:
            raise PipelineError("the model cannot be cut into stages: its forward computes nothing")
        leaves, _ = tree_flatten((args, kwargs))
        return self._whole(found["gm"], found["given"], found["values"], leaves, result)

    def _whole(
        self, gm: GraphModule, given: list[Any], values: Sequence[Any], leaves: list[Any], result: Any
    ) -> WholeGraph:
        batch = {id(leaf): Input("batch", place=place) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        inputs = dict[Node, Input]()
        kept = {id(t) for m in self.model.modules() for held in m.__dict__.values() for t in tensors_in(held, depth=2)}
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), given, strict=True):
            known = self.names.get(id(value)) or batch.get(id(value))
            inputs[node] = known or Input("constant", value=value)
            if known is None and id(value) not in kept and not isinstance(value, DeviceMesh):
                raise PipelineError(
                    f"the model cannot be cut into stages: its forward reads {node.name!r}, a {type(value).__name__} "
                    "that is none of the model's parameters, buffers and attributes, nor a tensor in the arguments or "
                    "in tuples, lists and dicts among them: hand it over as one of these"
                )
        (end,) = gm.graph.find_nodes(op="output")
        places = {id(value): place for place, value in enumerate(values)}
        nodes = [node for node in end.args[0] if isinstance(node, Node)]
        returned, spec = tree_flatten(result)
        outputs, told = list[Node](), list[tuple[int, Any]]()
        for leaf in returned:
            if not isinstance(leaf, Tensor):
                told.append((-1, leaf if isinstance(leaf, (int, float, str, bool, type(None))) else None))
                continue
            if id(leaf) not in places:
                raise PipelineError(
                    "the model cannot be cut into stages: it returns a tensor that its forward does not compute, such "
                    "as one of its inputs; return results only"
                )
            node = nodes[places[id(leaf)]]
            if node not in outputs:
                outputs.append(node)
            told.append((outputs.index(node), None))
        if not outputs:
            raise PipelineError("the model cannot be cut into stages: it returns no tensor")
        end.args = (tuple(outputs),)
        return WholeGraph(gm, inputs, outputs, told, spec)


def module_of(node: Node) -> str:
    """The name of the module whose forward calls the node's function."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _name(stack[-1][0]) if stack else ""


def modules_of(node: Node) -> list[str]:
    """The names of all modules whose forward is under way at the node, outermost first."""
    return [_name(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _name(path: str) -> str:
    """`blocks.0.norm` for `G['model'].blocks.0.norm`, however Dynamo writes it."""
    path = re.sub(r"^\w\['\w+'\]", "", path)
    path = re.sub(
        r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]", lambda m: "." + next(g for g in m.groups() if g), path
    )
    return path.strip(".")
