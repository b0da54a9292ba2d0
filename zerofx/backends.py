"""What torch.compile hands captured graphs to: the passes, and then Inductor or the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from zerofx import _torch
from zerofx.capture import Capture, has_markers

Compiled = Callable[..., Any]


def interpret(capture: Capture, gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Runs the rewritten graphs node by node, and frees each value after its last use."""

    def runner(graph_module: GraphModule, _: Any) -> Compiled:
        interpreter = Interpreter(graph_module)

        def run(args: list[Any]) -> Any:
            try:
                return interpreter.boxed_run(args)
            finally:
                interpreter.env.clear()  # it would hold the results until its next run

        return _torch.boxed(run)

    def infer(graph_module: GraphModule, example_inputs: Any) -> Compiled:
        capture.infer(graph_module.graph)
        graph_module.recompile()
        return runner(graph_module, example_inputs)

    return _torch.aot_compile(gm, inputs, runner, infer, capture.partition)


def inductor(capture: Capture, uuid: str, gm: GraphModule, inputs: Sequence[Any], use_caches: bool = True) -> Compiled:
    """Compiles the rewritten graphs; both compile caches hit as long as `uuid` stays the same."""

    def infer(graph: torch.fx.Graph) -> None:
        if has_markers(graph):
            capture.infer(graph)

    return _torch.inductor_compile(gm, inputs, capture.partition, infer, uuid, use_caches)
