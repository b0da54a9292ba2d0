"""A model that runs as a pipeline: its calls, and what comes before and behind a step's micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zerofx import _torch, records
from zerofx.agree import RankMismatchError, agree
from zerofx.batches import MicroBatch
from zerofx.boundary import Group
from zerofx.pipeline import SPLITS_BACKWARD, PipelineError
from zerofx.pipeline_faults import naming_ended_ranks, raise_together
from zerofx.pipeline_mesh import Arrangement
from zerofx.pipeline_step import Call, Loss, Split, Step
from zerofx.schedule_check import check_schedule
from zerofx.schedules import Messages, forwards_of, messages_of, order_of
from zerofx.stage_gather import Released, warn_of_traffic
from zerofx.stage_plan import Key, Plan, Variant
from zerofx.stage_run import Compiled, StageRun, compile_stage
from zerofx.swap import NAMES, READS
from zerofx.unfit import in_one_line

if TYPE_CHECKING:
    from zerofx.engine import Engine


class _CalledError(BaseException):
    """Ends a loss function where it has called the model, whose arguments are then known."""


class Pipelined:
    """What calls of a model that is cut into stages run; it stands in the place of its forward."""

    def __init__(self, plan: Plan, where: Arrangement, device: torch.device) -> None:
        self.plan, self.where, self.device, self.seed = plan, where, device, where.places[0].seed
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
        self.summed = _summed(model)
        if self.pipeline.gather == "always" and self.where.replicas > 1:
            warn_of_traffic(self.plan.report, self.stages, self.where.replicas)
        for name in _names(self.plan.without.model) - _names(model):
            owner, _, own = name.rpartition(".")
            module = cast("Any", model.get_submodule(owner))
            module.register_load_state_dict_pre_hook(functools.partial(_leave_out, own))
        if self.where.pipe is None:
            return
        names = [each.name for each in self.plan.without.names.values() if each.kind == "param"]
        holders = {name: tuple(self.plan.ranks_of(name)) for name in names}
        shared = {name: places for name, places in holders.items() if len(places) > 1}
        groups = {places: self.where.group_of(places) for places in dict.fromkeys(shared.values())}
        now = dict(model.named_parameters())
        for name, places in shared.items():
            if name in now:
                self.tied[name] = groups[places]
                now[name].shared = groups[places].rank() > 0  # type: ignore[attr-defined]  # counts on the first
                dist.broadcast(_local(now[name]).detach(), group=groups[places], group_src=0)

    @property
    def group(self) -> Group:
        """The ranks that hold the same slices, for what ends a step."""
        everyone = self.where.everyone
        return Group("", 1, 1) if everyone is None else Group(everyone.group_name, everyone.size(), self.where.replicas)

    # A step.

    def train(self, split: Split, compute_loss: Loss, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Runs forward and backward of all micro-batches, and leaves reduced gradients in the parameters.

        Returns the sums of losses and weights, which are zero on all ranks but those of the last stage. What a rank
        raises in `split`, or in `compute_loss`, is raised on all of them.
        """
        step = self._begin(split, compute_loss, scale)
        with self._together():
            step.run()
            self._look_for_gradients(step)
        raise_together(step.problem, self.where.hosts)
        with self._together():
            self._collect(step)
        return step.loss, step.weight

    @torch.no_grad()
    def evaluate(self, split: Split, compute_loss: Loss) -> tuple[Tensor, Tensor]:
        """The sums of losses and weights of a batch's micro-batches, zero on all ranks but those of the last stage."""
        step = self._begin(split, compute_loss, None)
        with self._together():
            step.run()
        raise_together(step.problem, self.where.hosts)
        return step.loss, step.weight

    def _begin(self, split: Split, compute_loss: Loss, scale: Tensor | None) -> Step:
        self._refuse_after_failure()
        self.steps += 1
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        step = Step(self, compute_loss, scale, zero, zero.clone())
        try:
            self._prepare(step, split)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            step.problem = error
        raise_together(step.problem, self.where.hosts)
        self._compare(step.parts)
        wholes, buffers = self._wholes(step), dict(self.model.named_buffers())
        step.runs = {stage: StageRun(wholes, buffers) for stage in self.stages}
        return step

    def _prepare(self, step: Step, split: Split) -> None:
        """Finds out what the model is called with for each micro-batch."""
        if torch.is_grad_enabled():
            self._refuse_changes()
        step.parts = split()
        step.order = self._order(len(step.parts), torch.is_grad_enabled())
        modes = tuple(module.training for module in self.model.modules())
        for place, part in enumerate(step.parts):
            args, kwargs = self._arguments(step.compute_loss, place, part)
            step.calls.append(Call(tree_leaves((args, kwargs)), self.plan.variant(args, kwargs, modes)))

    def _compare(self, parts: Sequence[MicroBatch]) -> None:
        """Raises RankMismatchError where ranks of a pipeline get different batches; on a GPU it reads but the first."""
        training = torch.is_grad_enabled()
        if self.device.type != "cpu" and training in self.compared:
            return
        self.compared.add(training)
        told = {
            f"the batch, leaf {leaf} of micro-batch {place}": _told(value)
            for place, part in enumerate(parts)
            for leaf, value in enumerate(tree_leaves((part.args, part.kwargs)))
        }
        remedy = "give all ranks of a pipeline the same batch"
        try:
            agree(told, None, self.where.model, caller="a step", remedy=remedy)
        except RankMismatchError as error:
            raise_together(error, self.where.hosts)
        raise_together(None, self.where.hosts)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Notes an error after which this rank is no longer in step with the others."""
        try:
            with naming_ended_ranks():
                yield
        except Exception as error:
            self.failed = in_one_line(error)
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
            with self.in_step(place):
                compute_loss(part)
        except _CalledError:
            pass
        if self.seen is None:
            raise RuntimeError("loss_fn did not call the model: return the loss of model(...)")
        seen, self.seen = self.seen, None
        return seen

    @contextmanager
    def in_step(self, place: int) -> Iterator[None]:
        """Lets the model be called, with random numbers that are the same on all ranks of a pipeline each time."""
        devices = [self.device] if self.device.type != "cpu" else []
        self.open = True
        try:
            with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
                torch.manual_seed(hash((self.seed, self.steps, place, self.where.replica)) % 2**63)
                yield
        finally:
            self.open = False

    def compiled_for(self, place: int, variant: Variant, inputs: list[Any]) -> Compiled:
        key = place, variant.key, torch.is_grad_enabled()
        if key not in self.compiled:
            engine, stage = self.engine, variant.stages[place]
            name = records.key(stage.module, inputs, {}, engine.digest() + repr(engine.config.recompute))
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
            order = forwards_of(self.pipeline, count)
            if trains:
                try:
                    pipeline = replace(self.pipeline, microbatches=count)
                except PipelineError as error:
                    raise PipelineError(f"the step has {count} micro-batches: {error}") from None
                order = order_of(pipeline)
                check_schedule(pipeline, order)
            self.orders[count, trains] = messages_of(self.pipeline, order)
        return self.orders[count, trains]

    def _wholes(self, step: Step) -> dict[str, Tensor]:
        """The parameters of this rank, as leaves whose gradients add up over the micro-batches.

        They are gathered once, or else have no memory until a stage reads them.
        """
        gathered, wholes = dict[str, Tensor](), dict[str, Tensor]()
        always = self.pipeline.gather == "always"
        if always:
            layout = {param.name: param for param in self.engine.layout if param.dim is not None}
            for name, param in self.model.named_parameters():
                if name in layout and self.where.replicas > 1:
                    gathered[name] = torch.empty(layout[name].size, dtype=param.dtype, device=self.device)
            step.released = Released(self.engine.accumulation.gathered, dict(gathered))
        elif self.where.replicas > 1:
            gathered = self.engine.accumulation.gathered()
        for name, param in self.model.named_parameters():
            whole = gathered.pop(name) if name in gathered else _local(param)
            wholes[name] = nn.Parameter(whole.detach(), requires_grad=param.requires_grad)
        return wholes

    def _look_for_gradients(self, step: Step) -> None:
        if step.problem is None and any(param.grad is not None for param in self.model.parameters()):
            step.problem = RuntimeError(
                "loss_fn reads parameters of the model beside its call, of which a rank has those of its stages only: "
                "let the model's forward return what the loss needs, or leave weight decay to the optimizer"
            )

    @torch.no_grad()
    def _collect(self, step: Step) -> None:
        """Reduces the gradients over the replicas, and then those of tied weights over the ranks that hold them."""
        wholes = step.runs[self.stages[0]].wholes
        grads = {name: whole.grad for name, whole in wholes.items() if whole.grad is not None}
        step.runs.clear()
        for name, summed in self.summed.items():
            if name in grads:
                dist.all_reduce(grads[name], group=_torch.process_group(summed))
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


def _leave_out(name: str, _: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Takes what other ranks hold out of a state dict before its module loads it, which may have added it itself."""
    state.pop(prefix + name, None)


def _names(model: nn.Module) -> set[str]:
    """All names of parameters and buffers."""
    found = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name for name, _ in found}


def _summed(model: nn.Module) -> dict[str, str]:
    """The parameters whose gradients are added up over tensor-parallel ranks, and the names of their groups."""
    found = dict[str, str]()
    for module in model.modules():
        for name, how in module.__dict__.get(READS, {}).items():
            if how.summed:
                found[module.__dict__[NAMES][name]] = how.summed
    return found


def _told(leaf: Any) -> Any:
    """What ranks compare of a leaf of a batch: shape, dtype and sum of a tensor."""
    if isinstance(leaf, Tensor):
        return str((tuple(leaf.shape), leaf.dtype, leaf.double().sum().item()))  # as text, where nan equals itself
    return type(leaf).__name__


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
