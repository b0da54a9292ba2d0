"""Hardware files, the roofline and collectives over nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.published import read
from zerofx.cost import Link
from zerofx.planning import networks, rates
from zerofx.planning.hardware import H100, HardwareError, load, names, text


@pytest.mark.parametrize("name", names())
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    hardware = load(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(text(hardware))
    assert load(path) == hardware
    assert load(hardware) is hardware and hash(load(path)) == hash(hardware)


@pytest.mark.parametrize("name", names())
def test_every_file_says_where_its_numbers_come_from_and_promises_no_more_than_the_vendor(name: str) -> None:
    hardware = load(name)
    assert hardware.origin
    assert all(hardware.achievable[dtype] <= peak for dtype, peak in hardware.peak.items())
    assert hardware.inter.bandwidth <= hardware.intra.bandwidth


def test_unknown_hardware_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        HardwareError, match="no hardware is called 'h101', and no file either: take one of a100-4x200g"
    ):
        load("h101")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("launch = 2e-06", "lunch = 2e-06"), r"lacks \['launch'\] and has unknown \['lunch'\]"),
        (("memory_share = 0.9", "memory_share = 0"), "memory_share is 0: give a number above 0"),
        (("[peak]\nbf16", "[peak]\nfp8"), "give both for the same dtypes"),
        (("launch = 2e-06", "launch = "), "is no TOML"),
        (("[inter]\nlatency", "[inter]\nslowness"), "latency and bandwidth"),
        (("ranks_per_node = 8", "ranks_per_node = 'eight'"), "ranks_per_node"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    written = text(H100)
    assert change[0] in written
    path = tmp_path / "mine.toml"
    path.write_text(written.replace(*change))
    with pytest.raises(HardwareError, match=message):
        load(path)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_rings_over_nodes_cost_what_nccl_expects(kind: str) -> None:
    for nodes, (latency, bandwidth) in read("nccl_multinode.json")[kind].items():
        ranks = 8 * int(nodes)
        ring = H100.collective_seconds("all_gather", 0, ranks) * 1e6
        if kind == "all_gather":
            assert ring == pytest.approx(latency, rel=0.035)
        else:  # the tree is faster for small ones
            assert H100.collective_seconds(kind, 0, ranks) * 1e6 < latency
        large = 1e12
        assert large / H100.collective_seconds(kind, large, ranks) / 1e9 == pytest.approx(bandwidth, rel=0.1)


def test_groups_of_one_node_never_use_its_network() -> None:
    without = replace(H100, inter=Link(1.0, 1.0))
    for ranks in (2, 4, 8):
        assert without.collective_seconds("all_reduce", 1e9, ranks) == H100.collective_seconds("all_reduce", 1e9, ranks)
    assert without.collective_seconds("all_reduce", 1e9, 16) > 1e8
    assert without.collective_seconds("all_reduce", 1e9, 2, stride=8) > 1e8


def test_ranks_of_a_node_share_its_cards() -> None:
    """All groups of a node together move as many bytes a second between nodes as its cards do, and none more."""
    cards = H100.inter.bandwidth * H100.ranks_per_node
    for stride in (1, 2, 4, 8):
        inside, nodes = networks.members(H100, 64 // stride, stride)
        assert (inside, nodes) == (8 // stride, 8)
        together = networks.bandwidth(H100, 64 // stride, stride) * stride
        assert together == min(cards, H100.intra.bandwidth * stride)


def test_a_ring_of_one_card_is_as_slow_as_that_card() -> None:
    narrow = replace(H100, ring_bandwidth=12e9)
    assert networks.bandwidth(narrow, 16) == 12e9
    assert networks.bandwidth(narrow, 8) == H100.intra.bandwidth


def test_arrays_are_as_numbers_one_by_one() -> None:
    ranks, strides = np.array([1, 2, 8, 16, 64]), np.array([1, 8, 1, 4, 2])
    for kind in networks.KINDS:
        together = networks.collective_seconds(H100, kind, 1e8, ranks, strides)
        alone = [H100.collective_seconds(kind, 1e8, int(n), int(k)) for n, k in zip(ranks, strides, strict=True)]
        assert together.tolist() == pytest.approx(alone)
        assert alone[0] == 0
    with pytest.raises(ValueError, match="begins with all_gather"):
        H100.collective_seconds("gossip", 1, 2)


def test_the_roofline_has_a_ridge() -> None:
    rate, memory = H100.achievable["bf16"], H100.memory_bandwidth * H100.memory_share
    ridge = rate / memory
    assert H100.kernel_seconds(ridge * 1e9, 1e9, torch.bfloat16) == pytest.approx(1e9 / memory + H100.launch)
    assert H100.kernel_seconds(2 * ridge * 1e9, 1e9, "bf16") == pytest.approx(2e9 / memory + H100.launch)
    assert rates.peak(load("v100-dgx2"), "bf16") == rates.peak(load("v100-dgx2"), torch.float32)


def test_attention_convolutions_and_updates_take_the_rates_that_they_have() -> None:
    own = replace(H100, attention={"bf16": 1e12}, convolution={"fp32": 2e12}, update_bandwidth=1e9)
    product, launch = H100.kernel_seconds(1e12, 0, "bf16"), H100.launch
    assert own.kernel_seconds(1e12, 0, "bf16") == product == own.kernel_seconds(1e12, 0, "bf16", "convolution")
    assert own.kernel_seconds(1e12, 0, "bf16", "attention") == pytest.approx(1 + launch)
    assert own.kernel_seconds(1e12, 0, "fp32", "convolution") == pytest.approx(0.5 + launch)
    assert H100.kernel_seconds(1e12, 0, "bf16", "attention") == product
    assert rates.update_seconds(own, 1e9) == pytest.approx(1 + launch)
    assert rates.update_seconds(H100, 1e9) == H100.kernel_seconds(0, 1e9, "fp32")
