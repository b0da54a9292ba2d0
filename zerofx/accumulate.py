"""When a model's gradients are reduced: in each backward, or later, while each rank's own wait whole in `p.grad`.

What waits is a partial DTensor, the mean of what the ranks hold. `zero_grad` discards it, as it does any gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from zerofx import _torch
from zerofx.layout import Layout, ParamLayout
from zerofx.moves import Kind, Move, move
from zerofx.stored import contiguous_stride, local_rows
from zerofx.swap import NAMES, STANDS, Stand

if TYPE_CHECKING:
    from zerofx.engine import Engine


class MicroBatch(NamedTuple):
    """Where `train_step` is: whether the backward is the last of the step, and whether gradients wait for that."""

    last: bool
    defers: bool


class Known(NamedTuple):
    """A stand, and what it was made for."""

    stand: Stand
    param: weakref.ref[nn.Parameter]
    kept: Tensor | None


class Accumulation:
    """Decides what forwards of one model read and where gradients go, and reduces those that have waited."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.world = engine, engine.mesh.world
        self.synchronises = True
        self.micro: MicroBatch | None = None
        self.kept: dict[str, Tensor] = {}
        self.known: dict[str, Known] = {}
        self.moves: dict[tuple[Kind, tuple[ParamLayout, ...]], Move] = {}
        self.may_wait, self.due = True, False
        _watch_steps(self)

    # Before a forward.

    def prepare(self) -> None:
        """Puts beside each parameter what the next forward reads it with."""
        if self.world == 1 or not torch.is_grad_enabled():
            return
        deferred = self.defers()
        if not (deferred or self.kept or self.known):
            return
        known, self.known = self.known, {}
        for stands, names, params in self._places():
            for name in stands:
                found = self._stand(names[name], params.get(name), deferred, known)
                stands[name] = found and found.stand
                if found:
                    self.known[names[name]] = found

    def defers(self) -> bool:
        """Whether gradients of the next forward wait in any case: those that come when some wait already do."""
        wished = not self.synchronises if self.micro is None else self.micro.defers
        return wished or bool(self.waiting())

    def _stand(self, name: str, param: Tensor | None, deferred: bool, known: dict[str, Known]) -> Known | None:
        kept = self.kept.get(name)
        if not isinstance(param, DTensor) or (kept is None and not (deferred and param.requires_grad)):
            return None
        waits = deferred and param.requires_grad
        local = param.to_local().detach()
        for found in (self.known.get(name), known.get(name)):  # tied places share one
            if found and found.param() is cast(Any, param) and found.kept is kept and _reads(found.stand, local, waits):
                return found
        if waits and param._backward_hooks:
            raise RuntimeError(
                f"parameter {name!r} has a tensor hook, which sees reduced gradients only: reduce those of each "
                "micro-batch, without no_sync, or put the hook on with register_post_accumulate_grad_hook"
            )
        data = local.new_zeros(()).expand(param.shape) if kept is None else kept
        whole = nn.Parameter(data, requires_grad=waits)
        part = nn.Parameter(local, requires_grad=False) if waits else None
        if waits:
            arrived = functools.partial(self._arrived, cast("nn.Parameter", param))
            cast(Any, whole).register_post_accumulate_grad_hook(arrived)
        return Known(Stand(whole, kept is not None, part), weakref.ref(cast("nn.Parameter", param)), kept)

    # From a forward to its backward.

    def follow(self, result: Any) -> None:
        """Lets the backward of what a forward returned begin with a look at what has changed since."""
        begin = functools.partial(self._begin, self._state(), self.defers())
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)

    def _state(self) -> tuple[bool, bool]:
        return self.synchronises, self.micro is not None

    def _begin(self, state: tuple[bool, bool], deferred: bool, _: Any) -> None:
        if state != self._state():
            raise RuntimeError(
                "whether gradients are reduced was changed between a forward and its backward: run both inside or both "
                "outside of no_sync(), and call set_requires_gradient_sync before the forward"
            )
        if not deferred:
            self.reduce()

    def _arrived(self, param: nn.Parameter, whole: Tensor) -> None:
        """Moves a whole gradient to where it waits: to the parameter's `grad`, with what is there."""
        grad, whole.grad = cast("Tensor", whole.grad).detach(), None
        shown = cast("DTensor | None", param.grad)
        with torch.no_grad():
            if shown is not None and is_partial(shown):
                shown.to_local().add_(grad)
            else:
                if shown is not None:
                    _add_reduced(grad, shown)
                param.grad = _as(param, grad, Partial("avg"))
        self.may_wait = True
        if self.synchronises if self.micro is None else self.micro.last:
            self.due = True
            _torch.at_end_of_backward(self._finish)

    def _finish(self) -> None:
        """Runs at the end of a backward, once for each gradient that has arrived in it."""
        if self.due:
            self.reduce()

    # What waits.

    def names_of_parts(self) -> dict[int, str]:
        """The names of the parameters for which stored parts stand, by the parts' ids."""
        return {id(known.stand.part): name for name, known in self.known.items() if known.stand.part is not None}

    def names_of_wholes(self) -> dict[int, str]:
        """The names of the parameters beside which whole tensors stand, by the tensors' ids."""
        return {id(known.stand.whole): name for name, known in self.known.items()}

    def waiting(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients wait, in the layout's order, by their names."""
        model = self.engine.model()
        if not self.may_wait or model is None:
            return {}
        now = dict(model.named_parameters())
        found = {p.name: now[p.name] for p in self.engine.layout if p.name in now and is_partial(now[p.name].grad)}
        self.may_wait = bool(found)
        return found

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduces what waits, and runs the parameters' hooks that come behind the accumulation."""
        self.due, waiting = False, self.waiting()
        if not waiting:
            return
        grads = [cast("DTensor", param.grad).to_local().contiguous() for param in waiting.values()]
        for param in waiting.values():
            param.grad = None
        reduced = self._move("reduce", tuple(waiting))(grads)
        self.may_wait = False
        for param, mean in zip(waiting.values(), reduced, strict=True):
            param.grad = _as(param, mean, *cast("DTensor", param).placements)
        for param in waiting.values():
            for hook in _torch.post_accumulate_hooks(param):
                hook(param)

    # What `train_step` knows.

    @contextmanager
    def micro_batch(self, first: bool, last: bool, defer: bool) -> Iterator[None]:
        """See `Engine.micro_batch`."""
        if first:
            self._drop()
        if first and not last and self.engine.config.stage in (1, 2) and self.world > 1:
            self._gather()
        self.micro = MicroBatch(last, defer and not (first and last))
        try:
            yield
        except BaseException:
            self._drop()
            raise
        finally:
            self.micro = None
        if last:
            self._drop()

    @torch.no_grad()
    def _gather(self) -> None:
        now = dict(self._model().named_parameters())
        names = tuple(param.name for param in self.engine.layout if param.dim is not None and param.name in now)
        parts = [cast("DTensor", now[name]).to_local() for name in names]
        self.kept = dict(zip(names, self._move("gather", names)(parts), strict=True))

    def _drop(self) -> None:
        """Lets go of the parameters that were kept gathered."""
        if not self.kept:
            return
        self.kept, self.known = {}, {}
        for stands, *_ in self._places():
            stands.update(dict.fromkeys(stands))

    def _move(self, kind: Kind, names: tuple[str, ...]) -> Move:
        layout = self.engine.parameters_now()[1].of(names)
        if (kind, layout.params) not in self.moves:
            self.moves[kind, layout.params] = move(kind, self.engine.capture_alone(Layout(layout.params)))
        return self.moves[kind, layout.params]

    def _places(self) -> Iterator[tuple[dict[str, Stand | None], dict[str, str], dict[str, nn.Parameter | None]]]:
        """Each module's stands, and its parameters' names in the model and themselves."""
        for module in self._model().modules():
            if stands := module.__dict__.get(STANDS):
                yield stands, module.__dict__[NAMES], module._parameters

    def _model(self) -> nn.Module:
        model = self.engine.model()
        assert model is not None
        return model


def _reads(stand: Stand, local: Tensor, waits: bool) -> bool:
    """Whether gradients go where they are to, and the part that is read is where the parameter's is."""
    return (stand.part is not None) == waits and (stand.part is None or stand.part.data_ptr() == local.data_ptr())


def is_partial(grad: Tensor | None) -> bool:
    return isinstance(grad, DTensor) and grad.placements[0].is_partial()


def _as(param: nn.Parameter, local: Tensor, placement: Any) -> DTensor:
    mesh, stride = cast("DTensor", param).device_mesh, contiguous_stride(param.shape)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=param.shape, stride=stride)


def _add_reduced(grad: Tensor, reduced: DTensor) -> None:
    """Adds a reduced gradient to this rank's own, so that the mean over the ranks is that of both."""
    mesh, (placement,) = reduced.device_mesh, reduced.placements
    if isinstance(placement, Shard):
        local_rows(grad, placement.dim, mesh.size(), mesh.get_local_rank()).add_(reduced.to_local(), alpha=mesh.size())
    else:
        grad.add_(reduced.to_local())


_WAITING = weakref.WeakSet[Accumulation]()


def _watch_steps(accumulation: Accumulation) -> None:
    """Lets no optimizer step on gradients that wait."""
    if not _WATCHED:
        _WATCHED.append(register_optimizer_step_pre_hook(_refuse_step))
    _WAITING.add(accumulation)


_WATCHED = list[Any]()


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A step with a closure makes its gradients later."""
    if any(closure is not None for closure in (*args[1:], *kwargs.values())):
        return
    waiting = {id(param): name for each in list(_WAITING) for name, param in each.waiting().items()}
    names = [waiting[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in waiting]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() while the gradients of {names[0]!r} and {len(names) - 1} more wait to "
            "be reduced: run forward and backward of the last micro-batch before it outside of no_sync(), or after "
            "set_requires_gradient_sync(True)"
        )
