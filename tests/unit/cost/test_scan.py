from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.state_space_scan import CHUNK, scan_s

KERNELS = kernel_model(resolve_device("h100-sxm"), "bf16", fidelity="datasheet")


# Kernels of MambaSplitConv1dScanCombinedFn with what each reads and writes of a token, in bytes, by hand:
# channels c, state n, groups g, heads' scores q a group; a state held per chunk costs c n / q a token.
FORWARD = {
    "conv1d": "4 * (c + 2*g*n)",
    "chunk_state": "2*c + 2*g*n + 4*c*n/q",
    "state_passing": "4*c*n/q + 2*c*n/q",
    "bmm_chunk": "4*g*n + 4*g*q",
    "chunk_scan": "4*g*q + 2*c + 2*g*n + 2*c*n/q + 2*c + 2*c + 2*c",
    "norm": "4*c",
}
BACKWARD = {
    "norm": "6*c",
    "conv1d again": "4 * (c + 2*g*n)",
    "bmm_chunk again": "4*g*n + 4*g*q",
    "chunk_state again": "2*c + 2*g*n + 4*c*n/q",
    "state_passing again": "8*c*n/q",
    "dz": "12*c",
    "dstates": "2*c + 2*g*n + 4*c*n/q",
    "state_passing back": "12*c*n/q",
    "dx": "6*c + 4*g*q + 2*g*n + 2*c*n/q",
    "db": "2*c + 2*c*n/q + 2*g*n + 4*g*n",
    "dC": "2*c + 2*c*n/q + 2*g*n + 4*g*n",
    "dcb": "4*c + 4*g*q",
    "bmm back": "2 * (4*g*q + 2*g*n + 4*g*n + 2*g*n)",
    "ddA": "4*c + 4*g*q",
    "conv1d back": "6 * (c + 2*g*n)",
}


def bytes_of(kernels, **sizes):
    return sum(eval(text, {}, sizes) for text in kernels.values())


@pytest.mark.parametrize("groups", [1, 8])
def test_a_scan_takes_its_products_and_the_bytes_of_its_kernels(groups):
    tokens, c, n, q = 4096, 8192, 128, CHUNK
    forward, backward = scan_s(tokens, c, n, groups, KERNELS)
    rate = 132 * 0.3e12
    products = 2 * q * groups * n + 4 * c * n + q * c
    moved = bytes_of(FORWARD, c=c, n=n, g=groups, q=q)
    assert forward == pytest.approx(tokens * (products / rate + moved / 3.35e12), rel=0.01)
    products = 6 * q * groups * n + 10 * c * n + 3 * q * c
    moved = bytes_of(BACKWARD, c=c, n=n, g=groups, q=q)
    assert backward == pytest.approx(tokens * (products / rate + moved / 3.35e12), rel=0.01)


def test_products_of_a_scan_follow_processors_not_matrix_units():
    """Twice the peak changes nothing where processors set the pace; twice of those halve its products."""
    sizes = (8192, 8192, 128, 8)
    fast = replace(KERNELS, bf16_peak_flops_per_s=2 * KERNELS.bf16_peak_flops_per_s)
    assert scan_s(*sizes, fast) == scan_s(*sizes, KERNELS)
    still = replace(KERNELS, memory_bytes_per_s=1e18, stream_launch_s=0.0)
    twice = replace(still, num_sms=2 * KERNELS.num_sms)
    assert scan_s(*sizes, still)[0] == pytest.approx(2 * scan_s(*sizes, twice)[0], rel=1e-3)
    # A device of a few whole cores is held to its matrix units alone.
    core = replace(still, num_sms=2)
    assert scan_s(*sizes, core)[0] < scan_s(*sizes, replace(still, num_sms=9))[0]


def test_a_scan_is_linear_in_its_tokens_and_nothing_without_channels():
    one, _ = scan_s(8192, 4096, 128, 8, KERNELS)
    two, _ = scan_s(16384, 4096, 128, 8, KERNELS)
    assert two == pytest.approx(2 * one, rel=1e-6)
    forward, backward = scan_s(8192, np.array([0.0, 4096.0]), np.array([0.0, 128.0]), 8, KERNELS)
    assert forward[0] == backward[0] == 0.0 < forward[1]
