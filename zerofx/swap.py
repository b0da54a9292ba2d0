"""The class swap: modules read their parameters, whole, through properties of a subclass of their own class."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx._torch import never_compile_alone
from zerofx.gathered import Gathered, GatheredSlice
from zerofx.ops import unshard, unshard_apart
from zerofx.running import RUNNING
from zerofx.sequence import of_param
from zerofx.stored import converted, stored_as
from zerofx.summed import sum_gradient
from zerofx.tensor_parallel import Sliced, as_read

READS = "_zerofx_reads"
NAMES = "_zerofx_names"
"""Where a module keeps its parameters' names in the model; compiled code is not guarded on them, modules share it."""


STANDS = "_zerofx_stands"
"""Where a module keeps, by name, what stands beside its parameters while gradients wait or parameters are kept.

Every name is there, with None for nothing: compiled code is not guarded on keys that are missing.
"""


READ_OUTSIDE = "_zerofx_read_outside"
"""What a part that is updated in the backward has called where it is read outside of compiled code."""


class Stand(NamedTuple):
    """What `zerofx::unshard_apart` needs beside what `zerofx::unshard` does; plain, for compiled code is guarded on it.

    `whole` is the gathered parameter if it is `kept`, else a leaf without storage. Where it gets the gradients, `part`
    is the stored part to read, which needs none; otherwise the parameter's own is read, and gradients are reduced.
    Without a `whole`, `part` is read and gets the reduced gradient, which updates the parameter in the backward.
    """

    whole: nn.Parameter | None
    kept: bool
    part: nn.Parameter | None


class Read(NamedTuple):
    """What `zerofx::unshard` needs beside the shard; plain values, so that compiled code is guarded on them.

    A parameter that is `sliced` over tensor-parallel ranks is read as a DTensor over these. In the group `summed`, if
    any, gradients are added up.
    """

    size: tuple[int, ...]
    dim: int
    rows: int
    group: str
    sliced: Sliced | None = None
    summed: str = ""


def is_stored(param: Any, how: Read) -> bool:
    """Whether a module holds the stored part of a parameter, and not a whole one that stands in for it."""
    return isinstance(param, DTensor) and (how.sliced is None or param.device_mesh.ndim != how.sliced.mesh.ndim)


def stand_ins(model: nn.Module) -> set[int]:
    """The ids of DTensors over tensor-parallel ranks that stand in for stored parts, as inside of full_params."""
    return {
        id(module._parameters.get(name))
        for module in model.modules()
        for name, how in module.__dict__.get(READS, {}).items()
        if how.sliced is not None and not is_stored(module._parameters.get(name), how)
    }


def _read(module: nn.Module, name: str, param: DTensor, how: Read) -> Tensor:
    stand = module.__dict__[STANDS].get(name)
    size, dim, rows, group, sliced, summed = how
    whole, kept, part = stand or (None, False, None)
    own = param.to_local() if part is None else part
    if whole is None:
        read = unshard(own, size, dim, rows, group)
    else:
        read = unshard_apart(own, whole, size, dim, rows, group, kept, part is None)
    if summed:
        read = sum_gradient(read, summed)
    return cast("Tensor", read) if sliced is None else as_read(read, sliced)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read_outside(module: nn.Module, name: str, how: Read) -> Tensor:
    """Reads a whole parameter outside of compiled code."""
    stand = module.__dict__[STANDS].get(name)
    if stand is not None and stand.whole is None and torch.is_grad_enabled():
        stand.part.__dict__[READ_OUTSIDE]()
    try:
        with of_param(module.__dict__[NAMES][name]):
            whole = _read(module, name, cast("DTensor", module._parameters[name]), how)
    except AttributeError as error:  # nn.Module would answer it with the shard itself
        raise RuntimeError(f"unsharding {name} failed: {error}") from error
    if not RUNNING.eager_reads:
        return GatheredSlice.of(whole) if isinstance(whole, DTensor) else Gathered.of(whole)
    RUNNING.eager_reads[-1][f"{type(module).__name__}.{name}"] = None
    return whole


@functools.cache
def _reader(name: str) -> property:
    def read(self: Any) -> Any:
        if name not in self._parameters:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        param = self._parameters[name]
        how = self.__dict__[READS].get(name)
        if how is None or not is_stored(param, how):
            return param
        if torch.compiler.is_compiling():
            return _read(self, name, param, how)
        return _read_outside(self, name, how)

    never_compile_alone(read)
    return property(read, functools.partial(_refuse_write, name))


def _refuse_write(name: str, module: nn.Module, value: object) -> NoReturn:
    raise TypeError(f"cannot assign {type(value).__name__} as parameter {name!r} of a compiled model")


class Copied(nn.Module):
    """What the swapped class of a compiled model's root adds: its copies are compiled too."""

    def __init_subclass__(cls, zerofx_made: bool = False, **kwargs: Any) -> None:
        if not zerofx_made:
            base = cls.__mro__[1].__name__
            raise TypeError(
                f"{cls.__name__} cannot be derived from {base} of a compiled model: put parametrizations and wrappers "
                "on before zerofx.compile"
            )
        # The user's own __init_subclass__ isn't called: it may register the class, and this one is not a new one.

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = cast("Any", type(self))
        state = cast("Any", self).__getstate__()
        if isinstance(state, dict):
            state = {key: dict.fromkeys(value) if key == STANDS else value for key, value in state.items()}
        return _rebuild, (cls.zerofx_base, cls.zerofx_names), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast("Any", super()).__setstate__(state)
        if engine := state.get("_zerofx_engine"):
            copy.copy(engine).attach(self)  # a shallow copy of a model comes here with the engine of that model


def _stored_parameter(module: nn.Module, target: str) -> nn.Parameter:
    """What `module.get_parameter(target)` returns: attributes of the owner's would be gathered copies."""
    path, _, name = target.rpartition(".")
    owner = module.get_submodule(path)
    param = owner._parameters.get(name)
    if param is None:
        raise AttributeError(f"{type(owner).__name__} has no parameter {name!r}")
    return param


class Sharded(Copied, zerofx_made=True):
    """What the swapped class of a module with sharded parameters, and of a sharded model's root, adds."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, param in self._parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(param, DTensor) and isinstance(value, Tensor) and value.shape == param.shape:
                state_dict[prefix + name] = stored_as(value, param)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Conversions such as `model.double()`: a sharded parameter is replaced by a new one, as an overwrite."""
        own = {name: cast("nn.Parameter", p) for name, p in self._parameters.items() if isinstance(p, DTensor)}
        new = {name: converted(param, fn, name) for name, param in own.items()}
        self._parameters.update(dict.fromkeys(own))
        try:
            return cast("Any", super())._apply(fn, recurse)
        finally:
            self._parameters.update(new)

    def get_parameter(self, target: str) -> nn.Parameter:
        return _stored_parameter(self, target)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not isinstance(param, DTensor):
            raise RuntimeError(
                f"parameter {name!r} cannot be set on a compiled model, its gradient would not be reduced: "
                "set it before zerofx.compile, or copy the values with load_state_dict"
            )
        super().register_parameter(name, param)

    def share_memory(self) -> NoReturn:
        raise RuntimeError("share_memory() is not possible on a compiled model: call it before zerofx.compile")


class FlatWeights(Sharded, zerofx_made=True):
    """Recurrent modules read their parameters through a list: it is made anew at each read."""

    @property
    def _flat_weights(self) -> list[Any]:
        return [getattr(self, name, None) for name in cast("Any", self)._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: Any) -> None:
        pass

    def flatten_parameters(self) -> None:
        pass


@functools.cache
def sharded_class(base: type, names: tuple[str, ...] | None) -> type:
    """The class of a module of class `base` with sharded parameters `names`; None for the root of an unsharded model.

    It is one for all modules alike, so that compiled code is shared between them.
    """
    mixin = Copied if names is None else FlatWeights if issubclass(base, nn.RNNBase) else Sharded
    body: dict[str, Any] = {name: _reader(name) for name in names or ()}
    body |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    body |= {"zerofx_base": base, "zerofx_names": names}
    return type(base.__name__, (mixin, base), body, zerofx_made=True)


def _rebuild(base: type, names: tuple[str, ...] | None) -> Any:
    cls = cast("Any", sharded_class(base, names))
    return cls.__new__(cls)


def swap_class(module: nn.Module) -> None:
    """Gives the module its sharded class; a module without parameters of its own may have one too."""
    reads = module.__dict__.setdefault(READS, {})
    names = tuple(name for name in module._parameters if name in reads)
    module.__dict__[READS] = {name: reads[name] for name in names}
    module.__dict__[STANDS] = dict.fromkeys(names)
    module.__dict__.pop("_flat_weights", None)
    module.__class__ = sharded_class(cast("Any", type(module)), names)


def answer_get_parameter(module: nn.Module) -> None:
    """Lets a module that keeps its class, such as a container, find the parameters of the modules inside it.

    A partial and not a bound method, since copies and pickles of it belong to the copy of the module.
    """
    module.__dict__["get_parameter"] = functools.partial(_stored_parameter, module)


def swap_unsharded(model: nn.Module) -> None:
    """Gives the root of a model that no group shares the class that compiles its copies."""
    model.__class__ = sharded_class(cast("Any", type(model)), None)
