"""Runs steps of elementwise optimizers on the local tensors of parameters, without DTensor's dispatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerofx import _torch
from zerofx.fused import Told, can_fuse, fuse

ELEMENTWISE = frozenset(
    {
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.Adamax,
        optim.AdamW,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""What a step of theirs writes at an element depends on that element alone."""

COUNTS = frozenset({"step", "eta", "mu", "mu_product"})
"""States that are one number for a parameter."""

State = dict[str, Any]


class LocalSteps:
    """Hands a step a stand-in for its optimizer, with the same options and the local tensors of parameters and states.

    torch lets a hook before the step replace the step's arguments, and the optimizer is one of them. The optimizer
    itself keeps its parameters and the states that it has; a step that raises leaves them as it found them. A step
    with a closure, or after hooks of the optimizer's own, whose gradients come later, runs on DTensors.
    """

    def __init__(self) -> None:
        self.meshes = set[DeviceMesh]()
        self.listening = False
        self.told: tuple[optim.Optimizer, Told] | None = None

    def add(self, mesh: DeviceMesh) -> None:
        """Takes on the optimizers of parameters that are sharded over this mesh."""
        self._listen()
        self.meshes.add(mesh)

    def can_tell(self, optimizer: optim.Optimizer) -> bool:
        """Whether `telling` reaches the optimizer's steps. Hooks of its own may look at gradients, or count steps."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        hooked = _torch.has_step_hooks(optimizer, behind=True)
        return can_fuse(optimizer) and not hooked and all(map(self.is_local, params))

    @contextmanager
    def telling(self, optimizer: optim.Optimizer, told: Told) -> Iterator[None]:
        """Makes the optimizer's steps fused ones meanwhile, which are told."""
        self._listen()
        self.told = optimizer, told
        try:
            yield
        finally:
            self.told = None

    @torch.no_grad()
    def step_on(self, optimizer: optim.Optimizer, grads: Mapping[Tensor, Tensor], fused: bool) -> None:
        """Steps the optimizer on some of its parameters alone, by gradients of their local tensors; no hooks run."""
        stand_in = _stand_in(optimizer, grads)
        if fused:
            fuse(stand_in, Told(None, None))
        _torch.step_without_hooks(stand_in)
        self.after(optimizer, (stand_in,), {})

    def _listen(self) -> None:
        if not self.listening:
            register_optimizer_step_pre_hook(self.before)
            register_optimizer_step_post_hook(self.after)
        self.listening = True

    @torch.no_grad()
    def before(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closures = (*args[1:], *kwargs.values())
        later = any(closure is not None for closure in closures) or _torch.has_step_hooks(optimizer)
        if later or type(optimizer) not in ELEMENTWISE or torch.compiler.is_compiling():
            return None
        params = [param for group in optimizer.param_groups for param in group["params"]]
        told = self.told[1] if self.told is not None and self.told[0] is optimizer else None
        sharded = any(isinstance(param, DTensor) for param in params)
        if not all(map(self.is_local, params)) or not (told or sharded):
            return None
        stand_in = _stand_in(optimizer)
        if told is not None:
            fuse(stand_in, told)
        return (stand_in, *args[1:]), kwargs

    @torch.no_grad()
    def after(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        stand_in = args[0]
        for loan in stand_in.__dict__.get(LENT, ()):
            if state := stand_in.state.get(loan.local):
                _adopt(optimizer, loan, state)

    def is_local(self, param: Tensor) -> bool:
        """Whether a step may take the local tensor, and the gradient's, for the parameter."""
        grad = param.grad
        if not isinstance(param, DTensor):
            return not isinstance(grad, DTensor)
        if param.device_mesh not in self.meshes or any(place.is_partial() for place in param.placements):
            return False
        return grad is None or (
            isinstance(grad, DTensor) and grad.placements == param.placements and grad.device_mesh == param.device_mesh
        )


LENT = "_zerofx_lent"


class Loan(NamedTuple):
    """A parameter, the local tensor that a step updates in its place, and the states that it was lent with that."""

    param: Tensor
    local: Tensor
    state: State


def _stand_in(optimizer: optim.Optimizer, grads: Mapping[Tensor, Tensor] | None = None) -> optim.Optimizer:
    """An object of the optimizer's class that lends a step what the optimizer holds; of the parameters with these
    gradients alone, if given.
    """
    stand_in = cast("Any", object.__new__(type(optimizer)))
    stand_in.__dict__ |= optimizer.__dict__
    stand_in.state, groups, loans = defaultdict(dict), list[State](), list[Loan]()
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if grads is None or param in grads]
        lent = [_lend(param, optimizer.state.get(param, {}), _grad(param, grads)) for param in params]
        stand_in.state |= {
            loan.local: {name: _laid_out_as(loan.local, value) for name, value in loan.state.items()}
            for loan in lent
            if loan.state
        }
        groups.append({**group, "params": [loan.local for loan in lent]})
        loans += lent
    stand_in.param_groups = groups
    stand_in.__dict__[LENT] = loans
    return cast("optim.Optimizer", stand_in)


def _grad(param: Tensor, grads: Mapping[Tensor, Tensor] | None) -> Tensor | None:
    return cast("Tensor | None", _local(param.grad)) if grads is None else grads[param]


def _lend(param: Tensor, state: Mapping[str, Any], grad: Tensor | None) -> Loan:
    local = _local(param).detach()
    if grad is not None:
        local.grad = _laid_out_as(local, grad)
    return Loan(param, local, {name: _local(value) for name, value in state.items()})


def _laid_out_as(local: Tensor, value: Any) -> Any:
    """A tensor of the local one's shape in its order of memory, by which fused kernels on CPUs go without looking."""
    if not isinstance(value, Tensor) or value.shape != local.shape or value.stride() == local.stride():
        return value
    return torch.empty_like(local, dtype=value.dtype).copy_(value)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _adopt(optimizer: optim.Optimizer, loan: Loan, state: State) -> None:
    """Gives the optimizer the states that a step has made or replaced, those of the parameter's shape as DTensors."""
    param = loan.param
    for name, value in state.items():
        if value is loan.state.get(name):
            continue
        if isinstance(param, DTensor) and isinstance(value, Tensor) and name not in COUNTS:
            mesh, placements = param.device_mesh, param.placements
            value = DTensor.from_local(
                value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        optimizer.state[param][name] = value


LOCAL_STEPS = LocalSteps()
