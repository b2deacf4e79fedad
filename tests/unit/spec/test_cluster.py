import dataclasses
import json
import pickle

import pytest

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.device import Device


def make_device(name="d", arch="ampere", vendor="nvidia", **peaks):
    return Device(
        name=name,
        vendor=vendor,
        arch=arch,
        form="sxm",
        year=2020,
        peak_flops_per_s=peaks or {"fp16": 2e12, "bf16": 2e12, "fp32": 1e12},
        memory_bytes=2**30,
        capacity_bytes=2**30,
        memory_bytes_per_s=1e9,
        num_sms=1,
        clock_hz=1e9,
        l2_bytes=0.0,
        link="",
        link_bytes_per_s=0.0,
        pcie_bytes_per_s=1e9,
        tdp_w=1.0,
        source="test",
        verified=True,
    )


def make_group(name, count, per_node, usd_per_h=None):
    return NodeGroup(
        count=count,
        device=make_device(name),
        per_node=per_node,
        nic_bytes_per_s=1e9,
        nic_latency_s=1e-6,
        usd_per_h=usd_per_h,
        nvlink_domain=per_node,
    )


def test_ranks_count_devices_in_cluster_order():
    cluster = Cluster(name="c", nodes=(make_group("a", 2, 4), make_group("b", 1, 2), make_group("a", 1, 1)))
    assert cluster.num_devices == 11
    assert cluster.num_nodes == 4
    assert [cluster.device_of(rank).name for rank in range(11)] == ["a"] * 8 + ["b"] * 2 + ["a"]
    assert [cluster.node_of(rank) for rank in range(11)] == [0] * 4 + [1] * 4 + [2] * 2 + [3]
    assert cluster.node_group_of(10) is cluster.nodes[2]
    assert cluster.counts_by_group(range(7, 11)) == [1, 2, 1] and cluster.counts_by_group((0, 3)) == [2, 0, 0]
    assert [device.name for device, n in cluster.devices_on((10, 9, 0)) if n == 1] == ["a", "b", "a"]
    assert cluster.device_counts((10, 9, 0)) == {"a": 2, "b": 1}
    assert [device.name for device in cluster.devices] == ["a", "b"]


@pytest.mark.parametrize("rank", [-1, 8, 10**9])
def test_a_rank_outside_the_cluster_is_an_error(rank):
    with pytest.raises(IndexError):
        Cluster(name="c", nodes=(make_group("a", 2, 4),)).device_of(rank)


def test_price_is_the_sum_or_none():
    assert Cluster(name="c", nodes=(make_group("a", 2, 4, 3.0), make_group("b", 3, 1, 0.5))).usd_per_h == 7.5
    assert Cluster(name="c", nodes=(make_group("a", 2, 4, 3.0), make_group("b", 3, 1))).usd_per_h is None
    assert Cluster(name="c", nodes=(make_group("a", 2, 4, 0.0),)).usd_per_h == 0.0


def test_a_cluster_can_be_hashed_pickled_and_written():
    cluster = Cluster(name="c", nodes=(make_group("a", 2, 4),))
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert len({cluster, pickle.loads(pickle.dumps(cluster))}) == 1
    assert json.loads(json.dumps(dataclasses.asdict(cluster)))["nodes"][0]["device"]["name"] == "a"


def test_peak_of_scaled_formats_is_that_of_the_narrow_type():
    device = make_device(arch="blackwell", fp8=4e12, fp4=8e12)
    assert device.peak("fp8") == device.peak("mxfp8") == 4e12
    assert device.peak("nvfp4") == 8e12


@pytest.mark.parametrize(
    ("arch", "vendor", "precision"),
    [
        ("hopper", "nvidia", "mxfp8"),
        ("hopper", "nvidia", "nvfp4"),
        ("cdna4", "amd", "nvfp4"),
        ("blackwell", "nvidia", "fp32"),
        ("blackwell", "nvidia", "fp4"),
        ("blackwell", "nvidia", "int8"),
        ("blackwell", "nvidia", ""),
    ],
)
def test_a_precision_the_device_lacks_is_an_error_that_names_what_it_has(arch, vendor, precision):
    device = make_device(arch=arch, vendor=vendor, fp8=4e12, fp4=8e12, int8=4e12)
    assert not device.supports(precision)
    with pytest.raises(SpecError) as caught:
        device.peak(precision)
    assert "fp8" in caught.value.fix
    assert caught.value.key == "precision"


def test_what_a_session_prints_of_models_and_clusters_is_one_line():
    cluster = load_cluster("2x8xh100-sxm@50GB/s+1x4xt4@100Gb/s")
    assert repr(cluster).endswith("2 nodes of 8 h100-sxm, 50 GB/s a node + 1 node of 4 t4, 12.5 GB/s a node>")
    assert repr(cluster.devices[0]).startswith("<Device h100-sxm: 79.2 GiB at 3.35 TB/s; TFLOP/s ")
    model = load_model("deepseek-v3")
    assert "3 blocks + 58 blocks of 256 experts, hidden 7,168, 671,026,404,352 param" in repr(model)


def test_a_prediction_asks_for_no_device_rank_by_rank(monkeypatch):
    """Rules and rates once asked for the device of each of 800,000 ranks, seconds of every prediction."""
    asked = []
    own = Cluster.device_of
    monkeypatch.setattr(Cluster, "device_of", lambda self, rank: asked.append(rank) or own(self, rank))
    api.predict("llama3-8b", "64x8xh100-sxm", tp=2)
    assert len(asked) < 512
