"""Ranks that torchrun starts once more make a group of their own, whoever of them comes first."""

import multiprocessing
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zerofx import first_group
from zerofx._torch import TCPStore

WORLD = 3


def run_rank(rank: int, port: int, late: int) -> None:
    """Adds up ones over the ranks and goes without a word, as a rank does that is killed."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    time.sleep(1.0 if rank == late else 0.0)
    first_group.make_default_group("gloo", timeout=timedelta(seconds=20))
    ones = torch.ones(())
    dist.all_reduce(ones)
    os._exit(int(ones.item()))


def live(port: int, late: int) -> list[int | None]:
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=run_rank, args=(rank, port, late)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


def test_ranks_that_are_started_again_do_not_meet_those_before_them_in_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, it stays
    assert [live(store.port, late) for late in (2, 0, 1)] == [[WORLD] * WORLD] * 3


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_group, "LIMIT", timedelta(seconds=0.2))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come to make the process group for 0:00:00"):
        first_group._offer_name(store, WORLD)
    with pytest.raises(TimeoutError, match="rank 0 has not come"):
        first_group._ask_name(store, 2)
