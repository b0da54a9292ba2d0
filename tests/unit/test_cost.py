"""The alpha-beta model and the size of buckets."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from zerofx.config import Config
from zerofx.cost import LINKS, Link, link
from zerofx.groups import backend_of
from zerofx.recipe import recipe
from zerofx.tune import SIZES, fit


def test_what_was_measured_gives_the_link_back() -> None:
    known = Link(latency=250e-6, bandwidth=2e9)
    found = fit(SIZES, [known.seconds(size) for size in SIZES])
    assert (found.latency, found.bandwidth) == pytest.approx((known.latency, known.bandwidth))


def test_a_bucket_is_the_smallest_power_of_two_with_that_share_of_latency() -> None:
    known = Link(latency=1e-3, bandwidth=1e6)
    size = known.bucket_bytes(share=0.1)
    assert size == 2**14
    assert known.latency / known.seconds(size) <= 0.1 < known.latency / known.seconds(size // 2)


@pytest.mark.parametrize(
    ("name", "device", "backend"),
    [
        ("gloo", "cpu", "gloo"),
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
    ],
)
def test_a_group_of_two_backends_has_one_for_each_device(name: str, device: str, backend: str) -> None:
    with mock.patch("zerofx.groups.dist.get_backend", return_value=name):
        assert backend_of(mock.Mock(), torch.device(device)) == backend


@pytest.mark.parametrize(("backend", "name"), [("gloo", "gloo"), ("nccl", "nccl"), ("mpi", "gloo")])
def test_buckets_are_sized_for_the_backend(backend: str, name: str) -> None:
    assert link(backend) == LINKS[name]
    size = LINKS[name].bucket_bytes()
    assert {step.bucket_bytes for step in recipe(Config(), backend) if hasattr(step, "bucket_bytes")} == {size}
