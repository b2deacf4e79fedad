"""Streaming time against the bandwidth it may reach."""

import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.elementwise import stream_s

A100 = kernel_model(resolve_device("a100-sxm-80gb"), "bf16")


def test_stream_time_is_bytes_at_the_achievable_bandwidth():
    ideal = kernel_model(resolve_device("a100-sxm-80gb"), "bf16", fidelity="datasheet")
    assert stream_s(2.039e12, ideal) == pytest.approx(1.0, rel=1e-3)
    assert stream_s(1e12, A100) == pytest.approx(1e12 / A100.memory_bytes_per_s / A100.stream_eff, rel=1e-3)


def test_no_bytes_take_no_time_and_every_kernel_a_launch():
    assert stream_s(0, A100) == 0
    launches = stream_s([1.0, 1.0], A100, num_kernels=[1, 3])
    assert launches[1] - launches[0] == pytest.approx(2 * A100.stream_launch_s)
