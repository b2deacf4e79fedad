"""Matrix products: limits that can be computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_model
from foreshard.cost.gemm import gemm_s
from foreshard.predict.run_setup import stacked

H100 = resolve_device("h100-sxm")
IDEAL = kernel_model(H100, "bf16", fidelity="datasheet")
FITTED = kernel_model(H100, "bf16")


def test_datasheet_time_is_flops_over_peak_where_tiles_fit():
    m, n, k = 8192.0, 16384.0, 4096.0
    assert gemm_s(m, n, k, IDEAL) == pytest.approx(2 * m * n * k / H100.peak("bf16"), rel=1e-12)


def test_datasheet_time_is_bytes_over_bandwidth_for_a_vector():
    n, k = 65536.0, 8192.0
    assert gemm_s(1, n, k, IDEAL) == pytest.approx(2 * (k + k * n + n) / H100.memory_bytes_per_s, rel=1e-12)


def test_bytes_per_element_scale_the_memory_roof():
    assert gemm_s(1, 65536, 8192, IDEAL, bytes_per_element=4) == pytest.approx(
        2 * gemm_s(1, 65536, 8192, IDEAL), rel=1e-12
    )


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_nothing_to_multiply_takes_no_time(sizes):
    assert gemm_s(*sizes, FITTED) == 0.0


def test_no_batch_takes_no_time():
    assert gemm_s(8, 8, 8, FITTED, batch=0) == 0.0


def test_smallest_product_costs_at_least_a_launch():
    assert gemm_s(1, 1, 1, FITTED) > FITTED.gemm_launch_s > 0


def test_rows_of_another_tile_cost_a_whole_tile():
    computing = replace(FITTED, memory_bytes_per_s=1e30)
    assert gemm_s(129, 8192, 8192, computing) > 1.2 * gemm_s(128, 8192, 8192, computing)
    assert gemm_s(129, 8192, 8192, computing) == pytest.approx(gemm_s(192, 8192, 8192, computing))


def test_splitting_k_stops_a_single_tile_from_running_alone():
    never = replace(FITTED, gemm_split_k=1e30)
    assert gemm_s(128, 256, 65536, FITTED) < 0.5 * gemm_s(128, 256, 65536, never)


def test_sixteen_bit_uses_the_sixteen_bit_rate():
    fp8 = kernel_model(H100, "fp8")
    sizes = (8192, 8192, 8192)
    assert gemm_s(*sizes, fp8, sixteen_bit=True) == pytest.approx(gemm_s(*sizes, FITTED), rel=1e-3)
    assert gemm_s(*sizes, fp8, bytes_per_element=1) < 0.6 * gemm_s(*sizes, FITTED)


def test_sag_slows_long_products_and_not_short_ones():
    alone = kernel_model(H100, "bf16", sustained=False)
    cold = replace(alone, gemm_sag=0.0)
    assert gemm_s(32768, 32768, 32768, alone) == pytest.approx(
        (1 + alone.gemm_sag) * gemm_s(32768, 32768, 32768, cold), rel=0.02
    )
    assert gemm_s(512, 512, 512, alone) == pytest.approx(gemm_s(512, 512, 512, cold), rel=0.01)
    assert gemm_s(32768, 32768, 32768, FITTED) == pytest.approx(gemm_s(32768, 32768, 32768, alone), rel=0.02)


def test_batch_shares_the_processors():
    one = gemm_s(256, 256, 256, FITTED)
    assert one < gemm_s(256, 256, 256, FITTED, batch=64) < 10 * one


def test_shapes_broadcast_over_rows_of_devices():
    models = stacked([FITTED, kernel_model(resolve_device("a100-sxm-80gb"), "bf16")], KernelModel)
    m = np.array([[128.0], [4096.0], [0.0]])
    times = gemm_s(m, 4096, [4096, 8192], models)
    assert times.shape == (3, 2) and times.dtype == np.float64
    assert times[1, 0] == gemm_s(4096, 4096, 4096, FITTED)
    assert np.all(times[2] == 0)


def test_inputs_stay_as_they_were():
    m = np.array([100.0, 200.0])
    gemm_s(m, 64, 64, FITTED)
    assert m.tolist() == [100.0, 200.0]
