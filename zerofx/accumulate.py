"""When a model's gradients are reduced: in each backward, or later, while each rank's own wait whole in `p.grad`.

What waits is a partial DTensor, the mean of what the ranks hold. `zero_grad` discards it, as it does any gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

from zerofx import _torch
from zerofx.backends import Compiled
from zerofx.layout import Layout, ParamLayout
from zerofx.moves import Kind, Move, move
from zerofx.placing import cut_gathered, data_dim, data_placement, placed_as
from zerofx.stands import Stands
from zerofx.stored import contiguous_stride
from zerofx.unreduced import WAITING
from zerofx.updating import RECEIVING

if TYPE_CHECKING:
    from zerofx.engine import Engine
    from zerofx.updates import Updates


class MicroBatch(NamedTuple):
    """Where `train_step` is: whether the backward is the last of the step, and whether gradients wait for that."""

    last: bool
    defers: bool


class Accumulation:
    """Decides what forwards of one model read and where gradients go, and reduces those that have waited."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.world = engine, engine.mesh.world
        self.synchronises = True
        self.micro: MicroBatch | None = None
        self.moves: dict[tuple[Kind, tuple[ParamLayout, ...]], Move] = {}
        self.stands = Stands(lambda: engine.model(), self._arrived, self._arrived_outside, self._read_outside)
        self.updates: Updates | None = None
        self.may_wait, self.due = True, False
        WAITING.add(self)

    # Before a forward.

    def prepare(self) -> None:
        """Decides what the next forward reads, and where its gradients go.

        Those that come while some wait have to wait, too: reduced ones cannot be added to them.
        """
        if self.world > 1 and torch.is_grad_enabled():
            wished = not self.synchronises if self.micro is None else self.micro.defers
            deferred = wished or bool(self.waiting())
            self.stands.put(deferred, self.updates.params if self.updates and not deferred else ())

    # From a forward to its backward.

    def follow(self, result: Any) -> None:
        """Lets the backward of what a forward returned begin with a look at what has changed since."""
        begin = functools.partial(self._begin, self._state(), self.stands.deferred)
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
        if deferred != self.stands.deferred:
            self.stands.put(deferred)  # for what the backward computes again

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

    # What is updated in the backward.

    def updating(self, compiled: Compiled, places: Mapping[str, int]) -> Compiled:
        """A graph whose backward hands over gradients, of parameters whose parts are its inputs at these places."""

        def call(*args: Any) -> Any:
            updates, names = self.updates, self.stands.names_of_updated()
            if not torch.is_grad_enabled():
                return compiled(*args)
            called = {name: names[id(args[place])] for name, place in places.items()}
            if updates is not None:
                updates.read(called.values())
            results = compiled(*args)
            if node := _torch.compiled_backward(results):
                RECEIVING.around(node, functools.partial(self._receive, updates, called))
            return results

        return call

    def _receive(
        self, updates: Updates | None, called: Mapping[str, str], names: Sequence[str], grads: Sequence[Tensor]
    ) -> None:
        """Takes gradients of a graph's backward, of parameters that have other names there than in that call of it."""
        now = [called[name] for name in names]
        if updates is not None and not updates.over:
            updates.receive(now, grads)
            return
        params = dict(self._model().named_parameters())
        for name, grad in zip(now, grads, strict=True):
            add_gradient(params[name], grad.clone())

    def _arrived_outside(self, name: str, part: Tensor) -> None:
        """Moves a reduced gradient that no graph has handed over to the parameter; there is none where all have."""
        if part.grad is not None:
            grad, part.grad = part.grad.detach(), None
            add_gradient(dict(self._model().named_parameters())[name], grad)

    def _read_outside(self, name: str) -> None:
        if self.updates is not None:
            self.updates.keep(name)

    # What waits.

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
            param.grad = _as(param, mean, data_placement(cast("DTensor", param)))
        for param in waiting.values():
            for hook in _torch.post_accumulate_hooks(param):
                hook(param)

    # What `train_step` knows.

    @contextmanager
    def micro_batch(self, first: bool, last: bool, defer: bool, updates: Updates | None) -> Iterator[None]:
        """See `Engine.micro_batch`."""
        if first:
            self.stands.drop_kept()
        if first and not last and self.engine.config.stage in (1, 2) and self.world > 1:
            self.stands.kept = self.gathered()
        self.micro = MicroBatch(last, defer and not (first and last))
        self.updates = updates if self.world > 1 else None
        try:
            yield
        except BaseException:
            self.stands.drop_kept()
            raise
        finally:
            self.micro = None
            if self.updates is not None:
                self.updates.end()
                self.updates = None
                self.stands.put(False)
        if last:
            self.stands.drop_kept()

    @torch.no_grad()
    def gathered(self, only: Container[str] | None = None) -> dict[str, Tensor]:
        """The parameters that are stored in parts, or only some of them, gathered, by name."""
        now = dict(self._model().named_parameters())
        stored = [param.name for param in self.engine.layout if param.dim is not None and param.name in now]
        names = tuple(name for name in stored if only is None or name in only)
        parts = [cast("DTensor", now[name]).to_local() for name in names]
        return dict(zip(names, self._move("gather", names)(parts), strict=True)) if names else {}

    @torch.no_grad()
    def take(self, grads: dict[str, Tensor]) -> None:
        """Reduces this rank's whole gradients, by the names of their parameters, into `grad`; `grads` is emptied."""
        now, final = dict(self._model().named_parameters()), list[nn.Parameter]()
        for name in list(grads):
            param, grad = now[name], grads.pop(name)
            if self.world == 1 or not isinstance(param, DTensor):
                final.append(param)
            if not isinstance(param, DTensor):
                param.grad = grad
            else:
                param.grad = _as(param, grad, Partial("avg") if self.world > 1 else data_placement(param))
        self.may_wait = self.world > 1
        self.reduce()
        for param in final:
            for hook in _torch.post_accumulate_hooks(param):
                hook(param)

    def _move(self, kind: Kind, names: tuple[str, ...]) -> Move:
        layout = self.engine.parameters_now()[1].of(names)
        if (kind, layout.params) not in self.moves:
            capture = self.engine.capture_alone(Layout(layout.params))
            self.moves[kind, layout.params] = move(kind, capture)
            self.engine.compiled(capture)
        return self.moves[kind, layout.params]

    def _model(self) -> nn.Module:
        model = self.engine.model()
        assert model is not None
        return model


@torch.no_grad()
def add_gradient(param: nn.Parameter, grad: Tensor) -> None:
    """Adds a reduced gradient, which is the parameter's from now on, to what is there."""
    if param.grad is None:
        param.grad = _as(param, grad, *cast("DTensor", param).placements)
    else:
        cast("DTensor", param.grad).to_local().add_(grad)


def is_partial(grad: Tensor | None) -> bool:
    return isinstance(grad, DTensor) and data_placement(grad).is_partial()


def _as(param: nn.Parameter, local: Tensor, placement: Placement) -> DTensor:
    own = cast("DTensor", param)
    placements, stride = placed_as(own, placement), contiguous_stride(param.shape)
    return DTensor.from_local(local, own.device_mesh, placements, run_check=False, shape=param.shape, stride=stride)


def _add_reduced(grad: Tensor, reduced: DTensor) -> None:
    """Adds a reduced gradient to this rank's own, so that the mean over the ranks is that of both."""
    sharded = data_placement(reduced).is_shard()
    alpha = reduced.device_mesh.size(data_dim(reduced.device_mesh)) if sharded else 1
    cut_gathered(grad, reduced).add_(reduced.to_local(), alpha=alpha)
