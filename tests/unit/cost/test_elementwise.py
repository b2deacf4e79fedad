"""Bytes of memory-bound operations against operands counted by hand."""

import numpy as np
import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost import elementwise as ew

A100 = kernel_model(resolve_device("a100-sxm-80gb"), "bf16")


def test_stream_time_is_bytes_at_the_achievable_bandwidth():
    ideal = kernel_model(resolve_device("a100-sxm-80gb"), "bf16", fidelity="datasheet")
    assert ew.stream_s(2.039e12, ideal) == pytest.approx(1.0, rel=1e-3)
    assert ew.stream_s(1e12, A100) == pytest.approx(
        1e12 / A100.memory_bytes_per_s / A100.stream_eff, rel=1e-3
    )


def test_no_bytes_take_no_time_and_every_kernel_a_launch():
    assert ew.stream_s(0, A100) == 0
    launches = ew.stream_s([1.0, 1.0], A100, num_kernels=[1, 3])
    assert launches[1] - launches[0] == pytest.approx(2 * A100.stream_launch_s)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (ew.norm_bytes(10), 40),
        (ew.norm_bytes(10, backward=True), 60),
        (ew.norm_bytes(10, fused=False), 60),
        (ew.norm_bytes(10, fused=False, backward=True), 100),
        (ew.residual_bytes(10), 60),
        (ew.activation_bytes(10), 40),
        (ew.activation_bytes(10, gated=True), 60),
        (ew.activation_bytes(10, backward=True), 60),
        (ew.activation_bytes(10, gated=True, backward=True), 100),
        (ew.dropout_bytes(10), 50),
        (ew.rope_bytes(10), 40),
        (ew.softmax_bytes(10), 40),
        (ew.softmax_bytes(10, backward=True), 60),
        (ew.softmax_bytes(10, fused=False), 60),
        (ew.embedding_bytes(10), 40),
        (ew.embedding_bytes(10, backward=True), 60),
        (ew.cross_entropy_bytes(10), 140),
        (ew.cross_entropy_bytes(10, fused=True), 60),
        (ew.adam_bytes(10), 300),
        (ew.adam_bytes(10, gradient_bytes=2), 280),
        (ew.main_gradient_bytes(10), 80),
        (ew.fp8_cast_bytes(10, 100), 120),
    ],
)
def test_operands_are_counted(num_bytes, expected):
    assert float(num_bytes) == pytest.approx(expected)


def test_flags_broadcast_over_rows():
    assert ew.activation_bytes(np.array([1.0, 1.0]), gated=np.array([True, False])).tolist() == [6.0, 4.0]
    assert ew.cross_entropy_bytes(2.0, fused=np.array([True, False])).tolist() == [12.0, 28.0]
