"""Finds a model's repeated blocks and the modules around them, for `per_block=True`: blocks alike share graphs."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from zerofx._torch import own_code
from zerofx.notes import Halves, halves_of

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
NOT_CALLED = (nn.ModuleList, nn.ModuleDict)

Shape = tuple[Any, ...]
Compile = Callable[[Callable[..., Any], int], Callable[..., Any]]


def pieces(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are compiled: repeated blocks, and what has parameters beside them, as large as can be."""
    yield from _pieces(model, False)


def has_blocks(model: nn.Module) -> bool:
    """Whether a container in the model holds two modules of one class that have parameters."""
    return any(count > 1 for module in model.modules() for count in _kinds(module).values())


def _pieces(module: nn.Module, repeated: bool) -> Iterator[nn.Module]:
    if next(module.parameters(), None) is None:
        return
    if repeated or not (isinstance(module, NOT_CALLED) or has_blocks(module)):
        yield module
        return
    kinds = _kinds(module)
    for child in module.children():
        yield from _pieces(child, kinds[type(child)] > 1)


def _kinds(module: nn.Module) -> Counter[type]:
    """How many children of a container have which class."""
    children = module.children() if isinstance(module, CONTAINERS) else ()
    return Counter(type(child) for child in children if next(child.parameters(), None) is not None)


def _shape(module: nn.Module) -> Shape:
    params = ((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    return type(module), tuple(params)


def compile_pieces(model: nn.Module, compile: Compile) -> None:  # noqa: A002
    """Makes calls of the pieces run compiled; pieces with parameters of the same shapes share what is compiled."""
    alike: dict[Shape, list[nn.Module]] = {}
    for piece in pieces(model):
        alike.setdefault(_shape(piece), []).append(piece)
    for modules in alike.values():
        shared = compile(_call(), len(modules))
        for module in modules:
            module.__dict__["_compiled_call_impl"] = functools.partial(shared, module)


def _call() -> Callable[..., Any]:
    """Calls a piece from code that Dynamo compiles for one kind of piece of one model."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cast("Any", module)._call_impl(*args, **kwargs)

    return own_code(call)


class User(NamedTuple):
    """A block that a shared graph has run: one of its parameters, and its parameters' names by those of the graph's."""

    param: weakref.ref[torch.Tensor]
    names: Mapping[str, str]
    halves: Halves


class Users:
    """Which blocks a graph has run, told by the first parameter that a call gets; gives the notes of each call."""

    def __init__(self, text: str, where: str, params: Mapping[int, str], names_now: Callable[[], Mapping[int, str]]):
        self.text, self.where, self.params, self.names_now = text, where, params, names_now
        self.first = min(params)
        self.known: dict[int, User] = {}

    def __call__(self, args: Sequence[Any]) -> Halves:
        param = args[self.first]
        user = self.known.get(id(param))
        if user is None or user.param() is not param:
            now = self.names_now()
            names = {name: now.get(id(args[place]), name) for place, name in self.params.items()}
            block = now.get(id(param), "").rpartition(".")[0]
            halves = halves_of(self.text, f"{self.where}, for {block}", names)
            user = self.known[id(param)] = User(weakref.ref(param), names, halves)
        return user.halves

    @property
    def blocks(self) -> tuple[Mapping[str, str], ...]:
        return tuple(user.names for user in self.known.values() if user.param() is not None)
