"""Laws of learned kernel times: they rise in every size, and formulas of fitted devices stay untouched."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard.catalog.devices import devices, resolve_device
from foreshard.catalog.kernels import COSTS, kernel_model
from foreshard.catalog.learned import fitted_devices, learned_kernels
from foreshard.cost.attention import flash_attention_forward_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.cost.learned import shipped_trees

UNFITTED = (("h20-sxm", "bf16"), ("a30", "bf16"), ("v100s-pcie", "fp16"), ("rtx-5090", "bf16"))
KERNELS = [kernel_model(resolve_device(name), precision, costs="learned") for name, precision in UNFITTED]
SERVING = kernel_model(resolve_device("h100-sxm"), "bf16", attention="trtllm", costs="learned")
ATTENTION = [
    kernel_model(resolve_device(name), "bf16", attention=kernel, costs="learned")
    for name, kernel in (("h200-nvl", "fa3"), ("a40", "fa2"), ("a30", "fa2"))
] + [SERVING]
size = st.integers(1, 60_000)
more = st.integers(1, 20_000)
ROUNDING = 1 + 1e-12


@given(
    st.sampled_from(KERNELS),
    st.tuples(size, size, size, st.integers(1, 64)),
    st.integers(0, 3),
    more,
)
def test_a_larger_product_is_never_faster(model, sizes, axis, grown):
    # Catches trees whose leaves were moved after they had grown in order (as absolute errors do).
    assert model.gemm_learned
    larger = [s + grown * (i == axis) for i, s in enumerate(sizes)]
    before, after = (gemm_s(m, n, k, model, batch=b) for m, n, k, b in (sizes, larger))
    assert after * ROUNDING >= before > 0


@given(
    st.sampled_from(ATTENTION),
    st.tuples(
        st.integers(1, 64), st.integers(1, 16), st.integers(1, 8), size, st.sampled_from((64, 96, 128))
    ),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_larger_attention_is_never_faster(model, sizes, axis, factor):
    def seconds(batch, kv_heads, group, length, width):
        heads = kv_heads * group
        return flash_attention_forward_s(
            batch, heads, kv_heads, length, length, width, width, model, causal=True
        )

    assert model.attn_learned
    larger = [s * (factor if i == axis else 1) for i, s in enumerate(sizes)]
    assert seconds(*larger) * ROUNDING >= seconds(*sizes) > 0


@given(st.sampled_from(KERNELS), st.tuples(size, st.integers(1, 8), size, size), st.integers(0, 3), more)
def test_a_larger_grouped_product_is_never_faster(model, sizes, axis, grown):
    # Groups stay as they are: with more of them the same tokens fill fewer rows of each.
    axis = (0, 2, 3)[axis % 3]
    assert model.grouped_learned
    larger = [s + grown * (i == axis) for i, s in enumerate(sizes)]
    before, after = (grouped_gemm_s(t, g, n, k, model) for t, g, n, k in (sizes, larger))
    assert after * ROUNDING >= before > 0


@given(st.sampled_from(KERNELS), st.tuples(size, size, size), st.floats(1.0, 4.0))
def test_a_faster_device_is_never_slower(model, sizes, factor):
    faster = replace(
        model,
        peak_flops_per_s=model.peak_flops_per_s * factor,
        memory_bytes_per_s=model.memory_bytes_per_s * factor,
    )
    assert gemm_s(*sizes, faster) <= gemm_s(*sizes, model) * ROUNDING


def test_a_batch_of_devices_equals_each_alone():
    # Catches a correction that reaches rows of devices whose kernels are not learned.
    formula = kernel_model(resolve_device("h20-sxm"), "bf16")
    both = [KERNELS[0], formula]
    stacked = replace(
        formula, **{f.name: np.array([getattr(k, f.name) for k in both]) for f in fields(formula)}
    )
    m = np.array([[4096.0], [77.0], [0.0]])
    alone = np.stack([gemm_s(m[:, 0], 4096, 1024, k) for k in both], axis=1)
    assert gemm_s(m, 4096, 1024, stacked) == pytest.approx(alone, rel=1e-14)
    assert (alone[2] == 0).all()


def test_no_kernel_of_a_fitted_device_changes_by_default():
    for name in sorted(fitted_devices()):
        device = resolve_device(name)
        for precision in ("fp32", "fp16", "bf16", "fp8"):
            if device.supports(precision):
                assert kernel_model(device, precision, costs="auto") == kernel_model(device, precision)


def test_devices_unlike_the_trained_keep_the_formula():
    # A TPU has few large cores, a Gaudi too; no 16-bit kernel of AMD's libraries was trained on.
    for name in ("mi300a", "mi250x", "tpu-v4", "trainium-2", "gaudi", "ascend-910", "b100-sxm"):
        device = resolve_device(name)
        precision = "bf16" if device.supports("bf16") else "fp16"
        assert kernel_model(device, precision, costs="learned") == kernel_model(device, precision)
    for precision in ("fp8", "tf32", "fp32"):
        assert not kernel_model(resolve_device("h200-nvl"), precision, costs="learned").gemm_learned


def test_learned_costs_are_used_only_where_they_are_better_on_devices_left_out():
    report = learned_kernels()["left_out"]
    for kind in learned_kernels()["preferred"]:
        for which in ("all", "long ones"):
            errors = report[kind][f"{which}, device left out"]
            assert errors["learned"]["median"] < errors["formula"]["median"] < errors["roofline"]["median"]
    assert report["gemm_16bit"]["all, device left out"]["learned"]["median"] <= 0.10
    assert report["attention"]["all, device left out"]["learned"]["median"] <= 0.12
    assert report["grouped"]["all, device left out"]["learned"]["median"] <= 0.20
    assert report["stream"]["all, device left out"]["formula"]["median"] <= 0.12


def test_beyond_the_trained_times_the_formula_extrapolates():
    # Twice the work of a product far longer than any trained takes twice the time.
    model = KERNELS[0]
    once, twice = (float(gemm_s(1 << 20, 1 << 18, 1 << 14, model, batch=b)) for b in (8, 16))
    assert twice / once == pytest.approx(2.0, rel=0.02)


def test_trees_equal_a_walk_from_node_to_node():
    rng = np.random.default_rng(0)
    for kind, trees in shipped_trees().items():
        width = int(trees.feature.max()) + 1
        rows = rng.uniform(-3, 12, (100, width))
        found = trees.log_time(rows[:, 0], rows[:, 1:])
        for i in (0, 41, 99):
            inside = min(max(rows[i, 0], trees.low), trees.high)
            total = trees.base + trees.share * inside + rows[i, 0] - inside
            for tree in range(len(trees.feature)):
                node = 0
                while trees.left[tree, node] != node:
                    which = trees.feature[tree, node]
                    value = inside if which == 0 else rows[i, which]
                    side = trees.left if value <= trees.threshold[tree, node] else trees.right
                    node = side[tree, node]
                total += float(trees.value[tree, node])
            assert found[i] == pytest.approx(total, abs=1e-9), kind


def test_every_device_has_kernels_under_every_source():
    for device in devices().values():
        for precision in ("bf16", "fp16", "fp32"):
            if device.supports(precision):
                for costs in COSTS:
                    found = float(gemm_s(4096, 4096, 4096, kernel_model(device, precision, costs=costs)))
                    assert 0 < found < 60
