"""What torch.compile hands captured graphs to: the passes, and then Inductor or the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function
from torch.fx import Graph, GraphModule, Interpreter, Node

from zerofx import _torch
from zerofx.capture import Capture, has_markers
from zerofx.collectives import P2P
from zerofx.naming import range_name

Compiled = Callable[..., Any]


def interpret(capture: Capture, gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Runs the rewritten graphs node by node, and frees each value after its last use."""
    return interpret_in_halves(capture, gm, inputs, None)


def interpret_in_halves(capture: Capture, gm: GraphModule, inputs: Sequence[Any], backward: Any) -> Compiled:
    """The same, with a compiler for the backward if there is one."""

    def infer(graph_module: GraphModule, _: Any) -> Compiled:
        capture.infer(graph_module.graph)
        graph_module.recompile()
        return _runner(graph_module)

    return _torch.aot_compile(gm, inputs, _runner, infer, capture.partition, backward)


def run_alone(graph: Graph, root: Any = None) -> Compiled:
    """Runs a graph node by node; it takes its inputs as one list, which is emptied. `root` has its attributes."""
    return _runner(GraphModule({} if root is None else root, graph))


class _Ranges(Interpreter):
    """Tells the profiler which parameters a collective, or a wait for one, is for."""

    def run_node(self, node: Node) -> Any:
        name = range_name(node) if node.op == "call_function" else None
        if name is None:
            return super().run_node(node)
        with record_function(name):
            return super().run_node(node)


def _runner(graph_module: GraphModule, _: Any = None) -> Compiled:
    interpreter = Interpreter(graph_module)

    def run(args: list[Any]) -> Any:
        chosen = _Ranges(graph_module) if _torch.is_profiling() else interpreter
        try:
            return chosen.boxed_run(args)
        finally:
            chosen.env.clear()  # it would hold the results until its next run

    return _torch.boxed(run)


def inductor(
    capture: Capture,
    uuid: str,
    gm: GraphModule,
    inputs: Sequence[Any],
    use_caches: bool = True,
    backward_compiler: Any = None,
) -> Compiled:
    """Compiles the rewritten graphs; both compile caches hit as long as `uuid` stays the same."""
    for op in P2P:
        _torch.lower_as_collective(op)

    def infer(graph: torch.fx.Graph) -> None:
        if has_markers(graph):
            capture.infer(graph)

    return _torch.inductor_compile(gm, inputs, capture.partition, infer, uuid, use_caches, backward_compiler)


class Joint(NamedTuple):
    """A joint graph as it comes to the partition, and what comes with it."""

    graph: GraphModule
    inputs: Sequence[Any]
    options: dict[str, Any]


class _StopError(Exception):
    """Ends a compilation at its partition."""


def trace(backend: str, gm: GraphModule, inputs: Sequence[Any]) -> Joint | None:
    """The joint graph that the backend will be given to cut, and nothing compiled; None where there is no backward."""
    found = list[Joint]()

    def stop(graph: GraphModule, given: Sequence[Any], **options: Any) -> Any:
        found.append(Joint(graph, given, options))
        raise _StopError

    def ignore(*_: Any) -> Any:
        raise _StopError

    try:
        if backend == "interpreter":
            _torch.aot_compile(gm, inputs, ignore, ignore, stop)
        else:
            _torch.inductor_compile(gm, inputs, stop, ignore, "trace", use_caches=False)
    except _StopError:
        pass
    return found[0] if found else None
