"""A whole parameter as read outside of compiled code: it can be looked at, but not written to."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

LOST = "a gathered copy of a sharded parameter, so writing to it would be lost"
REMEDY = (
    f"this is {LOST}: write inside `with zerofx.full_params(model):`, or to the stored part, the DTensor in "
    "model.named_parameters()"
)


class LostWriteError(RuntimeError):
    """A write to a whole copy of a parameter, which would be lost."""


def lost(what: str) -> str:
    """What to say where a forward writes to a parameter."""
    return (
        f"the forward writes to {what}, which is {LOST}: write outside of the forward, inside `with "
        "zerofx.full_params(model):`, or to the stored part, the DTensor in model.named_parameters()"
    )


class Gathered(Tensor):
    """Behaves as the plain tensor in every function, and refuses in-place, `out=` and `.data` writes."""

    @staticmethod
    def of(whole: Tensor) -> Tensor:
        return whole.as_subclass(Gathered)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _writes(func, args, kwargs):
            raise LostWriteError(REMEDY)
        if func == GRAD_GETTER and not args[0].retains_grad:
            return _no_gradient()
        with torch._C.DisableTorchFunctionSubclass():
            plain = tree_map_only(Gathered, lambda t: t.as_subclass(Tensor), (args, kwargs))
            result = func(*plain[0], **plain[1])
            storages = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Gathered)}
            return tree_map_only(Tensor, lambda t: cls.of(t) if _storage(t) in storages else t, result)


class GatheredSlice(DTensor):
    """The same for a parameter that is a DTensor over tensor-parallel ranks; its local tensor is a Gathered."""

    @staticmethod
    def of(whole: DTensor) -> DTensor:
        whole.__class__ = GatheredSlice
        return whole

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        return Gathered.of(super().to_local(*args, **kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _writes(func, args, kwargs):
            raise LostWriteError(REMEDY)
        if func == GRAD_GETTER and not args[0].retains_grad:
            return _no_gradient()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            storages = {_storage(DTensor.to_local(t)) for t in tree_leaves((args, kwargs)) if isinstance(t, cls)}
            for made in tree_leaves(result):
                if type(made) is DTensor and _storage(made.to_local()) in storages:
                    cls.of(made)
        return result


def _no_gradient() -> None:
    """Answers for the gradient of a copy, which has none."""
    warnings.warn(
        "a parameter as its module reads it is a gathered copy, which has no .grad: the gradient is that of the stored "
        "part, model.get_parameter(name).grad, or whole, on all ranks together, .grad.full_tensor()",
        stacklevel=3,
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    if any(isinstance(t, COPIES) for t in tree_leaves(kwargs.get("out"))):
        return True
    if name == "__set__" and isinstance(args[0], COPIES):
        return func is not GRAD_SETTER
    if renorms(func, args, kwargs):
        return any(isinstance(t, COPIES) for t in args[:2])
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE_OPERATORS
    if not in_place and kwargs.get("inplace") is not True:
        return False
    written = args[0] if args else next(iter(kwargs.values()), None)  # torch.nn.init passes its tensor by name
    return any(isinstance(t, COPIES) for t in tree_leaves(written))


def renorms(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a lookup that scales rows of its weight down to a `max_norm`."""
    return func in LOOKUPS and inspect.signature(func).bind(*args, **kwargs).arguments.get("max_norm") is not None


LOOKUPS: tuple[Any, ...] = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
COPIES = (Gathered, GatheredSlice)
GRAD_GETTER = cast("Any", Tensor.grad).__get__
GRAD_SETTER = cast("Any", Tensor.grad).__set__
IN_PLACE_OPERATORS = frozenset(
    f"__i{op}__"
    for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
)
