"""Holds a compiled model's layout and captured graphs, and runs its forward through torch.compile."""

from __future__ import annotations

import hashlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from zerofx import _torch, records
from zerofx.accumulate import Accumulation
from zerofx.agree import RankMismatchError
from zerofx.backends import Joint, inductor, interpret
from zerofx.blocks import Users, compile_pieces
from zerofx.boundary import Group
from zerofx.capture import Capture, reads_parameters
from zerofx.config import PRECISIONS, Config, ModelError
from zerofx.decide import NOTHING_DECIDED, Decision, Forecast, MemoryLimitError, Settled
from zerofx.gathered import LostWriteError
from zerofx.layout import Layout
from zerofx.manager import Pass, is_of_pass
from zerofx.mesh import Mesh, ModelParallel
from zerofx.notes import Halves, compiling, halves_of, note_call, noted
from zerofx.passes.release_after_use import ReleaseAfterUse
from zerofx.pipelined import Pipelined
from zerofx.reporting.progress import Progress
from zerofx.reporting.recorder import Recorder
from zerofx.running import RUNNING
from zerofx.settle import Graph, settle
from zerofx.swap import READS, stand_ins
from zerofx.sync import give_methods
from zerofx.unsupported import explained
from zerofx.updates import Updates
from zerofx.watch import follow
from zerofx.writes import lent_outputs, refuse_writes


class Engine:
    """One for each compiled model, found in the root module's `__dict__` as `_zerofx_engine`."""

    def __init__(
        self,
        config: Config,
        passes: tuple[Pass, ...],
        mesh: Mesh,
        layout: Layout,
        rank: int,
        ignored: frozenset[str] = frozenset(),
        parallel: ModelParallel = ModelParallel(),  # noqa: B008
    ) -> None:
        self.config, self.passes, self.mesh, self.layout, self.rank = config, passes, mesh, layout, rank
        self.ignored, self.parallel = ignored, parallel
        self.group = mesh.axis("dp").group
        self.captures: list[Capture] = []
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.warned = False
        self.settled: Settled | None = None
        self.accumulation = Accumulation(self)
        self.pipelined: Pipelined | None = None
        self.recorder: Recorder | None = None
        self.progress = Progress(shown=False)

    def __reduce__(self) -> tuple[Callable[..., Engine], tuple[Any, ...]]:
        if self.pipelined is not None:
            raise TypeError("a model compiled with pipeline=... cannot be copied or pickled: save its state_dict()")
        own = (self.config, self.passes, self.mesh, self.layout, self.rank, self.ignored, self.parallel)
        return _again, (*own, self.settled)

    def attach(self, model: nn.Module) -> None:
        """Makes calls of the model run compiled."""
        self.model = weakref.ref(model)
        model.__dict__["_zerofx_engine"] = self
        give_methods(model)
        if self.pipelined is not None:
            self.pipelined.attach(self, model)
            model.__dict__["_compiled_call_impl"] = self.pipelined
            return
        follow(self.group, model)
        model.__dict__["_compiled_call_impl"] = CompiledCall(self, model)
        if self.config.per_block and self.config.backend != "eager":
            compile_pieces(model, self.torch_compile)

    def micro_batch(
        self, first: bool, last: bool, defer: bool, updates: Updates | None = None
    ) -> AbstractContextManager[None]:
        """Enter it around forward and backward of one micro-batch, where all those of a step are known.

        Parameters must not change between the first and the last one. From the second micro-batch on, stages 1 and 2
        gather nothing: all parameters are gathered as the first one is entered, unless it is the last one, too, and
        kept until that is left. With `defer` gradients wait, and the last backward reduces them. With `updates`, the
        backward of a step's only micro-batch updates parameters.
        """
        return self.accumulation.micro_batch(first, last, defer, updates)

    @property
    def step_group(self) -> Group:
        """The ranks that end a step together."""
        if self.pipelined is not None:
            return self.pipelined.group
        return Group(self.group, self.mesh.world, self.mesh.world)

    def capture_stage(self, stage: int) -> Capture:
        """For a stage of a pipeline, which reads parameters that have been gathered beside its graph."""
        decision = Decision(recompute=self.config.recompute or 0.0)
        return self._watched(Capture({}, (), self.mesh, Layout(), self.rank, decision, name=f"stage {stage}"))

    def compiled(self, capture: Capture) -> None:
        """Records a graph behind its passes, if that was asked for; graphs that no pass runs on are not counted."""
        if self.recorder is not None and capture.steps:
            known = [each for each in self.captures if each.steps]
            self.recorder.graph(next(i for i, each in enumerate(known) if each is capture), capture, self.device.type)

    def capture_alone(self, layout: Layout) -> Capture:
        """For a program of these parameters that no model was traced for."""
        return self._watched(Capture({}, self.passes, self.mesh, layout, self.rank))

    def _watched(self, capture: Capture) -> Capture:
        capture.before_pass = self.progress.advance
        self.captures.append(capture)
        return capture

    def autocast(self) -> AbstractContextManager[Any]:
        """What the model is called in, as `precision` says."""
        return autocast(self.config.precision, self.device)

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        model = self.model()
        assert model is not None
        return next((param.device for param in model.parameters()), torch.device("cpu"))

    def torch_compile(self, call: Callable[..., Any], modules: int = 1) -> Callable[..., Any]:
        """The call compiled, which that many modules share."""
        options: dict[str, Any] = {"dynamic": self.config.dynamic, "fullgraph": self.config.fullgraph}
        return torch.compile(call, backend=self.backend, **options, **_torch.own_limit(modules))

    def backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend."""
        self.refuse_new_parameters()
        with compiling(self.group), self.progress.compiling(len(self.captures), self.config.backend):
            capture, compiled = self._compile(gm, inputs)
            capture.write_artifacts(len(self.captures) - 1)
            self.compiled(capture)
        if self.mesh.world > 1 and capture.steps:  # no pass runs on a graph without parameters
            where = f"graph {len(self.captures) - 1} of {type(self.model()).__name__}"
            compiled = noted(compiled, self._halves(capture, where), self.group)
        if capture.updated:
            places = {name: place for place, name in capture.params.items() if name in capture.updated}
            compiled = self.accumulation.updating(compiled, places)
        lent = lent_outputs(gm, capture.params)
        return RUNNING.lending(compiled, lent) if lent else compiled

    def _compile(self, gm: GraphModule, inputs: Sequence[Any]) -> tuple[Capture, Callable[..., Any]]:
        names, layout = self.parameters_now()
        params = {place: names[id(value)] for place, value in enumerate(inputs) if id(value) in names}
        stands = self.accumulation.stands.names_of_wholes()
        wholes = {place: stands[id(value)] for place, value in enumerate(inputs) if id(value) in stands}
        if self.config.per_block:
            layout = layout.of(params.values())
        refuse_writes(gm, params)
        if self.settled is None and self._decides(inputs, params | wholes):
            self.settled = self._settle(gm, inputs, params, wholes, layout)
        capture = self._capture(params, wholes, layout, self.decision)
        updated = self.accumulation.stands.names_of_updated()
        capture.update_in_backward(updated[id(value)] for value in inputs if id(value) in updated)
        self._watched(capture)
        if self.config.backend == "interpreter":
            return capture, interpret(capture, gm, inputs)
        key = records.key(gm, inputs, params | wholes, self.digest() + repr(capture.updated))
        compiled = inductor(capture, key, gm, inputs)
        if not capture.steps and not records.load(key, capture) and reads_parameters(gm):
            # Compiled by another process whose record is gone: without it there would be nothing to inspect.
            compiled = inductor(capture, key, gm, inputs, use_caches=False)
        records.save(key, capture)
        return capture, compiled

    def _halves(self, capture: Capture, where: str) -> Callable[[Sequence[Any]], Halves]:
        """What calls of a graph note: those of one that blocks share name the block's own parameters."""
        text = capture.steps[-1].text
        if self.config.per_block and capture.params:
            capture.users = Users(text, where, capture.params, lambda: self.parameters_now()[0])
            return capture.users
        halves = halves_of(text, where)
        return lambda args: halves

    @property
    def decision(self) -> Decision:
        """What training graphs go by: nothing but the passes until the first one is there."""
        return NOTHING_DECIDED if self.settled is None else self.settled.decision

    def _capture(
        self, params: Mapping[int, str], wholes: Mapping[int, str], layout: Layout, decision: Decision
    ) -> Capture:
        passes = tuple(
            replace(step, keep=decision.keep) if isinstance(step, ReleaseAfterUse) else step for step in self.passes
        )
        stored = self.mesh.world > 1
        return Capture(params, passes, self.mesh, layout, self.rank, decision, stored, wholes)

    def _decides(self, inputs: Sequence[Any], params: Mapping[int, str]) -> bool:
        """Whether a graph is for training, in a model for which `memory` or `recompute` ask for a decision."""
        asked = self.config.memory is not None or bool(self.config.recompute)
        return asked and torch.is_grad_enabled() and any(inputs[place].requires_grad for place in params)

    def _settle(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        params: Mapping[int, str],
        wholes: Mapping[int, str],
        layout: Layout,
    ) -> Settled:
        """Decides once, with the other ranks; graphs that are compiled later go by it."""

        def cut(joint: Joint, decision: Decision, steady: int) -> Forecast:
            capture = self._capture(params, wholes, layout, decision)
            return capture.forecast(joint.graph, joint.inputs, steady, **joint.options)

        model = self.model()
        assert model is not None
        releases = any(isinstance(step, ReleaseAfterUse) for step in self.passes)
        keepable = [param.name for param in layout if param.dim is not None and releases]
        graph = Graph(gm, inputs, cut, records.key(gm, inputs, params, self.digest()))
        waiting = self.layout.gradient_bytes(self.mesh.axis("dp").size) if self.accumulation.stands.deferred else 0
        return settle(self.config, model, graph, keepable, self.group, self.mesh.world, waiting)

    def refuse_new_parameters(self) -> None:
        """Raises ModelError for a parameter that a module brought along which was put in after zerofx.compile."""
        model = self.model()
        if self.mesh.world == 1 or model is None:
            return
        for prefix, module in model.named_modules():
            for name, param in module._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                new = name not in module.__dict__.get(READS, ()) and full not in self.ignored
                if new and param is not None and param.requires_grad and not isinstance(param, DTensor):
                    raise ModelError(
                        f"parameter {full!r} was put into the model after zerofx.compile, its gradient would not be "
                        "reduced: change modules before zerofx.compile"
                    )

    def parameters_now(self) -> tuple[dict[int, str], Layout]:
        """The names of the parameters, and of parts that are read for them, by id; and the layout with what may change
        later: dtype and requires_grad.

        Whole tensors that stand in for stored parts, as in torch.func.functional_call, are not parameters.
        """
        model = self.model()
        assert model is not None
        stored = (nn.Parameter,) if self.mesh.world == 1 else (DTensor,)
        whole = stand_ins(model)
        now = {n: p for n, p in model.named_parameters() if isinstance(p, stored) and id(p) not in whole}
        layout = tuple(
            replace(param, dtype=now[param.name].dtype, requires_grad=now[param.name].requires_grad)
            for param in self.layout
            if param.name in now
        )
        ours = {param.name for param in layout}
        names = {id(param): name for name, param in now.items() if name in ours}
        return names | self.accumulation.stands.names_of_parts(), Layout(layout)

    def digest(self) -> str:
        """Covers all that decides what the passes make of a graph: their options and source, mesh and layout.

        Graphs of tensor-parallel ranks may differ in numbers that torch's caches do not look at.
        """
        text = "".join([records.source(), *map(_describe, self.passes), repr(self.mesh), repr(self.layout)])
        text += repr(self.decision) + repr([part for part in self.parallel.coordinates if part[0] != "dp"])
        return hashlib.sha256(text.encode()).hexdigest()


def autocast(precision: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """What a model on that device is called in."""
    if precision is None:
        return nullcontext()
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _again(*args: Any) -> Engine:
    """The engine of a copied model, which goes by the decision that was made for the first."""
    *own, settled = args
    engine = Engine(*own)
    engine.settled = settled
    return engine


def _describe(step: Pass) -> str:
    return repr(step) + inspect.getsource(inspect.getmodule(type(step)) or type(step))


class CompiledCall:
    """What a call of the root module runs."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self.engine = engine
        call = _own_call(model)
        whole = engine.config.backend != "eager" and not engine.config.per_block
        self.call = engine.torch_compile(call) if whole else call

    @_torch.outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        note_call(engine.group)
        try:
            engine.accumulation.prepare()
            if engine.config.backend == "eager":
                engine.refuse_new_parameters()
                with RUNNING.forward(), engine.autocast():
                    result = self.call(*args, **kwargs)
                engine.accumulation.follow(result)
                return result
            before = None if engine.warned else _torch.graph_break_reasons()
            with RUNNING.forward() as eager_reads, engine.autocast(), _torch.hook_guards():
                result = self.call(*args, **kwargs)
            engine.accumulation.follow(result)
        except BaseException as error:
            error = _torch.backend_error(error)
            note_call(engine.group, error)
            known = isinstance(error, (LostWriteError, MemoryLimitError, ModelError, RankMismatchError))
            if known or is_of_pass(error):
                raise error from None
            if told := explained(error):
                raise ModelError(told) from error
            raise
        if eager_reads and before is not None:
            engine.warned = True
            reasons = _torch.graph_break_reasons()
            around = [AROUND_BLOCKS] if engine.config.per_block else list(reasons)
            _warn(list(eager_reads), list(reasons - before) or around)
        return result


AROUND_BLOCKS = "with per_block=True, what is around the blocks and modules beside them runs as it is"


def _own_call(model: nn.Module) -> Callable[..., Any]:
    """Calls the model from code that Dynamo compiles, whatever file the model's class is in."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return cast("Any", model)._call_impl(*args, **kwargs)

    return _torch.own_code(call)


def _warn(reads: list[str], reasons: list[str]) -> None:
    shown = ", ".join(reads[:5]) + (f" and {len(reads) - 5} more" if len(reads) > 5 else "")
    reason = reasons[0].splitlines()[0] if reasons else "it did not say why"
    warnings.warn(
        f"parameters are read outside of compiled graphs, which is right but slower: {shown}; torch.compile left the "
        f"graph because: {reason}; fullgraph=True makes this an error",
        stacklevel=5,
    )
