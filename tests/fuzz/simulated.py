"""One process: a model is captured for some ranks, and what it computes is simulated after every pass."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import GraphModule

from tests.fuzz.drawn import Setting
from tests.fuzz.models import Model, Op, Spec, batch, built
from tests.training import difference
from zerofx.capture import Capture
from zerofx.config import Config
from zerofx.decide import Decision
from zerofx.engine import autocast
from zerofx.layout import Layout, ParamLayout
from zerofx.manager import Pass
from zerofx.mesh import Mesh
from zerofx.passes.release_after_use import ReleaseAfterUse
from zerofx.program import Level, Program, Tag, output_tags, placeholders, tag
from zerofx.recipe import recipe
from zerofx.simulate import scatter, simulate
from zerofx.testing.meaning import Ranks, assert_same_bits, mean, sharded
from zerofx.text import parse, show

CPU = torch.device("cpu")
CHANGES = 0.02
"""By how much a pass may change gradients that says that it changes them: the rounding of bf16."""


def config_of(setting: Setting) -> Config:
    return Config(
        stage=setting.stage,
        persist_below=setting.persist_below,
        bucket_mb=setting.bucket / 2**20,
        prefetch=setting.prefetch,
        precision=setting.precision,
        reduce_dtype=setting.reduce_dtype,
    )


def loss_of(model: Model, precision: str | None) -> Callable[..., Tensor]:
    def loss(x: Tensor, ids: Tensor) -> Tensor:
        with autocast(precision, CPU):
            return model(x, ids).mean()

    return loss


class Watched:
    """A pass that tells of the program as it finds it, if it is the first of its level, and as it leaves it."""

    def __init__(self, step: Pass, tell: Callable[[str, Program], None], first: bool) -> None:
        self.step, self.tell, self.first = step, tell, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, program: Program) -> None:
        if self.first:
            self.tell("partition" if len(program.graphs) > 1 else "capture", program)
        self.step(program)
        self.tell(self.step.name, program)


class Meaning:
    """Captures a model and simulates its program at every stand, always on the same inputs."""

    def __init__(self, spec: Spec, setting: Setting) -> None:
        self.spec, self.setting = spec, setting
        self.model = built(spec)
        self.whole = {name: param.detach() for name, param in self.model.named_parameters()}
        self.inputs: list[list[Any] | str] = []
        """What each rank has for each input of the graph, or the name of the parameter that it is."""
        self.stands = list[tuple[str, Program]]()
        order = recipe(config_of(setting), setting.backend)
        self.exact = {step.name: step.numerics == "same" for step in order}
        self.keep = tuple(list(self.whole)[: setting.keep])
        kept = (replace(step, keep=self.keep) if isinstance(step, ReleaseAfterUse) else step for step in order)
        first = {next(step.name for step in order if step.level is level) for level in Level}
        self.order = [Watched(step, self.tell, step.name in first) for step in kept]

    def capture(self) -> Capture:
        """The capture of rank 0."""
        captures = list[Capture]()

        def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            captures.append(self._begin(inputs))
            aot_module_simplified(gm, inputs, lambda half, _: half, partition_fn=captures[0].partition)
            return gm.forward

        torch.compiler.reset()
        loss = loss_of(self.model, self.setting.precision)
        with warnings.catch_warnings(action="ignore"):
            torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)(**batch(self.spec, 0))
        (capture,) = captures
        return capture

    def _begin(self, inputs: list[Any]) -> Capture:
        names = {id(param): name for name, param in self.model.named_parameters()}
        buffers, world = {id(buffer) for buffer in self.model.buffers()}, self.setting.world
        for value in inputs:
            if (name := names.get(id(value))) is not None:
                self.inputs.append(name)
            elif id(value) in buffers:
                self.inputs.append([value.clone() for _ in range(world)])
            else:
                key = "ids" if value.dtype is torch.int64 else "x"
                self.inputs.append([batch(self.spec, rank)[key] for rank in range(world)])
        layout = Layout(
            tuple(
                ParamLayout(n, tuple(p.shape), p.dtype, None, p.requires_grad) for n, p in self.model.named_parameters()
            )
        )
        params = {place: value for place, value in enumerate(self.inputs) if isinstance(value, str)}
        decision = Decision(self.keep, self.setting.recompute)
        return Capture(params, self.order, Mesh.of(dp=world), layout, 0, decision)

    def tell(self, name: str, program: Program) -> None:
        """Keeps the program as it is, for the time when no tensor is a fake one."""
        graphs = {place: copy.deepcopy(graph) for place, graph in program.graphs.items()}
        for place, graph in graphs.items():
            graph.owning_module = program.graphs[place].owning_module
        self.stands.append((name, Program(graphs, program.mesh, program.layout)))

    def follow(self) -> Ranks:
        """Compares each stand with the one before; the outputs of each rank at the end."""
        found: Ranks = []
        for name, program in self.stands:
            expected = sharded(found, program) if name == "choose-layout" else found
            try:
                found = self.of(program)
                if expected:
                    compared(found, expected, self.exact.get(name, True))
            except Exception as error:
                error.add_note(f"after {name}:\n{show(program)}")
                raise
        return found

    def of(self, program: Program) -> Ranks:
        """The outputs of each rank; the gradient of the loss is one."""
        first, given = next(iter(program.graphs.values())), list[Any]()
        for node in (node for graph in program.graphs.values() for node in placeholders(graph)):
            if tag(node) == Tag("tangent"):
                given.append([torch.ones(()) for _ in range(program.mesh.world)])
            elif node.graph is first:
                value = self.inputs[int(node.name.removeprefix("primals_")) - 1]
                if isinstance(value, str):
                    given.append(scatter(self.whole[value], program.layout[value], program.mesh))
                else:
                    given.append([each.clone() for each in value])
        torch.manual_seed(0)
        return simulate(program, given)


def check(spec: Spec, setting: Setting) -> None:
    """Every pass keeps the program's meaning, to the bit but where it says that it does not, and that is eager's."""
    meaning = Meaning(spec, setting)
    text = meaning.capture().steps[-1].text
    program = parse(text)
    assert show(program) == text, "the last text does not read back"
    found = meaning.follow()
    if not has_kind(spec.ops, "dropout"):
        against_eager(found, program, spec, setting)


def compared(found: Ranks, expected: Ranks, exact: bool) -> None:
    if exact:
        assert_same_bits(found, expected)
        return
    for row, wanted in zip(found, expected, strict=True):
        for one, other in zip(row, wanted, strict=True):
            assert (one is None and other is None) or difference(one, other) < CHANGES


def against_eager(found: Ranks, program: Program, spec: Spec, setting: Setting) -> None:
    """The loss of each rank, and its part of each gradient, are those of plain PyTorch in one process."""
    model = built(spec)
    names, params = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses, grads = list[Tensor](), list[tuple[Tensor | None, ...]]()
    for rank in range(setting.world):
        model.load_state_dict(start, strict=False)
        losses.append(loss_of(model, setting.precision)(**batch(spec, rank)))
        grads.append(torch.autograd.grad(losses[-1], params, allow_unused=True))
    tags = [known for graph in program.graphs.values() for known in output_tags(graph)]
    tags = [known for known in tags if known is None or known.role != "saved"]
    seen = dict[str, list[Any]]()
    for place, known in enumerate(tags):
        if known is not None and known.role == "grad" and found[0][place] is not None:
            seen[known.params[0]] = [row[place] for row in found]
    limit = tolerance(spec, setting)
    out = [place for place, known in enumerate(tags) if known == Tag("out")][-1]
    for rank, loss in enumerate(losses):
        assert difference(found[rank][out], loss.detach()) <= limit, f"the loss of rank {rank}"
    for name, column in zip(names, zip(*grads, strict=True), strict=True):
        if column[0] is None:
            assert name not in seen, f"{name} has a gradient, and none in eager code"
            continue
        parts = scatter(mean([grad for grad in column if grad is not None]), program.layout[name], program.mesh)
        scale = max(part.abs().max().item() if part.numel() else 0.0 for part in parts)
        for rank, (part, one) in enumerate(zip(parts, seen[name], strict=True)):
            assert one.shape == part.shape and one.dtype == part.dtype, name
            worst = (one.double() - part.double()).abs().max().item() if part.numel() else 0.0
            assert worst <= limit * (scale + 1e-3), f"the gradient of {name} on rank {rank} is off by {worst}"


def has_kind(ops: tuple[Op, ...], kind: str) -> bool:
    return any(op.kind == kind or has_kind(op.inside, kind) for op in ops)


def tolerance(spec: Spec, setting: Setting) -> float:
    """Rounding: of fp32, or of bf16 where something is computed in less than fp32."""
    low = setting.precision in ("bf16", "fp16") or setting.reduce_dtype == "bf16" or has_kind(spec.ops, "round_trip")
    return 0.05 if low or any(param.dtype == "bfloat16" for param in spec.params) else 1e-5
