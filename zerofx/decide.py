"""Decides, for all ranks alike, which parameters stay gathered for the backward and how much it computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerofx.need import Need, largest_first
from zerofx.recompute import Chosen

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Shares of the activations that are tried, from the one that computes least again."""
TRIES = 4


class MemoryLimitError(RuntimeError):
    """A training step needs more than `memory` allows, whatever is released and computed again."""


@dataclass(frozen=True)
class Decision:
    """What the passes and the partition of every training graph go by, once it is made.

    `keep` are the parameters that stay gathered for the backward. `recompute` is the share of the activations that is
    computed again, and `chosen` which of them, for graphs like the one on which it was chosen.
    """

    keep: tuple[str, ...] = ()
    recompute: float = 0.0
    chosen: Chosen | None = None


NOTHING_DECIDED = Decision()


@dataclass(frozen=True)
class Forecast:
    """What one rank foresees with a decision, and what it would compute again itself."""

    need: Need
    chosen: Chosen | None = None

    @classmethod
    def nothing(cls, steady: int) -> Forecast:
        """That of a graph without a backward."""
        return cls(Need((steady,), deferred=steady))

    def written(self) -> dict[str, Any]:
        chosen = self.chosen
        return {"need": self.need.written(), "chosen": chosen and vars(chosen)}

    @classmethod
    def read(cls, told: dict[str, Any]) -> Forecast:
        return cls(Need.read(told["need"]), told["chosen"] and Chosen.read(told["chosen"]))


@dataclass(frozen=True)
class Settled:
    """A decision, the most bytes that any rank needs with it by the forecast, and those that `memory` allows.

    `deferred` are the most bytes where gradients wait, without those that wait already.
    """

    decision: Decision
    peak: int
    allowed: int | None
    deferred: int = 0


Predict = Callable[[Decision], Forecast]
Exchange = Callable[[Any], list[Any]]
"""Gives every rank's value, in the order of the ranks, for this rank's one. JSON can hold it."""


class Deciding:
    """One decision. All that it goes by is what ranks told each other, so that it is the same on all of them."""

    def __init__(self, predict: Predict, exchange: Exchange, allowed: int | None, names: Iterable[str]) -> None:
        self.predict, self.exchange, self.names = predict, exchange, tuple(names)
        limits = [limit for limit in exchange(allowed) if limit is not None]
        self.allowed = min(limits) if limits else None

    def settle(self, recompute: float) -> Settled:
        """Starts from everything released and `recompute`.

        Raises MemoryLimitError, on all ranks, where nothing fits.
        """
        first, needs = self._agreed(Decision(recompute=recompute))
        if self.allowed is None or _peak(needs) <= self.allowed:
            return self._keep(first, needs)
        tried = {recompute: _peak(needs)}
        for share in SHARES:
            if share > recompute:
                found, needs = self._agreed(Decision(recompute=share))
                tried[share] = _peak(needs)
                if tried[share] <= self.allowed:
                    return self._settled(found, needs)
        best = min(tried, key=tried.__getitem__)
        raise MemoryLimitError(
            f"a training step needs {tried[best]:,} bytes on one rank by the forecast, with recompute={best:g}, and "
            f"memory allows {self.allowed:,}: allow more, or take a smaller batch, more ranks, or torch.autocast"
        )

    def _keep(self, first: Decision, needs: Sequence[Need]) -> Settled:
        """Keeps what fits; where the forecast for what was to be kept is higher than thought, less."""
        if self.allowed is None or not self.names:
            return self._settled(first, needs)
        aim = self.allowed
        for _ in range(TRIES):
            keep = largest_first(needs, self.names, aim)
            if not keep:
                break
            found = replace(first, keep=keep)
            kept = self._needs(found)
            if _peak(kept) <= self.allowed:
                return self._settled(found, kept)
            aim -= _peak(kept) - self.allowed
        return self._settled(first, needs)

    def _settled(self, decision: Decision, needs: Sequence[Need]) -> Settled:
        return Settled(decision, _peak(needs), self.allowed, max(need.deferred for need in needs))

    def _agreed(self, decision: Decision) -> tuple[Decision, list[Need]]:
        """The decision with what the rank with the largest need would compute again; and what each rank needs then."""
        if not decision.recompute:
            return decision, self._needs(decision)
        told = [Forecast.read(each) for each in self.exchange(self.predict(decision).written())]
        neediest = max(told, key=lambda each: each.need.peak)
        decision = replace(decision, chosen=neediest.chosen)
        if all(each.chosen == neediest.chosen for each in told):
            return decision, [each.need for each in told]
        return decision, self._needs(decision)

    def _needs(self, decision: Decision) -> list[Need]:
        return [Need.read(each) for each in self.exchange(self.predict(decision).need.written())]


def _peak(needs: Sequence[Need]) -> int:
    return max(need.peak for need in needs)
