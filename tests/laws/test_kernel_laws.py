"""Laws of kernel times: more work is never faster, more hardware never slower."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.attention import (
    backward_of_forward_s,
    flash_attention_forward_s,
    unfused_attention_s,
)
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s

NAMES = (
    "a100-sxm-80gb",
    "h100-sxm",
    "b200-sxm",
    "gb300-nvl72",
    "l40s",
    "v100-sxm-16gb",
    "t4",
    "mi300x",
    "tpu-v5e",
)
KERNELS = [
    kernel_model(
        resolve_device(name), "bf16" if resolve_device(name).supports("bf16") else "fp16", sustained=busy
    )
    for name in NAMES
    for busy in (True, False)
]
kernels = st.sampled_from(KERNELS)
size = st.integers(1, 40_000)
growth = st.floats(1.0, 4.0)
ROUNDING = 1 + 1e-12


def _flash_backward_s(*sizes, **options):
    return backward_of_forward_s(flash_attention_forward_s(*sizes, **options), sizes[-1])


@given(kernels, st.tuples(size, size, size, st.integers(1, 64)), st.integers(0, 3), st.integers(0, 5_000))
def test_a_larger_product_is_never_faster(model, sizes, axis, more):
    # Catches a tile or split rule that rewards padding.
    grown = list(sizes)
    grown[axis] += more
    m, n, k, b = sizes
    gm, gn, gk, gb = grown
    assert gemm_s(gm, gn, gk, model, batch=gb) * ROUNDING >= gemm_s(m, n, k, model, batch=b)


@given(kernels, st.tuples(size, size, size), growth, growth)
def test_more_peak_or_bandwidth_is_never_slower(model, sizes, peak, bandwidth):
    faster = replace(
        model,
        peak_flops_per_s=model.peak_flops_per_s * peak,
        bf16_peak_flops_per_s=model.bf16_peak_flops_per_s * peak,
        memory_bytes_per_s=model.memory_bytes_per_s * bandwidth,
    )
    m, n, k = sizes
    assert gemm_s(m, n, k, faster) <= gemm_s(m, n, k, model) * ROUNDING
    assert stream_s(m * n, faster) <= stream_s(m * n, model) * ROUNDING
    attention = (1, 16, 4, m, m, 128, 128)
    for flash in (flash_attention_forward_s, _flash_backward_s):
        assert flash(*attention, faster, causal=True, window=0) <= ROUNDING * flash(
            *attention, model, causal=True, window=0
        )


@given(kernels, st.tuples(size, size, size))
def test_no_product_beats_the_datasheet(model, sizes):
    # An efficiency above one is a clock above the boost clock: allow what the best cards showed.
    m, n, k = sizes
    assert gemm_s(m, n, k, model) >= 2.0 * m * n * k / (1.3 * model.peak_flops_per_s)


@given(kernels, size, st.integers(0, 20_000), st.integers(1, 64), st.booleans())
def test_a_longer_sequence_is_never_faster(model, s, more, heads, causal):
    for flash in (flash_attention_forward_s, _flash_backward_s):
        short = flash(1, heads, heads, s, s, 128, 128, model, causal=causal, window=0)
        long = flash(1, heads, heads, s + more, s + more, 128, 128, model, causal=causal, window=0)
        assert long * ROUNDING >= short


@given(kernels, size, st.integers(1, 32), st.integers(1, 20_000))
def test_a_mask_never_adds_time(model, s, heads, window):
    full = flash_attention_forward_s(1, heads, heads, s, s, 128, 128, model, causal=False, window=0)
    causal = flash_attention_forward_s(1, heads, heads, s, s, 128, 128, model, causal=True, window=0)
    banded = flash_attention_forward_s(1, heads, heads, s, s, 128, 128, model, causal=True, window=window)
    assert banded <= causal * ROUNDING and causal <= full * ROUNDING


@given(kernels, st.integers(1, 8_192), st.integers(1, 64), st.integers(0, 4_000))
def test_unfused_attention_grows_with_the_sequence(model, s, heads, more):
    short = unfused_attention_s(1, heads, s, s, 64, model, dropout=True)
    long = unfused_attention_s(1, heads, s + more, s + more, 64, model, dropout=True)
    assert long[0] * ROUNDING >= short[0] and long[1] * ROUNDING >= short[1]


@given(kernels, st.integers(1, 200_000), st.integers(1, 128), growth)
def test_more_tokens_or_imbalance_is_never_faster(model, tokens, experts, more):
    even = grouped_gemm_s(tokens, experts, 4096, 2048, model)
    assert grouped_gemm_s(tokens, experts, 4096, 2048, model, imbalance=more) * ROUNDING >= even
    assert grouped_gemm_s(tokens + 999, experts, 4096, 2048, model) * ROUNDING >= even


@given(kernels, size, size, size)
def test_a_product_costs_no_less_than_its_halves_overlapped(model, m, n, k):
    # Splitting rows over two devices never takes longer than the whole on one.
    assert gemm_s((m + 1) // 2, n, k, model) <= gemm_s(m, n, k, model) * ROUNDING
