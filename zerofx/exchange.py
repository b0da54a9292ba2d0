"""Lets ranks tell each other values through a store, for which nobody waits longer than a bounded time."""

from __future__ import annotations

import json
import time
from typing import Any

from zerofx._torch import TCPStore
from zerofx.agree import RankMismatchError

WAIT_SECONDS = 600.0
POLL_SECONDS = 0.02


class StoreExchange:
    """Each call is one round, in which every rank has to take part."""

    def __init__(self, store: TCPStore, name: str, rank: int, world: int) -> None:
        self.store, self.name, self.rank, self.world, self.rounds = store, name, rank, world, 0

    def __call__(self, value: Any) -> list[Any]:
        """Raises RankMismatchError, after WAIT_SECONDS, for ranks that tell nothing."""
        keys = [f"{self.name} {self.rounds} {rank}" for rank in range(self.world)]
        self.rounds += 1
        self.store.set(keys[self.rank], json.dumps(value))
        end = time.monotonic() + WAIT_SECONDS
        while not self.store.check(keys):
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                one = len(missing) == 1
                raise RankMismatchError(
                    f"rank{'' if one else 's'} {', '.join(map(str, missing))} compiled no training graph within "
                    f"{WAIT_SECONDS:.0f} s after this one, so that ranks cannot agree on memory= and recompute=: call "
                    "the model for training on every rank"
                )
            time.sleep(POLL_SECONDS)
        return [json.loads(told) for told in self.store.multi_get(keys)]


def alone(value: Any) -> list[Any]:
    """The same for one rank."""
    return [value]
