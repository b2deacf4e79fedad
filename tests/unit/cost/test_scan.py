import numpy as np
import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.state_space_scan import CHUNK, scan_s

KERNELS = kernel_model(resolve_device("h100-sxm"), "bf16", fidelity="datasheet")


def test_a_scan_takes_its_products_and_its_bytes():
    tokens, channels, state, groups = 4096, 8192, 128, 8
    forward, backward = scan_s(tokens, channels, state, groups, KERNELS)
    products = tokens * (CHUNK * (groups * state + channels) + 4 * channels * state) / (0.25 * 989.4e12)
    moved = tokens * (16 * channels + 16 * groups * state + 16 * channels * state / CHUNK) / 3.35e12
    assert forward == pytest.approx(products + moved, rel=0.01)
    assert backward == pytest.approx(3.5 * forward)


def test_a_scan_is_linear_in_its_tokens_and_nothing_without_channels():
    one, _ = scan_s(8192, 4096, 128, 8, KERNELS)
    two, _ = scan_s(16384, 4096, 128, 8, KERNELS)
    assert two == pytest.approx(2 * one, rel=1e-6)
    forward, backward = scan_s(8192, np.array([0.0, 4096.0]), np.array([0.0, 128.0]), 8, KERNELS)
    assert forward[0] == backward[0] == 0.0 < forward[1]
