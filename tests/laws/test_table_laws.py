"""Laws of a table of plans; each names the mistake it would catch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import TrainingConstants
from foreshard.predict.analytical.table import evaluate
from foreshard.predict.plan_table import PlanTable
from foreshard.predict.space import draw_plans, valid_plans
from foreshard.predict.stage_rows import extra_chunks, stage_rows_of
from foreshard.spec.checks import check_plan
from foreshard.spec.degrees import block_cuts

CASES = {
    "dense": ("gpt-22b", "2x8xa100-sxm-80gb", 64, 2048),
    "experts": ("mixtral-8x7b", "4x8xh100-sxm", 256, 4096),
}
CONSTANTS = TrainingConstants()
FRAMEWORK = load_framework("megatron-core")
SEEDS = st.integers(0, 2**32 - 1)


def drawn(case: str, seed: int, num_plans: int = 12):
    name, cluster, global_batch, seq_len = CASES[case]
    model, cluster = load_model(name), load_cluster(cluster)
    rng = np.random.default_rng(seed)
    return (
        model,
        cluster,
        draw_plans(model, cluster, num_plans, rng, global_batch=global_batch, seq_len=seq_len),
        seq_len,
    )


def price(model, cluster, table, seq_len):
    return evaluate(model, cluster, table, framework=FRAMEWORK, constants=CONSTANTS, seq_len=seq_len)


@settings(max_examples=60, deadline=None)
@given(blocks=st.integers(1, 200), chunks=st.integers(1, 200))
def test_extra_chunks_are_block_cuts(blocks, chunks):
    """A wrong closed form of uneven cuts."""
    chunks = min(chunks, blocks)
    base, filled, head = extra_chunks(blocks, np.array([chunks]))
    cuts = [int(base[0] + (1 <= j <= filled[0]) + (j == 0) * head[0]) for j in range(chunks)]
    assert cuts == block_cuts(blocks, chunks)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_layer_and_stage_is_counted_once(data):
    """Lost or doubled layers when equal stages are joined."""
    model = load_model(data.draw(st.sampled_from(["gpt-22b", "llama3-70b", "deepseek-v3"])))
    pp = data.draw(st.integers(1, model.num_layers))
    vpp = data.draw(st.integers(1, model.num_layers // pp))
    rows = stage_rows_of(model, np.array([pp]), np.array([vpp]))
    assert rows.multiplicity.sum() == pp
    for (_, expected), counts in zip(model.block_kinds(), rows.counts, strict=True):
        extra = model.num_next_token if counts is rows.counts[-1] else 0
        assert (counts * rows.multiplicity).sum() == expected + extra
    assert (rows.has_embedding * rows.multiplicity).sum() == (rows.has_head * rows.multiplicity).sum() == 1


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_a_plan_does_not_depend_on_its_neighbours(case, seed):
    """A shape or shortcut that one plan of a batch decides for the others."""
    model, cluster, table, seq_len = drawn(case, seed)
    together = price(model, cluster, table, seq_len)
    order = np.random.default_rng(seed).permutation(len(table))
    mixed = price(model, cluster, table.take(order), seq_len)
    np.testing.assert_allclose(mixed.step_time_s, together.step_time_s[order], rtol=1e-12)
    for i in (0, len(table) - 1):
        alone = price(model, cluster, table.take(slice(i, i + 1)), seq_len)
        assert alone.step_time_s[0] == pytest.approx(together.step_time_s[i], rel=1e-12)
        assert alone.peak_bytes[0] == pytest.approx(together.peak_bytes[i], rel=1e-12)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_parts_sum_to_the_step_and_are_not_negative(case, seed):
    """A part booked twice or left out."""
    model, cluster, table, seq_len = drawn(case, seed)
    result = price(model, cluster, table, seq_len)
    np.testing.assert_allclose(sum(result.parts.values()), result.step_time_s, rtol=1e-9)
    assert all((part >= 0).all() for part in result.parts.values())
    assert np.isfinite(result.step_time_s).all() and (result.peak_bytes > 0).all()


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_more_network_is_never_slower(case, seed):
    """A rate used upside down."""
    model, cluster, table, seq_len = drawn(case, seed)
    faster = replace(
        cluster,
        nodes=tuple(replace(node, nic_bytes_per_s=2 * node.nic_bytes_per_s) for node in cluster.nodes),
    )
    before, after = price(model, cluster, table, seq_len), price(model, faster, table, seq_len)
    assert (after.step_time_s <= before.step_time_s * (1 + 1e-9)).all()


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_masks_agree_with_the_rules_of_plans(case, seed):
    """A drawn plan that `check_plan` refuses, or another global batch than asked for."""
    model, cluster, table, seq_len = drawn(case, seed, num_plans=6)
    assert valid_plans(model, cluster, table, seq_len=seq_len).all()
    assert (table.global_batch == CASES[case][2]).all()
    for i in range(len(table)):
        check_plan(table.plan(i, model, seq_len=seq_len), model, cluster)


def test_draws_repeat_with_their_seed():
    """Hidden state in the generator."""
    first, second = drawn("dense", 5)[2], drawn("dense", 5)[2]
    assert all(
        (getattr(first, name) == getattr(second, name)).all() for name in first.__slots__ if name != "rules"
    )


@settings(max_examples=20, deadline=None)
@given(micro_batches=st.integers(1, 64))
def test_more_micro_batches_take_longer(micro_batches):
    """A step that does not grow with its work."""
    model, cluster = load_model("gpt-22b"), load_cluster("1x8xa100-sxm-80gb")
    counts = np.array([micro_batches, micro_batches + 1])
    table = PlanTable.from_columns({"tp": 4, "pp": 2, "num_micro_batches": counts})
    times = price(model, cluster, table, 2048).step_time_s
    assert times[1] > times[0]
