"""Gives parameters and buffers on the meta device their real device and first values, one module at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from zerofx.config import ModelError

InitFn = Callable[[nn.Module], object]


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of the module's own is on the meta device."""
    return any(t is not None and t.is_meta for held in _held(module) for t in held.values())


def refuse_unwritable(model: nn.Module, init_fn: InitFn | None) -> None:
    """Raises ModelError for a module with tensors on the meta device that has no way to write them."""
    for prefix, module in model.named_modules():
        if has_meta(module) and init_fn is None and not callable(getattr(module, "reset_parameters", None)):
            name = next(n for held in _held(module) for n, t in held.items() if t is not None and t.is_meta)
            raise ModelError(
                f"{_join(prefix, name)!r} is on the meta device and {type(module).__name__} has no reset_parameters(): "
                "pass zerofx.compile an init_fn that writes a module's parameters and buffers"
            )


class Materialiser:
    """Works through a model's modules in their order; a tensor that several modules hold is made and written once."""

    def __init__(self, device: torch.device, init_fn: InitFn | None) -> None:
        self.device, self.init_fn = device, init_fn
        self.made: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}

    def __call__(self, prefix: str, module: nn.Module) -> None:
        """Raises ModelError for a parameter or buffer that stays unwritten."""
        fresh = self._make(module)
        if not fresh:
            return
        versions = {name: tensor._version for name, tensor in fresh.items()}
        others = self._set_aside(module, fresh)
        try:
            with torch.no_grad():
                self.init_fn(module) if self.init_fn is not None else cast("Any", module).reset_parameters()
        finally:
            for held, name, tensor in others:
                held[name] = tensor
        for name in fresh:
            tensor = cast("Tensor", next(held[name] for held in _held(module) if name in held))
            if tensor.numel() and tensor._version == versions[name] and _is_blank(tensor):
                writer = "init_fn" if self.init_fn is not None else f"{type(module).__name__}.reset_parameters()"
                raise ModelError(
                    f"{_join(prefix, name)!r} was on the meta device and nothing has written it: write it in {writer}"
                )

    def _make(self, module: nn.Module) -> dict[str, Tensor]:
        """Replaces the module's meta tensors, and returns those that still need their values."""
        fresh: dict[str, Tensor] = {}
        for held in _held(module):
            for name, meta in held.items():
                if meta is None or not meta.is_meta:
                    continue
                known = self.made[id(meta)][1]() if id(meta) in self.made else None
                if known is None:
                    known = fresh[name] = self._blank(meta)
                    self.made[id(meta)] = meta, weakref.ref(known)
                held[name] = known
        return fresh

    def _set_aside(self, module: nn.Module, fresh: dict[str, Tensor]) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Puts throwaway tensors in the place of those that have their values already, and returns these."""
        others = [(h, n, t) for h in _held(module) for n, t in h.items() if t is not None and n not in fresh]
        for held, name, tensor in others:
            held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                held[name] = nn.Parameter(held[name], requires_grad=tensor.requires_grad)
        return others

    def _blank(self, meta: Tensor) -> Tensor:
        blank = torch.full(meta.shape, _nobody_writes(meta.dtype), dtype=meta.dtype, device=self.device)
        if not isinstance(meta, nn.Parameter):
            return blank
        made = nn.Parameter(blank, requires_grad=meta.requires_grad)
        made.__dict__.update(meta.__dict__)
        return made


def _held(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _nobody_writes(dtype: torch.dtype) -> float | int | bool:
    """A value that nobody gives a whole tensor."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _is_blank(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == _nobody_writes(tensor.dtype)).all())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
