"""Makes the default process group from torchrun's environment, also where torchrun has started the ranks once more."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerofx._torch import PrefixStore, TCPStore

LIMIT = timedelta(minutes=10)
PAUSE_SECONDS = 0.02


def make_default_group(backend: str | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group`, for ranks that may take the place of others that have died.

    torchrun keeps one store over all its restarts, in which ranks find the addresses of those before them: each time
    has names of its own in it here. Raises TimeoutError where ranks do not come within 10 minutes.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=LIMIT)
        name = _offer_name(store, world) if rank == 0 else _ask_name(store, rank)
        options |= {"store": PrefixStore(f"zerofx/{name}", store), "rank": rank, "world_size": world}
    dist.init_process_group(backend, **options)


def _offer_name(store: Any, world: int) -> str:
    """A new name, once each other rank has heard it.

    What asks may be a rank that has died since, so that each question is answered until a rank that lives has heard.
    """
    name, end, waiting = uuid.uuid4().hex, _end(), set(range(1, world))
    while waiting:
        for rank in list(waiting):
            if store.check([f"zerofx/{name}/{rank}"]):
                waiting.discard(rank)
            elif store.check([f"zerofx/asks/{rank}"]):
                store.set(f"zerofx/answer/{rank}", f"{store.get(f'zerofx/asks/{rank}').decode()} {name}")
        _pause(end, f"ranks {sorted(waiting)} have not come" if waiting else "")
    return name


def _ask_name(store: Any, rank: int) -> str:
    """The name that the first rank of this time answers, and not what one before has answered."""
    question, end = uuid.uuid4().hex, _end()
    store.set(f"zerofx/asks/{rank}", question)
    while True:
        if store.check([f"zerofx/answer/{rank}"]):
            asked, name = store.get(f"zerofx/answer/{rank}").decode().split()
            if asked == question:
                store.set(f"zerofx/{name}/{rank}", "")
                return str(name)
        _pause(end, "rank 0 has not come")


def _end() -> float:
    return time.monotonic() + LIMIT.total_seconds()


def _pause(end: float, who: str) -> None:
    if who and time.monotonic() > end:
        raise TimeoutError(f"{who} to make the process group for {LIMIT}: see in their logs what they wait for")
    time.sleep(PAUSE_SECONDS)
