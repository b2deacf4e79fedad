"""What collectives see of a cluster."""

from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.fabrics import comm_constants, link_constants, link_generation
from foreshard.comm.collectives import all_reduce_s, send_s
from foreshard.comm.fabric import fabric_between, fabric_of
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster, Link, Network, NodeGroup
from foreshard.spec.device import Device

GB = 1e9


def device(name="h100-sxm", arch="hopper", link="NVLink4 18 links", rate=450 * GB, pcie=63 * GB) -> Device:
    return Device(
        name=name,
        vendor="nvidia",
        arch=arch,
        form="sxm",
        year=2022,
        peak_flops_per_s={"bf16": 989e12},
        memory_bytes=80 * 2**30,
        capacity_bytes=80 * 2**30,
        memory_bytes_per_s=3350 * GB,
        num_sms=132,
        clock_hz=1.8e9,
        l2_bytes=50e6,
        link=link,
        link_bytes_per_s=rate,
        pcie_bytes_per_s=pcie,
        tdp_w=700.0,
        source="test",
        verified=True,
    )


def nodes(count=2, per_node=8, nic=400 * GB, nvlink_domain=8, rack=None, dev=None) -> NodeGroup:
    return NodeGroup(
        count=count,
        device=dev or device(),
        per_node=per_node,
        nic_bytes_per_s=nic,
        nic_latency_s=5e-6,
        rack=rack,
        nvlink_domain=nvlink_domain,
    )


@pytest.mark.parametrize(
    ("arch", "link", "row"),
    [
        ("hopper", "NVLink4 18 links", "hopper-nvlink"),
        ("blackwell ultra", "NVLink5 18 links, NVL72", "blackwell-nvlink"),
        ("volta", "NVLink2 6 links", "volta-nvlink"),
        ("hopper", "NVLink-C2C to Grace", "hopper-c2c"),
        ("cdna3", "Infinity Fabric 7 links x64/dir", "mesh"),
        ("turing", "", "turing-pcie"),
        ("ada", "", "pcie4"),
        ("xe2", None, "xe2-pcie"),
        ("hopper", "", "pcie"),
        ("pascal", "NVLink1 4 links", "nvlink"),
        ("tpu", "ICI 6 links", "nvlink"),
    ],
)
def test_generation_of_a_link(arch, link, row):
    assert link_generation(arch, link) == row


def test_a_pcie_row_of_one_server_serves_only_its_device():
    assert link_generation("ada", "", name="l40s") == "l40s-pcie"
    assert link_generation("ampere", "", name="rtx-3090") == "rtx-3090-pcie"
    assert link_generation("ampere", "", name="a100-pcie-80gb") == "pcie4"


def test_latencies_of_a_pooled_row_are_cycles():
    slow, fast = (link_constants("pcie4", clock_hz=clock) for clock in (1e9, 2e9))
    assert slow.launch_s == pytest.approx(2.0 * fast.launch_s) and slow.hop_s == pytest.approx(2 * fast.hop_s)
    assert (slow.ring_eff, slow.ramp) == (fast.ring_eff, fast.ramp)
    assert link_constants("hopper-nvlink", clock_hz=1e9) == link_constants("hopper-nvlink")


def test_unknown_generation_and_era_name_what_is_known():
    with pytest.raises(SpecError, match="hopper-nvlink"):
        link_constants("no-such")
    with pytest.raises(SpecError, match=r"2\.2x"):
        link_constants("nvlink", nccl="1.0")


def test_every_row_is_physical():
    for name, row in comm_constants()["links"].items():
        for key, value in row.items():
            if key.endswith("_eff"):
                assert 0.0 < value <= 1.0, (name, key)
            elif key.endswith("_s"):
                assert 1e-8 < value < 1e-4, (name, key)


def test_domain_follows_nvlink_and_cluster_size():
    assert fabric_of(nodes()).domain == 8
    gb200 = device("gb200-nvl72", "blackwell", "NVLink5 18 links, NVL72", 900 * GB)
    assert fabric_of(nodes(count=18, per_node=4, nvlink_domain=72, dev=gb200)).domain == 72
    assert fabric_of(nodes(count=2, per_node=4, nvlink_domain=72, dev=gb200)).domain == 8


def test_pcie_group_uses_the_pcie_rate_and_no_switch_reduction():
    pcie = fabric_of(nodes(nvlink_domain=1, dev=device("l40s", "ada", "", 0.0, 31.5 * GB)))
    assert (pcie.intra_bytes_per_s, pcie.domain, pcie.in_network) == (31.5 * GB, 8, 0.0)


def test_missing_rate_is_an_error_that_names_the_key():
    with pytest.raises(SpecError) as caught:
        fabric_of(nodes(nvlink_domain=1, dev=device(pcie=0.0)))
    assert caught.value.key == "device.pcie_bytes_per_s"


def test_datasheet_has_no_fitted_efficiency_and_is_faster():
    plain, fitted = fabric_of(nodes(), fidelity="datasheet"), fabric_of(nodes())
    assert {plain.ring_eff, plain.gather_eff, plain.nic_ring_eff} == {1.0}
    assert plain.ramp == 0.0
    assert all_reduce_s(1e9, 16, 1, plain) < all_reduce_s(1e9, 16, 1, fitted)


def test_old_library_is_slower_on_small_messages_only():
    a100 = nodes(dev=device("a100-sxm-80gb", "ampere", "NVLink3 12 links", 300 * GB))
    old, new = fabric_of(a100, nccl="old"), fabric_of(a100)
    assert all_reduce_s(1e6, 8, 1, old) > 1.3 * all_reduce_s(1e6, 8, 1, new)
    assert all_reduce_s(4e9, 8, 1, old) == pytest.approx(all_reduce_s(4e9, 8, 1, new), rel=0.05)


def test_constants_can_leave_a_measured_family_out():
    h100 = fabric_of(nodes(), exclude="h100_sxm")
    assert h100.launch_s > fabric_of(nodes()).launch_s  # that server is the quickest seen
    assert fabric_of(nodes(), exclude="a100_sxm") == fabric_of(nodes())
    assert fabric_of(nodes(), exclude="never heard of") == fabric_of(nodes())


def test_group_over_two_kinds_of_nodes_runs_at_the_slower():
    a100 = device("a100-sxm-80gb", "ampere", "NVLink3 12 links", 300 * GB)
    mixed = Cluster(name="mixed", nodes=(nodes(), nodes(nic=50 * GB, dev=a100)))
    both = fabric_between(mixed, range(32))
    assert both.intra_bytes_per_s == 300 * GB
    assert both.nic_bytes_per_s / both.per_node == 50 * GB / 8
    assert both.in_network == 0.0
    assert fabric_between(mixed, range(16)) == fabric_of(mixed.nodes[0])


@pytest.mark.parametrize(
    "written",
    [
        "2x2xa100-pcie-40gb+2x2xv100-sxm-16gb@400Gb/s",  # the slower link has the shorter ramp
        "2x4xa100-pcie-40gb+2x4xrtx-3090@25Gb/s",  # and the slower ring the quicker messages
    ],
)
def test_a_message_is_no_quicker_for_another_kind_of_node_on_its_way(written):
    cluster = load_cluster(written)
    half, sizes = cluster.num_devices // 2, np.array([1e3, 1e6, 1e8])
    for crosses in (False, True):
        both = send_s(sizes, crosses, fabric_between(cluster, range(2 * half)))
        for own in (range(half), range(half, 2 * half)):
            alone = send_s(sizes, crosses, fabric_between(cluster, own))
            assert np.all(both >= alone * (1 - 1e-9))


def test_link_between_racks_bounds_the_group_that_crosses_it():
    racks = (nodes(rack="r0"), nodes(rack="r1"))
    slow = Link(between=("r0", "r1"), bandwidth_bytes_per_s=12.5 * GB, latency_s=1e-3)
    cluster = Cluster(name="two sites", nodes=racks, links=(slow,))
    assert all_reduce_s(1e9, 32, 1, fabric_between(cluster, range(32))) > 1e9 * 31 / 32 / (12.5 * GB)
    assert fabric_between(cluster, range(16)) == fabric_between(replace(cluster, links=()), range(16))
    shared = fabric_between(cluster, range(32), concurrent=2)
    assert shared.nic_bytes_per_s == fabric_between(cluster, range(32)).nic_bytes_per_s / 2


def test_oversubscription_divides_the_network_only():
    thin = Cluster(name="thin", nodes=(nodes(),), network=Network(oversubscription=4.0))
    assert fabric_between(thin, range(16)).nic_bytes_per_s == 100 * GB
    assert all_reduce_s(1e8, 8, 1, fabric_between(thin, range(16))) == all_reduce_s(
        1e8, 8, 1, fabric_of(nodes())
    )
