"""Finds the blocks that a model repeats, so that a plan traces a few of them and not all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

PERIODS = (1, 2, 3, 4)
"""How many modules a block may have: models with experts alternate two kinds of layers."""


@dataclass(frozen=True)
class Repeats:
    """A list of modules inside a model in which `period` modules in a row, from `start` on, come `count` times."""

    path: str
    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def prefix(self) -> str:
        """What names of parameters of the list begin with."""
        return f"{self.path}." if self.path else ""

    def behind(self, model: nn.Module, count: int) -> set[nn.Module]:
        """The modules that are in none but the repetitions behind the first `count`."""
        children: list[nn.Module] = list(cast("nn.ModuleList", model.get_submodule(self.path)))
        first = self.start + self.period * count
        return set(children[first : self.stop]).difference(children[:first], children[self.stop :])

    def keep(self, model: nn.Module, count: int) -> None:
        """Takes all but the first `count` repetitions out of the model."""
        parent: Any = model.get_submodule(self.path)
        del parent[self.start + self.period * count : self.stop]


def find_repeats(model: nn.Module) -> Repeats | None:
    """The ModuleList or Sequential whose equal modules hold most parameters; None where fewer than 2 are equal."""
    best, most = None, 0
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        looks = [_look(child) for child in module]
        found = _longest(path, looks)
        if found is None:
            continue
        inside = [child for place, child in enumerate(module) if found.start <= place < found.stop]
        size = sum(param.numel() for child in inside for param in child.parameters())
        if size > most:
            best, most = found, size
    return best


def _longest(path: str, looks: Sequence[Any]) -> Repeats | None:
    """The run of equal groups that covers most modules; of equal ones that with the smallest period."""
    best: Repeats | None = None
    for period in PERIODS:
        for start in range(len(looks)):
            count = 1
            while looks[start : start + period] == looks[start + period * count : start + period * (count + 1)]:
                count += 1
                if start + period * count >= len(looks):
                    break
            found = Repeats(path, start, period, count)
            if count > 1 and (best is None or found.stop - found.start > best.stop - best.start):
                best = found
            if best is not None and best.stop == len(looks):
                break
    return best


def _look(module: nn.Module) -> Any:
    """What two modules have in common that compute the same: classes, options, and what their tensors look like."""
    parts = []
    for name, part in module.named_modules():
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        options = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, (bool, int, float, str)) and key not in ("layer_idx", "layer_id", "idx", "index")
        }
        shapes = tuple((key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in tensors)
        parts.append((name, type(part), tuple(sorted(options.items())), shapes))
    return tuple(parts)
