"""Devices that meet on PCIe only: what a cluster file states of how they do, and the default precision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.comm.collectives import all_gather_s
from foreshard.comm.fabric import fabric_of

BYTES = 400 * 2**20


def gather_s(count, **stated):
    nodes = replace(load_cluster(f"1x{count}xrtx-3090").nodes[0], **stated)
    return float(all_gather_s(BYTES, count, 1.0, fabric_of(nodes)))


@pytest.mark.parametrize("pcie", ["switch", "host"])
def test_a_ring_keeps_its_rate_where_devices_do_not_share_a_bus(pcie):
    """Twice the ranks send 7/8 instead of 3/4 of the bytes, over links as fast."""
    few, many = (gather_s(count, pcie=pcie) for count in (4, 8))
    assert 1.0 < many / few < 1.35
    assert many < gather_s(8)


def test_a_switch_is_no_slower_than_the_memory_of_the_host():
    assert gather_s(8, pcie="switch") < gather_s(8, pcie="host")


def test_a_cluster_file_states_it(tmp_path):
    path = tmp_path / "cards.toml"
    table = '[[nodes]]\ncount = 1\ndevice = "rtx-3090"\nper_node = 8\nnic = "25 Gb/s"\npcie = "host"\n'
    path.write_text(table)
    assert api.load_cluster(str(path)).nodes[0].pcie == "host"
    said = " ".join(api.predict("gpt2-large", "1x8xrtx-3090").assumptions)
    assert "one PCIe bus" in said
    assert "one PCIe bus" not in " ".join(api.predict("gpt2-large", str(path)).assumptions)


@pytest.mark.parametrize(
    "cluster, expected",
    [("1x8xv100-sxm-32gb", "fp16"), ("1x4xt4", "fp16"), ("1x8xrtx-3090", "bf16"), ("1x1xk80", "fp32")],
)
def test_precision_where_none_is_stated(cluster, expected):
    assert load_cluster(cluster).default_precision() == expected
    plan = api.make_plan("gpt2-small", cluster)
    assert plan.precision == expected
    found = api.plan("gpt2-small", cluster, global_batch=8, engine="analytical", budget_s=2, tp=1, max_pp=1)
    assert found.plans[0].plan.precision == expected


def test_devices_that_share_no_bf16_take_what_all_have():
    mixed = "1x2xa100-sxm-40gb+1x2xv100-sxm-32gb@100Gb/s"
    assert load_cluster(mixed).default_precision() == "fp16"
    assert load_cluster(mixed).default_precision(of_all=False) == "bf16"
    said = " ".join(api.predict("gpt2-small", mixed).assumptions)
    assert "fp16, not stated" in said
