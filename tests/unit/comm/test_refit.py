"""Refitted constants: what made the times is found again, and what they do not tell stays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshard.api import load_cluster
from foreshard.catalog.cluster_file import cluster_text
from foreshard.comm.fabric import fabric_between
from foreshard.comm.prediction import collective_s
from foreshard.comm.refit import MeasuredRun, refit
from foreshard.errors import SpecError

SIZES = 2.0 ** np.arange(10, 33)


def run_of(cluster, collective, ranks, **factors):
    """Return the times of a machine whose constants differ from the shipped ones by factors."""
    fabric = fabric_between(cluster, range(ranks))
    changed = replace(fabric, **{name: getattr(fabric, name) * value for name, value in factors.items()})
    times = collective_s(collective, SIZES, ranks, changed)
    return MeasuredRun(collective=collective, num_ranks=ranks, num_bytes=SIZES, time_s=times)


@settings(max_examples=15, deadline=None)
@given(
    latency=st.floats(0.6, 2.0),
    share=st.floats(0.6, 1.0),
    collective=st.sampled_from(["all-reduce", "all-gather", "all-to-all"]),
)
def test_a_fit_finds_what_made_the_times(latency, share, collective):
    cluster = load_cluster("1x8xa100-sxm-80gb")
    eff = {"all-to-all": "exchange_eff"}.get(collective, "ring_eff")
    names = ("launch_s", "hop_s", "exchange_launch_s", "exchange_hop_s")
    more = {"gather_eff": share} if eff == "ring_eff" else {}
    made = run_of(cluster, collective, 8, **dict.fromkeys(names, latency), **{eff: share}, **more)
    found = refit(cluster, [made])
    assert found.median_error <= found.median_error_before + 1e-12
    assert found.median_error < 0.02
    assert found.factors["latency"] == pytest.approx(latency, rel=0.12)


def test_the_shipped_constants_are_a_fixed_point():
    cluster = load_cluster("2x8xh100-sxm")
    found = refit(cluster, [run_of(cluster, "all-reduce", 16), run_of(cluster, "all-to-all", 16)])
    assert found.factors == pytest.approx(dict.fromkeys(found.factors, 1.0), rel=1e-6)
    assert set(found.factors) >= {"latency", "network latency", "network bandwidth", "exchange bandwidth"}


def test_several_nodes_tell_the_network():
    cluster = load_cluster("2x8xh100-sxm")
    made = run_of(cluster, "all-gather", 16, nic_latency_s=12.0, nic_launch_s=12.0, nic_ring_eff=0.6)
    found = refit(cluster, [made])
    assert found.factors["network bandwidth"] == pytest.approx(0.6, rel=0.2)
    assert found.factors["network latency"] > 1.2 and found.median_error < 0.1 < found.median_error_before


def test_no_share_of_a_link_passes_its_datasheet():
    cluster = load_cluster("1x8xh100-sxm")
    found = refit(cluster, [run_of(cluster, "all-gather", 8, gather_eff=1.5)])
    assert all(value <= 1.0 for name, value in found.constants.items() if name.endswith("_eff"))


def test_the_cluster_file_holds_what_was_fitted(tmp_path):
    cluster = load_cluster("2x8xa100-sxm-40gb@400Gb/s")
    found = refit(cluster, [run_of(cluster, "all-reduce", 16, launch_s=2.0, hop_s=2.0)])
    kept = {name: value for name, value in found.constants.items() if name != "nic_latency_s"}
    groups = tuple(replace(group, collectives=tuple(kept.items())) for group in cluster.nodes)
    path = tmp_path / "measured.toml"
    path.write_text(cluster_text(replace(cluster, nodes=groups)), encoding="utf-8")
    again = load_cluster(str(path))
    assert again.nodes[0].collectives == groups[0].collectives
    assert again.nodes[0].nic_bytes_per_s == cluster.nodes[0].nic_bytes_per_s
    assert fabric_between(again, range(16)).launch_s == found.constants["launch_s"]
    assert fabric_between(cluster, range(16)).launch_s != found.constants["launch_s"]


def test_two_rows_are_no_fit():
    cluster = load_cluster("1x8xh100-sxm")
    run = MeasuredRun(
        collective="all-reduce", num_ranks=8, num_bytes=SIZES[:2], time_s=np.array([1e-5, 1e-5])
    )
    with pytest.raises(SpecError, match="too few rows"):
        refit(cluster, [run])
