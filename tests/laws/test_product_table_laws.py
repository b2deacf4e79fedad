"""Laws of measured tables of products: exact at their points, rising, continuous, nothing beyond them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.attention import flash_attention_backward_s, flash_attention_forward_s
from foreshard.cost.elementwise import stream_rate, stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.cost.tables import (
    KernelTables,
    attention_table,
    rising,
    size_table,
    tabled,
    tabled_s,
)

AXES = ((64.0, 256.0, 1024.0, 8192.0), (128.0, 512.0, 4096.0), (128.0, 1024.0, 2048.0, 4096.0))
SIZES = np.array([(m, n, k) for m in AXES[0] for n in AXES[1] for k in AXES[2]])
H100 = resolve_device("h100-sxm")


def covered(table, *sizes):
    return np.isfinite(table.seconds(*sizes))


def seconds(noise=0.0):
    """Return times of a law of our own, with errors that let some larger products be faster."""
    m, n, k = SIZES.T
    off = np.random.default_rng(0).normal(0.0, noise, len(SIZES))
    return (3e-6 + m * n * k * 4e-15 + (m * n) * 1e-12) * np.exp(off)


@pytest.fixture(scope="module")
def noisy():
    return size_table(SIZES, seconds(0.4))


def test_a_table_that_never_falls_gives_its_points_exactly():
    table = size_table(SIZES, seconds())
    assert table.seconds(*SIZES.T) == pytest.approx(seconds(), rel=1e-12)
    again = size_table(np.concatenate([SIZES, SIZES]), np.concatenate([seconds(), seconds()]))
    assert again.seconds(*SIZES.T) == pytest.approx(seconds(), rel=1e-12)


def test_between_two_points_the_logarithm_is_linear_in_that_of_the_size():
    table = size_table(SIZES, seconds())
    ends = table.seconds([256.0, 1024.0], 512.0, 2048.0)
    assert table.seconds(512.0, 512.0, 2048.0) == pytest.approx(np.sqrt(ends[0] * ends[1]))


@given(
    st.tuples(*(st.floats(axis[0], axis[-1]) for axis in AXES)),
    st.tuples(*(st.floats(1.0, 8.0) for _ in AXES)),
)
def test_a_larger_product_is_never_faster_whatever_the_noise(noisy, size, growth):
    larger = [min(x * g, axis[-1]) for x, g, axis in zip(size, growth, AXES, strict=True)]
    assert noisy.seconds(*larger) >= noisy.seconds(*size) * (1 - 1e-12)


@pytest.mark.parametrize("edge", [256.0, 1024.0])
def test_times_are_continuous_across_cells(noisy, edge):
    at, before, after = (noisy.seconds(edge * factor, 700.0, 1500.0) for factor in (1.0, 1 - 1e-9, 1 + 1e-9))
    assert before == pytest.approx(at, rel=1e-6) and after == pytest.approx(at, rel=1e-6)


def test_no_size_beyond_the_table_or_beside_a_hole_is_covered(noisy):
    inside = covered(noisy, *SIZES.T)
    assert inside.all()
    for size in ((32.0, 512.0, 2048.0), (64.0, 512.0, 8192.0), (8193.0, 128.0, 128.0), (0.0, 512.0, 2048.0)):
        assert not covered(noisy, *size) and np.isnan(noisy.seconds(*size))
    hole = ~((SIZES == (1024.0, 512.0, 2048.0)).all(axis=1))
    table = size_table(SIZES[hole], seconds()[hole])
    assert not covered(table, 1024.0, 512.0, 2048.0) and not covered(table, 900.0, 500.0, 2000.0)
    assert covered(table, 256.0, 512.0, 2048.0) and covered(table, 100.0, 200.0, 2000.0)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_a_rising_grid_stays_and_every_grid_rises(values):
    grid = np.array(values)
    assert (np.diff(rising(grid)) >= -1e-12).all()
    kept = np.sort(grid)
    assert rising(kept) == pytest.approx(kept)
    assert grid.min() <= rising(grid).min() and rising(grid).max() <= grid.max()


def test_beyond_the_table_products_cost_what_they_cost_without_it():
    """The stated order: the table within its sizes, else the source that would be asked without it."""
    own_table = {"product": size_table(SIZES, seconds())}
    tables = KernelTables(path="t.csv", devices={("h100-sxm", "16bit"): own_table})
    own = kernel_model(H100, "bf16", sustained=False, costs=tables)
    plain = kernel_model(H100, "bf16", sustained=False, costs="auto")
    assert gemm_s(*SIZES.T, own) == pytest.approx(seconds(), rel=1e-12)
    for size in ((16384.0, 512.0, 512.0), (256.0, 512.0, 100.0)):
        assert gemm_s(*size, own) == gemm_s(*size, plain)
    other = kernel_model(resolve_device("a100-sxm-80gb"), "bf16", sustained=False, costs=tables)
    assert other == kernel_model(resolve_device("a100-sxm-80gb"), "bf16", sustained=False, costs="auto")
    assert kernel_model(H100, "fp8", costs=tables).gemm_table == 0.0  # of 16-bit products only
    assert kernel_model(H100, "fp8", costs=tables).gemm16_table is own_table["product"]


def test_every_kind_of_kernel_takes_its_table_within_its_sizes_and_the_formula_beyond():
    heads, lengths = (8.0, 64.0, 512.0), (256.0, 4096.0)
    grid = np.array([(1.0, h, h / 4, s, 128.0) for h in heads for s in lengths])
    taken = 1e-9 * grid[:, 1] * grid[:, 3] ** 1.5
    rows = np.array([(e, m, n, 512.0) for e in (2.0, 8.0) for m in (64.0, 512.0) for n in (512.0, 2048.0)])
    moved = np.array([[1e6], [1e9]])
    own = dict(
        attention=attention_table(grid, taken),
        attention_backward=attention_table(grid, 3.0 * taken),
        experts=size_table(rows, 1e-9 * rows.prod(axis=1) ** 0.5),
        stream=size_table(moved, np.array([1e-6, 1e-3])),
    )
    tables = KernelTables(path="t.csv", devices={("h100-sxm", "16bit"): own})
    own_kernels, plain = (kernel_model(H100, "bf16", costs=costs) for costs in (tables, "auto"))

    def both(function, *sizes, **options):
        return [function(*sizes, kernels, **options) for kernels in (own_kernels, plain)]

    def attention(batch, share, length, kernels, **options):
        sizes = (batch, 32.0, 32.0 / share, length, length, 128.0, 128.0)
        forward_s = flash_attention_forward_s(*sizes, kernels, **options)
        return forward_s, flash_attention_backward_s(forward_s, sizes, kernels, **options)

    measured, formula = both(attention, 2.0, 4.0, 1024.0, causal=True)
    assert measured[0] == pytest.approx(1e-9 * 64.0 * 1024.0**1.5)
    assert measured[1] == pytest.approx(3.0 * measured[0]) and measured[0] != formula[0]
    for batch, share, length, options in (
        (2.0, 8.0, 1024.0, {"causal": True}),  # another form
        (2.0, 4.0, 8192.0, {"causal": True}),  # too long
        (2.0, 4.0, 1024.0, {"causal": False}),
        (2.0, 4.0, 1024.0, {"causal": True, "window": 128}),
    ):
        measured, formula = both(attention, batch, share, length, **options)
        assert measured == formula
    measured, formula = both(grouped_gemm_s, 512.0, 4.0, 1024.0, 512.0)
    assert measured == pytest.approx(1e-9 * (4.0 * 128.0 * 1024.0 * 512.0) ** 0.5) and measured != formula
    assert np.equal(*both(grouped_gemm_s, 512.0, 4.0, 1024.0, 1024.0))
    assert np.equal(*both(grouped_gemm_s, 512.0, 4.0, 1024.0, 512.0, looped=True))
    assert both(stream_s, 1e7)[0] == pytest.approx(1e-5)
    assert both(stream_rate, 1e7)[0] == pytest.approx(1e12)
    assert np.equal(*both(stream_s, 1e10)) and np.equal(*both(stream_rate, 1e10))


def test_arrays_of_kernels_hold_the_tables_themselves():
    table = size_table(SIZES, seconds())
    other = size_table(SIZES, 2.0 * seconds())
    mixed = np.array([table, 0.0, other], dtype=object)
    size = (256.0, 512.0, 2048.0)
    one = table.seconds(*size)
    assert tabled_s(7.0, mixed, size) == pytest.approx([one, 7.0, 2.0 * one])
    assert tabled(mixed, size).tolist() == [True, False, True]
    assert not tabled(0.0, size) and tabled_s(7.0, table, size) == pytest.approx(one)
