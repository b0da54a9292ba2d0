"""`python -m zerofx tune --out FILE` writes hardware that plans can be made for."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from zerofx.cost import Link
from zerofx.planning.hardware import load
from zerofx.planning.measured import measured, write


def test_what_is_measured_is_written_and_read_and_gives_the_buckets_seconds(tmp_path: Path) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        hardware = measured(Link(1e-3, 2e9), "mine")
        write(hardware, tmp_path / "mine.toml")
    finally:
        dist.destroy_process_group()
    assert load(tmp_path / "mine.toml") == hardware
    assert hardware.device == "cpu" and hardware.ranks_per_node == 1
    assert 1e8 < hardware.achievable["fp32"] < 1e14
    assert 1e7 < hardware.memory_bandwidth < 1e13 and 1e7 < hardware.update_bandwidth < 1e13
    for rates in (hardware.attention, hardware.convolution):
        assert all(1e8 < rate < 1e14 for rate in rates.values()) and rates.keys() == {"fp32", "bf16"}
    assert 0 < hardware.launch < 1e-2
    assert 2**28 < hardware.memory_bytes < 2**50


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_buckets_cost_what_the_measured_link_says(ranks: int) -> None:
    link = Link(1e-3, 2e9)
    with (
        mock.patch("zerofx.planning.measured.dist.get_world_size", return_value=ranks),
        mock.patch("zerofx.planning.measured.dist.get_backend", return_value="gloo"),
        mock.patch("zerofx.planning.measured._slowest", return_value=1.0),
    ):
        hardware = measured(link)
    for nbytes in (1e3, 1e6, 1e9):
        assert hardware.collective_seconds("all_gather", nbytes, ranks) == pytest.approx(link.seconds(nbytes))
