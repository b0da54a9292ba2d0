"""What stands beside a model's parameters for its next forward: kept ones, gathered, and leaves that get gradients."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.swap import NAMES, READ_OUTSIDE, READS, STANDS, Read, Stand, is_stored


class Known(NamedTuple):
    """A stand, and what it was made for."""

    stand: Stand
    param: weakref.ref[nn.Parameter]
    kept: Tensor | None


Arrived = Callable[[nn.Parameter, Tensor], None]
Reduced = Callable[[str, Tensor], None]
Outside = Callable[[str], None]
Place = tuple[dict[str, Stand | None], dict[str, str], dict[str, nn.Parameter | None], dict[str, Read]]


class Stands:
    """Those of one model. `kept` are whole parameters that are read in place of gathering them, by name.

    `deferred` is whether gradients go to whole leaves; `arrived` is called with the parameter and the leaf for each.
    `updated` are the parameters that are updated in the backward, whose reduced gradients go to leaves that are stored
    parts; `reduced` is called with the parameter's name and the part for each that no graph has taken, and `outside`
    with the name where the parameter is read outside of graphs.
    """

    def __init__(
        self, model: Callable[[], nn.Module | None], arrived: Arrived, reduced: Reduced, outside: Outside
    ) -> None:
        self.model, self.arrived, self.reduced, self.outside = model, arrived, reduced, outside
        self.kept: dict[str, Tensor] = {}
        self.deferred = False
        self.updated = frozenset[str]()
        self.known: dict[str, Known] = {}
        self.parts: dict[tuple[str, bool], nn.Parameter] = {}

    def put(self, deferred: bool, updated: Iterable[str] = ()) -> None:
        """Makes forwards read parameters with what is kept, and lets gradients go to whole leaves if `deferred`, or to
        the stored parts of those that are `updated` in the backward.
        """
        self.deferred, self.updated = deferred, frozenset(updated)
        if not (deferred or self.updated or self.kept or self.known):
            return
        before, self.known = self.known, {}
        for stands, names, params, reads in self._places():
            for name in stands:
                found = self._find(names[name], params.get(name), reads[name], before)
                stands[name] = found and found.stand
                if found:
                    self.known[names[name]] = found

    def drop_kept(self) -> None:
        """Lets go of what was kept."""
        if self.kept:
            self.kept, self.known = {}, {}
            for stands, *_ in self._places():
                stands.update(dict.fromkeys(stands))

    def names_of_parts(self) -> dict[int, str]:
        """The names of the parameters for which stored parts stand, by the parts' ids."""
        return {id(part): name for (name, _), part in self.parts.items()}

    def names_of_updated(self) -> dict[int, str]:
        """Those of parts that get gradients which update their parameters in the backward."""
        return {id(part): name for (name, trained), part in self.parts.items() if trained}

    def names_of_wholes(self) -> dict[int, str]:
        """The names of the parameters beside which whole tensors stand, by the tensors' ids."""
        wholes = ((known.stand.whole, name) for name, known in self.known.items())
        return {id(whole): name for whole, name in wholes if whole is not None}

    def _places(self) -> Iterator[Place]:
        """Each module's stands, its parameters' names in the model, themselves, and how they are read."""
        model = self.model()
        for module in () if model is None else model.modules():
            if stands := module.__dict__.get(STANDS):
                yield stands, module.__dict__[NAMES], module._parameters, module.__dict__[READS]

    def _find(self, name: str, param: Tensor | None, how: Read, before: dict[str, Known]) -> Known | None:
        """The stand of a parameter; tied places share one, and one that was there stays."""
        if not is_stored(param, how):
            return None
        stored = cast("DTensor", param)
        kept, updated = self.kept.get(name), name in self.updated
        apart = (self.deferred or updated) and stored.requires_grad
        if kept is None and not apart:
            return None
        part = self._part(name, stored, updated) if apart else None
        for found in (self.known.get(name), before.get(name)):
            if found and found.param() is cast(Any, param) and found.kept is kept and found.stand.part is part:
                return found
        if updated:
            return Known(Stand(None, False, part), weakref.ref(cast("nn.Parameter", param)), None)
        return self._made(name, cast("nn.Parameter", param), how.size, kept, part)

    def _part(self, name: str, param: DTensor, updated: bool) -> nn.Parameter:
        """The stored part as a parameter of its own, without a gradient unless it is updated by that."""
        with torch.no_grad():
            local = param.to_local()
        part = self.parts.get((name, updated))
        if part is None or (part.data_ptr(), part.dtype) != (local.data_ptr(), local.dtype):
            part = self.parts[name, updated] = nn.Parameter(local.detach(), requires_grad=updated)
            if updated:
                part.__dict__[READ_OUTSIDE] = functools.partial(self.outside, name)
                cast(Any, part).register_post_accumulate_grad_hook(functools.partial(self.reduced, name))
        return part

    def _made(
        self, name: str, param: nn.Parameter, size: tuple[int, ...], kept: Tensor | None, part: nn.Parameter | None
    ) -> Known:
        if part is not None and param._backward_hooks:
            raise RuntimeError(
                f"parameter {name!r} has a tensor hook, which sees reduced gradients only: reduce those of each "
                "micro-batch, without no_sync, or put the hook on with register_post_accumulate_grad_hook"
            )
        data = torch.zeros((), dtype=param.dtype, device=param.device).expand(size) if kept is None else kept
        whole = nn.Parameter(data, requires_grad=part is not None)
        if part is not None:
            cast(Any, whole).register_post_accumulate_grad_hook(functools.partial(self.arrived, param))
        return Known(Stand(whole, kept is not None, part), weakref.ref(param), kept)
