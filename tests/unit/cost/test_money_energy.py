"""Dollars and joules by hand."""

from dataclasses import replace

import pytest

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.cost.energy import WAITING_POWER, energy_j
from foreshard.cost.money import money
from foreshard.spec.prediction import TIME_PARTS

CLUSTER = load_cluster("2x8xh100-sxm")


def test_nodes_are_paid_by_the_hour():
    priced = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], usd_per_h=90.0, price_date="2026-01-01"),))
    got = money(priced, 36.0, 1e6, tokens=1e12)
    assert got.usd_per_step == pytest.approx(2 * 90.0 * 36 / 3600)
    assert got.usd_per_1b_tokens == pytest.approx(1.8 * 1e3) and got.usd_total == pytest.approx(1.8e6)
    assert got.price_date == "2026-01-01"


def test_a_stated_price_wins_and_has_no_date():
    got = money(CLUSTER, 3600.0, 1e9, usd_per_device_hour=2.5)
    assert got.usd_per_step == got.usd_per_1b_tokens == 40.0
    assert got.usd_total is None and got.price_date is None


def test_no_price_is_null_and_never_zero():
    unpriced = replace(CLUSTER, nodes=(CLUSTER.nodes[0], replace(CLUSTER.nodes[0], usd_per_h=None)))
    got = money(unpriced, 1.0, 1.0, tokens=1.0)
    assert (got.usd_per_step, got.usd_per_1b_tokens, got.usd_total, got.price_date) == (None,) * 4


def test_the_oldest_price_dates_the_sum():
    nodes = CLUSTER.nodes[0]
    dated = tuple(replace(nodes, price_date=date) for date in ("2026-02-01", "2025-03-02", None))
    assert money(replace(CLUSTER, nodes=dated), 1.0, 1.0).price_date == "2025-03-02"


def test_devices_draw_less_while_they_wait():
    parts = dict.fromkeys(TIME_PARTS, 0.0) | {
        "compute": 2.0,
        "optimizer": 1.0,
        "bubble": 4.0,
        "data_comm": 1.0,
    }
    assert energy_j(1000.0, parts) == pytest.approx(1000.0 * (3.0 + 5.0 * WAITING_POWER))


def test_energy_of_a_mixed_cluster_adds_the_limits():
    mixed = load_cluster("1x4xa100-sxm-80gb+1x4xv100-sxm-32gb")
    got = api.predict(api.load_model("llama3-8b"), mixed, tp=4, precision="fp16")
    parts = got.time_breakdown_s
    watts = sum(4 * nodes.device.tdp_w for nodes in mixed.nodes)
    busy = parts["compute"] + parts["recompute"] + parts["optimizer"]
    expected = watts * (busy + WAITING_POWER * (got.step_time_s - busy))
    assert got.energy_j_per_step == pytest.approx(expected)
    assert got.mfu_bf16 is None, "the V100 has no bf16"


def test_energy_is_null_where_no_power_limit_is_known():
    got = api.predict(api.load_model("llama3-8b"), load_cluster("1x4xtpu-v5p"), tp=4)
    assert got.energy_j_per_step is None
    assert any("no power limit is known" in text for text in got.assumptions)
