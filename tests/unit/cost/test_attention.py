"""Attention: masked areas, roofs and the unfused chain by hand."""

import numpy as np
import pytest

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.attention import (
    attended_pairs,
    backward_of_forward_s,
    flash_attention_forward_s,
    unfused_attention_s,
)
from foreshard.cost.gemm import gemm_s

H100 = resolve_device("h100-sxm")
IDEAL = kernel_model(H100, "bf16", fidelity="datasheet")
FITTED = kernel_model(H100, "bf16", attention="fa3")


@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal", "window", "pairs"),
    [
        (8, 8, True, 0, 32),
        (8, 8, False, 0, 64),
        (4, 8, True, 0, 24),  # last half of the queries: three quarters of the triangle
        (8, 8, True, 2, 14),  # a band of 2 minus its corner
        (8, 8, True, 100, 32),
        (8, 8, True, None, 32),
        (8, 64, False, 4, 64),
    ],
)
def test_pairs_are_the_area_under_the_mask(q_len, kv_len, causal, window, pairs):
    assert attended_pairs(q_len, kv_len, causal=causal, window=window) == pairs


def test_causal_area_approaches_the_count_of_pairs():
    s = 4096
    exact = np.tril(np.ones((s, s), dtype=np.int8)).sum(dtype=np.int64)
    assert attended_pairs(s, s, causal=True) == pytest.approx(exact, rel=1 / s)


def test_datasheet_forward_is_flops_over_peak():
    time_s = flash_attention_forward_s(1, 32, 8, 8192, 8192, 128, 128, IDEAL, causal=True, window=0)
    assert time_s == pytest.approx(4 * 32 * 8192**2 / 2 * 128 / H100.peak("bf16"), rel=1e-12)


def test_one_query_is_bound_by_reading_the_keys():
    time_s = flash_attention_forward_s(1, 8, 8, 1, 65536, 128, 128, IDEAL, causal=True, window=0)
    assert time_s == pytest.approx(2 * 256 * (8 + 8 * 65536) / H100.memory_bytes_per_s, rel=1e-6)


def test_grouped_keys_move_fewer_bytes():
    shared = flash_attention_forward_s(1, 32, 1, 1, 65536, 128, 128, FITTED, causal=True, window=0)
    own = flash_attention_forward_s(1, 32, 32, 1, 65536, 128, 128, FITTED, causal=True, window=0)
    assert shared < 0.5 * own


def test_backward_is_five_products_for_two():
    sizes = (2, 16, 16, 4096, 4096, 128, 128)
    forward = flash_attention_forward_s(*sizes, IDEAL, causal=True, window=0)
    assert backward_of_forward_s(forward, IDEAL) == pytest.approx(2.5 * forward)
    fitted = flash_attention_forward_s(*sizes, FITTED, causal=True, window=0)
    assert backward_of_forward_s(fitted, FITTED) > 2.5 * (fitted - 1e-5)


def test_half_the_head_costs_more_than_half_on_hopper():
    wide = flash_attention_forward_s(4, 32, 8, 8192, 8192, 128, 128, FITTED, causal=True, window=0)
    narrow = flash_attention_forward_s(4, 32, 8, 8192, 8192, 64, 64, FITTED, causal=True, window=0)
    assert 0.55 < narrow / wide < 0.8


def test_few_heads_leave_processors_idle():
    a100 = kernel_model(resolve_device("a100-sxm-80gb"), "bf16")
    few = flash_attention_forward_s(1, 4, 4, 4096, 4096, 128, 128, a100, causal=True, window=0)
    many = flash_attention_forward_s(1, 128, 128, 4096, 4096, 128, 128, a100, causal=True, window=0)
    assert few > 1.3 * many / 32


@pytest.mark.parametrize("empty", [0, 1, 3, 4, 5])
def test_nothing_to_attend_takes_no_time(empty):
    sizes = [1, 8, 8, 64, 64, 128, 128]
    sizes[empty] = 0
    sizes[6] = sizes[5]
    assert flash_attention_forward_s(*sizes, FITTED, causal=True, window=0) == 0
    assert backward_of_forward_s(flash_attention_forward_s(*sizes, FITTED, causal=True), FITTED) == 0


def test_unfused_forward_is_two_products_and_the_scores():
    b, h, s, d = 2, 16, 2048, 128
    products = 2 * gemm_s(s, s, d, IDEAL, batch=b * h)
    scores = b * h * s * s
    time_s, _ = unfused_attention_s(b, h, s, s, d, IDEAL, dropout=False)
    values = gemm_s(s, d, s, IDEAL, batch=b * h)
    assert time_s == pytest.approx(products / 2 + values + 4 * scores / H100.memory_bytes_per_s, rel=1e-12)


def test_unfused_dropout_and_backward_add_their_traffic():
    sizes = (2, 16, 2048, 2048, 128, IDEAL)
    scores = 2 * 16 * 2048**2
    forward, plain = unfused_attention_s(*sizes, dropout=False)
    _, dropped = unfused_attention_s(*sizes, dropout=True)
    assert dropped - plain == pytest.approx(5 * scores / H100.memory_bytes_per_s)
    assert plain > 1.5 * forward


def test_softmax_in_32_bit_moves_what_its_operations_read_and_write():
    """Widen, scale, mask, softmax, narrow; backward from the end, softmax from two inputs."""
    sizes = (2, 16, 2048, 2048, 128, IDEAL)
    scores = 2 * 16 * 2048**2
    fused = unfused_attention_s(*sizes, dropout=True)
    wide = unfused_attention_s(*sizes, dropout=True, wide_softmax=1.0)
    forward, backward = (2 + 4) + 3 * (4 + 4) + (4 + 2), (2 + 4) + (4 + 4 + 4) + 2 * (4 + 4) + (4 + 2)
    assert wide[0] - fused[0] == pytest.approx((forward - 4) * scores / H100.memory_bytes_per_s)
    assert wide[1] - fused[1] == pytest.approx((backward - 6) * scores / H100.memory_bytes_per_s)
    narrow = unfused_attention_s(*sizes, dropout=True, bytes_per_element=4.0)
    apart = unfused_attention_s(*sizes, dropout=True, bytes_per_element=4.0, wide_softmax=1.0)
    assert apart[0] - narrow[0] == pytest.approx((3 * 8 - 8) * scores / H100.memory_bytes_per_s)
    assert apart[1] - narrow[1] == pytest.approx((12 + 8 + 8 - 12) * scores / H100.memory_bytes_per_s)


def test_unfused_is_slower_than_flash_on_long_sequences():
    flash = flash_attention_forward_s(1, 16, 16, 8192, 8192, 128, 128, FITTED, causal=True, window=0)
    assert unfused_attention_s(1, 16, 8192, 8192, 128, FITTED, dropout=False)[0] > 2 * flash


def test_rows_broadcast():
    times = flash_attention_forward_s(
        1,
        32,
        8,
        [1024, 2048, 0],
        [1024, 2048, 0],
        128,
        128,
        FITTED,
        causal=[True, False, True],
        window=[0, 0, 128],
    )
    assert times.shape == (3,) and times[2] == 0 and times[1] > times[0] > 0
