"""A model that runs as a pipeline: its calls, and a step's micro-batches through this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zerofx import records
from zerofx.agree import agree
from zerofx.batches import MicroBatch
from zerofx.boundary import Group
from zerofx.pipeline import SPLITS_BACKWARD, PipelineError
from zerofx.pipeline_mesh import Arrangement
from zerofx.schedule_check import check_schedule
from zerofx.schedules import FORWARD, INPUT, WEIGHT, Messages, forwards_of, messages_of, order_of
from zerofx.stage_plan import Key, Plan, Variant
from zerofx.stage_run import Compiled, StageRun, begin_at, begin_with, compile_stage
from zerofx.torch_schedule import Exchange, run_order

if TYPE_CHECKING:
    from zerofx.engine import Engine

Loss = Callable[[MicroBatch], tuple[Tensor, Any]]
"""The loss of a micro-batch as it counts in the sum over all, and its weight; it calls the model once."""


class _CalledError(BaseException):
    """Ends a loss function where it has called the model, whose arguments are then known."""


class _Call(NamedTuple):
    """A call of the model for a micro-batch: the tensors that it was given, and the stages for such ones."""

    leaves: list[Any]
    variant: Variant


@dataclass
class _Step:
    """One step's micro-batches on this rank. On the rank of the last stage `loss` and `weight` add up."""

    parts: Sequence[MicroBatch]
    calls: list[_Call]
    runs: dict[int, StageRun]
    compute_loss: Loss
    scale: Tensor | None
    loss: Tensor
    weight: Tensor
    losses: dict[int, Tensor]


class Pipelined:
    """What calls of a model that is cut into stages run; it stands in the place of its forward."""

    def __init__(self, plan: Plan, where: Arrangement, device: torch.device) -> None:
        self.plan, self.where, self.device, self.seed = plan, where, device, torch.initial_seed()
        self.pipeline = plan.pipeline
        self.stages = self.pipeline.stages_of(where.place)
        self.orders: dict[tuple[int, bool], Messages] = {}
        self.compiled: dict[tuple[int, Key, bool], Compiled] = {}
        self.tied: dict[str, dist.ProcessGroup] = {}
        self.seen: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.answer: list[Any] | None = None
        self.open, self.steps = False, 0
        self.compared = set[bool]()  # whether the ranks of a pipeline were seen to train, and to evaluate, on one batch
        self.failed: str | None = None  # why this rank is no longer in step with the others

    # The model's calls.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a step a call tells its arguments; called again, on the last rank, it returns what was computed."""
        if not self.open:
            raise RuntimeError(
                "a model compiled with pipeline=... cannot be called, since this rank has "
                f"{len(self.stages)} of its {self.pipeline.stages} stages: call the functions that zerofx.train_step "
                "and zerofx.eval_step return"
            )
        if self.answer is None:
            self.seen = args, kwargs
            raise _CalledError
        if not self.answer:
            raise RuntimeError("loss_fn calls the model more than once, which a pipeline cannot run: call it once")
        return self.answer.pop()

    def attach(self, engine: Engine, model: nn.Module) -> None:
        """Binds the model, and makes the copies of tied weights on several ranks equal."""
        self.engine, self.model = engine, model
        self.names = [name for name, _ in model.named_parameters()]
        self.trains = [param.requires_grad for param in model.parameters()]
        if self.where.pipe is None:
            return
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (self.where.replica, self.where.place, self.seed), group=self.where.everyone)
        self.seed = told[0][2]
        at = {(replica, place): rank for rank, (replica, place, _) in enumerate(told)}
        names = [each.name for each in self.plan.without.names.values() if each.kind == "param"]
        holders = {name: tuple(self.plan.ranks_of(name)) for name in names}
        shared = {name: places for name, places in holders.items() if len(places) > 1}
        groups = {places: self._group(at, places) for places in dict.fromkeys(shared.values())}
        now = dict(model.named_parameters())
        for name, places in shared.items():
            if name in now:
                self.tied[name] = groups[places]
                dist.broadcast(_local(now[name]).detach(), group=groups[places], group_src=0)

    def _group(self, at: Mapping[tuple[int, int], int], places: tuple[int, ...]) -> dist.ProcessGroup:
        """The ranks at these places of this rank's pipeline. All ranks make the groups of all pipelines."""
        members = [[at[replica, place] for place in places] for replica in range(self.where.replicas)]
        groups: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in members]
        return groups[self.where.replica]

    def counted_elsewhere(self) -> set[int]:
        """The ids of the parameters that another rank of the pipeline holds as well, and counts."""
        now = dict(self.model.named_parameters())
        return {id(now[name]) for name, group in self.tied.items() if group.rank() > 0}

    @property
    def group(self) -> Group:
        """All ranks, for what ends a step."""
        everyone = self.where.everyone
        return Group("", 1, 1) if everyone is None else Group(everyone.group_name, everyone.size(), self.where.replicas)

    # A step.

    def train(self, parts: Sequence[MicroBatch], compute_loss: Loss, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Runs forward and backward of all micro-batches, and leaves reduced gradients in the parameters.

        Returns the sums of losses and weights, which are zero on all ranks but those of the last stage.
        """
        self._refuse_changes()
        step = self._begin(parts, compute_loss, scale, self._wholes())
        order = self._order(len(parts), trains=True)
        with self._together():
            self._run(step, order)
            self._collect(step)
        return step.loss, step.weight

    @torch.no_grad()
    def evaluate(self, parts: Sequence[MicroBatch], compute_loss: Loss) -> tuple[Tensor, Tensor]:
        """The sums of losses and weights of a batch's micro-batches, zero on all ranks but those of the last stage."""
        step = self._begin(parts, compute_loss, None, self._wholes())
        order = self._order(len(parts), trains=False)
        with self._together():
            self._run(step, order)
        return step.loss, step.weight

    def _begin(
        self, parts: Sequence[MicroBatch], compute_loss: Loss, scale: Tensor | None, wholes: dict[str, Tensor]
    ) -> _Step:
        self._refuse_after_failure()
        self.steps += 1
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        step = _Step(parts, [], {}, compute_loss, scale, zero, zero.clone(), {})
        modes = tuple(module.training for module in self.model.modules())
        self._compare(parts)
        for place, part in enumerate(parts):
            args, kwargs = self._arguments(compute_loss, place, part)
            step.calls.append(_Call(tree_leaves((args, kwargs)), self.plan.variant(args, kwargs, modes)))
        buffers = dict(self.model.named_buffers())
        for stage in self.stages:
            step.runs[stage] = StageRun(wholes, buffers)
        return step

    def _compare(self, parts: Sequence[MicroBatch]) -> None:
        """Raises RankMismatchError where ranks of a pipeline get different batches; on a GPU it reads but the first."""
        training = torch.is_grad_enabled()
        if self.device.type == "cpu" or training not in self.compared:
            told = [_told(leaf) for part in parts for leaf in tree_leaves((part.args, part.kwargs))]
            remedy = "give all ranks of a pipeline the same batch"
            agree({"the batch": repr(told)}, None, self.where.pipe, caller="a step", remedy=remedy)
            self.compared.add(training)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Notes an error after which this rank is no longer in step with the others."""
        try:
            yield
        except Exception as error:
            self.failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if isinstance(error, RuntimeError) and "gloo" in str(error):  # which tells of sockets
                raise RuntimeError(
                    "another rank of this pipeline has ended or failed, as its own output says: this rank cannot go on"
                ) from error
            raise

    def _refuse_after_failure(self) -> None:
        if self.failed is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed on this rank ({self.failed}), and its ranks are no longer in "
                "step: end them, and go on from a checkpoint"
            )

    def _arguments(self, compute_loss: Loss, place: int, part: MicroBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the loss function calls the model with."""
        self.seen, self.answer = None, None
        try:
            with self._in_step(place):
                compute_loss(part)
        except _CalledError:
            pass
        if self.seen is None:
            raise RuntimeError("loss_fn did not call the model: return the loss of model(...)")
        seen, self.seen = self.seen, None
        return seen

    @contextmanager
    def _in_step(self, place: int) -> Iterator[None]:
        """Lets the model be called, with random numbers that are the same on all ranks of a pipeline each time."""
        devices = [self.device] if self.device.type != "cpu" else []
        self.open = True
        try:
            with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
                torch.manual_seed(hash((self.seed, self.steps, place, self.where.replica)) % 2**63)
                yield
        finally:
            self.open = False

    def _run(self, step: _Step, order: Messages) -> None:
        def receives(stage: int, part: int) -> Sequence[Any]:
            return step.calls[part].variant.stages[stage].receives

        def compute(kind: str, stage: int, part: int, received: list[Tensor]) -> list[Tensor]:
            if kind == FORWARD:
                return self._forward(step, stage, part, received)
            if kind == WEIGHT:
                step.runs[stage].weights(part, step.calls[part].variant.stages[stage])
                return []
            return self._backward(step, stage, part, received, apart=kind == INPUT)

        pipeline = replace(self.pipeline, microbatches=len(step.parts))
        exchange = Exchange(pipeline, self.where.pipe, self.where.place, self.device, receives)
        run_order(order, exchange, compute, WEIGHT)

    def _forward(self, step: _Step, place: int, part: int, received: list[Tensor]) -> list[Tensor]:
        call, run = step.calls[part], step.runs[place]
        stage = call.variant.stages[place]
        training = torch.is_grad_enabled()
        leaves = [
            value.detach().requires_grad_(training and boundary.has_gradient)
            for value, boundary in zip(received, stage.receives, strict=True)
        ]
        inputs = run.inputs(stage, call.leaves)
        with self.engine.autocast():
            outputs = run.forward(part, self._compiled(place, call.variant, [*inputs, *leaves]), inputs, leaves)
        if place < self.pipeline.stages - 1:
            return [value.detach() for value in outputs]
        self.answer = [call.variant.whole.result(outputs)]
        with self._in_step(part):
            loss, weight = step.compute_loss(step.parts[part])
        step.loss += loss.detach()
        step.weight += weight
        if training:
            step.losses[part] = loss if step.scale is None else loss * step.scale
        return []

    def _backward(self, step: _Step, place: int, part: int, received: list[Tensor], apart: bool) -> list[Tensor]:
        variant, run = step.calls[part].variant, step.runs[place]
        stage = variant.stages[place]
        last = place == self.pipeline.stages - 1
        begin = begin_at(step.losses.pop(part)) if last else begin_with(received, stage.sends)
        grads = run.backward(part, self.compiled[place, variant.key, True], begin, apart)
        made = list[Tensor]()
        for grad, boundary in zip(grads, stage.receives, strict=True):
            if boundary.has_gradient:
                zeros = torch.zeros(boundary.size, dtype=boundary.dtype, device=self.device)
                made.append(zeros if grad is None else grad)
        return made

    def _compiled(self, place: int, variant: Variant, inputs: list[Any]) -> Compiled:
        key = place, variant.key, torch.is_grad_enabled()
        if key not in self.compiled:
            engine, stage = self.engine, variant.stages[place]
            name = records.key(stage.module, inputs, {}, engine.digest())
            in_halves = self.pipeline.schedule in SPLITS_BACKWARD
            capture = engine.capture_stage(place)
            with engine.progress.compiling(place, engine.config.backend):
                self.compiled[key] = compile_stage(stage, inputs, capture, engine.config.backend, name, in_halves)
            if engine.config.backend == "inductor":
                records.keep(name, capture)
            engine.compiled(capture)
        return self.compiled[key]

    def _order(self, count: int, trains: bool) -> Messages:
        """The order for that many micro-batches, checked, with its messages."""
        if (count, trains) not in self.orders:
            try:
                pipeline = replace(self.pipeline, microbatches=count)
            except PipelineError as error:
                raise PipelineError(f"the step has {count} micro-batches: {error}") from None
            order = order_of(pipeline) if trains else forwards_of(pipeline)
            if trains:
                check_schedule(pipeline, order)
            self.orders[count, trains] = messages_of(pipeline, order)
        return self.orders[count, trains]

    def _wholes(self) -> dict[str, Tensor]:
        """The parameters of this rank, gathered once, as leaves whose gradients add up over the micro-batches."""
        gathered = self.engine.accumulation.gathered() if self.where.replicas > 1 else {}
        wholes = dict[str, Tensor]()
        for name, param in self.model.named_parameters():
            whole = gathered.pop(name) if name in gathered else _local(param)
            wholes[name] = nn.Parameter(whole.detach(), requires_grad=param.requires_grad)
        return wholes

    @torch.no_grad()
    def _collect(self, step: _Step) -> None:
        """Reduces the gradients over the replicas, and then those of tied weights over the ranks that hold them."""
        if any(param.grad is not None for param in self.model.parameters()):
            raise RuntimeError(
                "loss_fn reads parameters of the model beside its call, of which a rank has those of its stages only: "
                "let the model's forward return what the loss needs, or leave weight decay to the optimizer"
            )
        wholes = step.runs[self.stages[0]].wholes
        grads = {name: whole.grad for name, whole in wholes.items() if whole.grad is not None}
        step.runs.clear()
        for name in self.tied:
            if name not in grads and wholes[name].requires_grad:
                grads[name] = torch.zeros_like(wholes[name])
        self.engine.accumulation.take(grads)
        now = dict(self.model.named_parameters())
        for name, group in self.tied.items():
            grad = now[name].grad
            if grad is not None:
                dist.all_reduce(_local(grad), group=group)

    def _refuse_changes(self) -> None:
        now = [(name, param.requires_grad) for name, param in self.model.named_parameters()]
        if now != list(zip(self.names, self.trains, strict=True)):
            raise RuntimeError(
                "parameters were added, removed, frozen or thawed after zerofx.compile, which the stages of a pipeline "
                "do not follow: change the model before zerofx.compile"
            )


def _told(leaf: Any) -> Any:
    """What ranks compare of a batch."""
    return (tuple(leaf.shape), leaf.dtype, leaf.double().sum().item()) if isinstance(leaf, Tensor) else type(leaf)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
