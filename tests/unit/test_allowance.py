"""`memory` and `recompute` as the user writes them, and the decision that ranks make of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from zerofx.allowance import allowed_bytes, device_bytes
from zerofx.config import Config, ConfigError
from zerofx.decide import Deciding, Decision, Forecast, MemoryLimitError, Settled
from zerofx.need import Need
from zerofx.recompute import Chosen

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("memory", "size"),
    [("20GiB", 20 * 2**30), ("512MiB", 2**29), (" 1.5 GB", 1_500_000_000), ("10B", 10), (1000, 1000), (1, 1)],
)
def test_memory_is_bytes(memory: Any, size: int) -> None:
    assert allowed_bytes(Config(memory=memory).memory, CPU) == size


def test_a_fraction_is_one_of_the_ranks_part_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    whole = device_bytes(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert allowed_bytes(0.5, CPU) == int(whole // 4 * 0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": value}
        for value in ("20", "20 gigs", "-1GiB", "0GiB", "GiB", 0, -5, 0.0, 1.5, -0.1, True, [1], float("nan"))
    ]
    + [{"recompute": value} for value in (-0.1, 1.1, "half", True, float("nan"))]
    + [{"memory": "1GiB", "backend": "eager"}, {"recompute": 0.5, "backend": "eager"}],
    ids=str,
)
def test_what_is_no_memory_or_share_is_refused(wrong: dict[str, Any]) -> None:
    field = next(iter(wrong))
    with pytest.raises(ConfigError, match=rf"zerofx.compile\({field}=.* is not possible: {field} must be "):
        Config(**wrong)


CHOSEN = [Chosen("graph", (1,), (2,)), Chosen("graph", (2,), (1,))]


def settle(size: int, allowed: list[int | None], recompute: float = 0.0) -> list[Settled | str]:
    """What each of two ranks decides on; the first needs `size`, less what is computed again; the second twice."""
    gate, told = Barrier(2), dict[int, Any]()

    def of_rank(rank: int) -> Settled | str:
        def exchange(value: Any) -> list[Any]:
            told[rank] = value
            gate.wait()
            found = [told[0], told[1]]
            gate.wait()
            return found

        def predict(decision: Decision) -> Forecast:
            base = int(size * (rank + 1) * (1 - decision.recompute / 2))
            need = Need((base, base + 10 * len(decision.keep), base), {"w": (10, 1, 2), "v": (10, 1, 2)})
            return Forecast(need, decision.chosen or (CHOSEN[rank] if decision.recompute else None))

        try:
            return Deciding(predict, exchange, allowed[rank], ["w", "v"]).settle(recompute)
        except MemoryLimitError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(of_rank, range(2)))


@pytest.mark.parametrize(
    ("allowed", "settled"),
    [
        ([240, 300], Settled(Decision(("v", "w")), 220, 240)),
        ([300, 210], Settled(Decision(("v",)), 210, 210)),
        ([205, 300], Settled(Decision(), 200, 205)),
        ([160, 160], Settled(Decision((), 0.5, CHOSEN[1]), 150, 160)),
        ([100, 100], Settled(Decision((), 1.0, CHOSEN[1]), 100, 100)),
    ],
)
def test_ranks_decide_alike_for_the_one_that_needs_most(allowed: list[int | None], settled: Settled) -> None:
    assert settle(100, allowed) == [settled, settled]


def test_a_share_alone_is_chosen_by_the_rank_that_needs_most() -> None:
    assert settle(100, [None, None], 0.25) == [Settled(Decision((), 0.25, CHOSEN[1]), 175, None)] * 2


def test_what_does_not_fit_is_the_same_sentence_on_all_ranks() -> None:
    first, second = settle(100, [90, 95])
    assert first == second
    assert first == (
        "a training step needs 100 bytes on one rank by the forecast, with recompute=1, and memory allows 90: allow "
        "more, or take a smaller batch, more ranks, or torch.autocast"
    )
