"""Laws of collectives: monotone, scale-free in labels, and consistent with each other."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard.catalog.fabrics import comm_constants, link_constants
from foreshard.comm.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    reduce_scatter_s,
    send_s,
)
from foreshard.comm.fabric import Fabric, fabric_between, fabric_from
from foreshard.predict.run_setup import stacked
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.device import Device

COLLECTIVES = (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s, broadcast_s)
ROWS = sorted(comm_constants()["links"])


@st.composite
def fabrics(draw) -> Fabric:
    per_node = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return fabric_from(
        link_constants(draw(st.sampled_from(ROWS)), nccl=draw(st.sampled_from(["2.2x", "old"]))),
        intra_bytes_per_s=draw(st.floats(1e9, 2e12)),
        domain=draw(st.sampled_from([per_node, 72])),
        per_node=per_node,
        nic_bytes_per_s=draw(st.floats(1e8, 1e12)),
        nic_latency_s=draw(st.floats(0.0, 1e-3)),
        in_network=draw(st.booleans()),
    )


sizes = st.floats(1.0, 1e11)
ranks = st.integers(2, 2048)
strides = st.sampled_from([1, 2, 4, 8, 16, 64])
collectives = st.sampled_from(COLLECTIVES)


@given(collectives, fabrics(), sizes, st.floats(1.0, 1e3), ranks, strides)
def test_more_bytes_never_take_less(collective, fabric, size, factor, n, stride):
    less, more = (float(collective(b, n, stride, fabric)) for b in (size, size * factor))
    assert 0.0 < less <= more * (1 + 1e-12)
    assert np.isfinite(more)


@given(
    collectives,
    fabrics(),
    sizes,
    ranks,
    strides,
    st.sampled_from(["intra_bytes_per_s", "nic_bytes_per_s"]),
    st.floats(1.0, 100.0),
)
def test_more_bandwidth_never_takes_longer(collective, fabric, size, n, stride, name, factor):
    faster = replace(fabric, **{name: getattr(fabric, name) * factor})
    assert collective(size, n, stride, faster) <= collective(size, n, stride, fabric) * (1 + 1e-12)


@given(fabrics(), sizes, st.booleans(), st.sampled_from(["intra_bytes_per_s", "nic_bytes_per_s"]))
def test_a_send_obeys_the_same(fabric, size, crosses, name):
    faster = replace(fabric, **{name: getattr(fabric, name) * 3.0})
    assert 0.0 < send_s(size, crosses, faster) <= send_s(size, crosses, fabric) * (1 + 1e-12)
    assert send_s(size, crosses, fabric) <= send_s(2 * size, crosses, fabric)


@given(collectives, fabrics(), sizes, ranks, strides, st.sampled_from(["nic_latency_s", "hop_s"]))
def test_less_latency_never_takes_longer(collective, fabric, size, n, stride, name):
    quicker = replace(fabric, **{name: getattr(fabric, name) / 2})
    assert collective(size, n, stride, quicker) <= collective(size, n, stride, fabric) * (1 + 1e-12)


@given(fabrics(), sizes, st.integers(2, 72))
def test_without_switch_reduction_an_all_reduce_is_no_cheaper_than_half_of_it(fabric, size, n):
    inside = replace(fabric, domain=72.0, in_network=0.0, ring_eff=fabric.gather_eff)
    assert all_reduce_s(size, n, 1, inside) >= reduce_scatter_s(size, n, 1, inside) * (1 - 1e-12)


@given(fabrics(), st.integers(2, 72))
def test_scatter_plus_gather_is_a_ring_all_reduce_on_large_buffers(fabric, n):
    inside = replace(fabric, domain=72.0, in_network=0.0, ring_eff=fabric.gather_eff, copy=0.0)
    halves = reduce_scatter_s(1e12, n, 1, inside) + all_gather_s(1e12, n, 1, inside)
    assert float(halves) == pytest.approx(float(all_reduce_s(1e12, n, 1, inside)), rel=0.05)


@given(collectives, st.lists(fabrics(), min_size=2, max_size=5), sizes, ranks, st.randoms())
def test_order_of_rows_changes_nothing(collective, rows, size, n, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    batch, shuffled = stacked(rows, Fabric), stacked([rows[i] for i in order], Fabric)
    assert np.array_equal(collective(size, n, 1, batch)[order], collective(size, n, 1, shuffled))


def _device(arch: str, rate: float) -> Device:
    zero = dict.fromkeys(
        ("memory_bytes", "capacity_bytes", "memory_bytes_per_s", "clock_hz", "l2_bytes"), 1.0
    )
    return Device(
        **zero,
        name=arch,
        vendor="nvidia",
        arch=arch,
        form="sxm",
        year=2020,
        peak_flops_per_s={},
        num_sms=1,
        link="NVLink",
        link_bytes_per_s=rate,
        pcie_bytes_per_s=3e10,
        tdp_w=1.0,
        source="law",
        verified=False,
    )


@given(st.sets(st.integers(0, 31), min_size=2), st.randoms())
def test_relabelling_ranks_of_a_group_changes_nothing(members, random):
    groups = [
        NodeGroup(
            count=2,
            device=_device(arch, rate),
            per_node=8,
            nic_bytes_per_s=nic,
            nic_latency_s=5e-6,
            nvlink_domain=8,
        )
        for arch, rate, nic in (("hopper", 450e9, 4e11), ("ampere", 300e9, 1e11))
    ]
    cluster = Cluster(name="law", nodes=tuple(groups))
    shuffled = list(members)
    random.shuffle(shuffled)
    assert fabric_between(cluster, shuffled) == fabric_between(cluster, sorted(members))
