"""Expert products: against the products they are made of."""

import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s

IDEAL = kernel_model(resolve_device("h100-sxm"), "bf16", fidelity="datasheet")
FITTED = kernel_model(resolve_device("h100-sxm"), "bf16")


def test_full_experts_cost_the_flops_of_one_product():
    assert grouped_gemm_s(8 * 4096, 8, 4096, 4096, IDEAL) == pytest.approx(
        gemm_s(8 * 4096, 4096, 4096, IDEAL)
    )


def test_few_tokens_read_the_weights_of_every_active_expert():
    device = resolve_device("h100-sxm")
    time_s = grouped_gemm_s(64, 64, 14336, 4096, IDEAL)
    assert time_s == pytest.approx(64 * 2 * 14336 * 4096 / device.memory_bytes_per_s, rel=1e-3)


def test_experts_beyond_the_tokens_cost_nothing():
    assert grouped_gemm_s(4, 64, 4096, 4096, FITTED) == grouped_gemm_s(4, 4, 4096, 4096, FITTED)


def test_a_loop_over_experts_is_a_launch_each():
    loop = grouped_gemm_s(8 * 128, 8, 1024, 1024, FITTED, looped=True)
    assert loop == pytest.approx(8 * gemm_s(128, 1024, 1024, FITTED))
    assert loop > 2 * grouped_gemm_s(8 * 128, 8, 1024, 1024, FITTED)


def test_imbalance_is_more_tokens():
    plain = grouped_gemm_s(8 * 4096, 8, 4096, 4096, FITTED)
    assert grouped_gemm_s(8 * 4096, 8, 4096, 4096, FITTED, imbalance=1.5) == pytest.approx(
        1.5 * plain, rel=0.05
    )


@pytest.mark.parametrize("sizes", [(0, 8, 8, 8), (8, 0, 8, 8), (8, 8, 0, 8), (8, 8, 8, 0)])
@pytest.mark.parametrize("looped", [False, True])
def test_nothing_routed_takes_no_time(sizes, looped):
    assert grouped_gemm_s(*sizes, FITTED, looped=looped) == 0
