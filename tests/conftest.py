"""Options, markers and the worker pools that every test shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.pool import ENVIRONMENT, Pool

pytest_plugins = ["zerofx.testing", "pytester"]
MOST_WORKERS = 9

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="runs with --full"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """`pool(world)`: the session's pool of that size; the one that waited longest ends when too many processes live."""
    pools: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        chosen = pools.pop(world, None) or Pool(world)
        for other in pools.values():
            if sum(each.alive for each in pools.values()) + world <= MOST_WORKERS:
                break
            other.close()
        pools[world] = chosen
        return chosen

    yield get
    for each in pools.values():
        each.close()
