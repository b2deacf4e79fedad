"""The channel search against what NCCL logged, and what it must keep."""

import pytest

from foreshard.api import load_cluster
from foreshard.comm.nccl.communicator import communicator_of, has_nccl
from foreshard.comm.nccl.constants import channel_speeds, nvlink_bytes_per_s, pcie_bytes_per_s
from foreshard.errors import SpecError

GB = 1e9


def seen(cluster, ranks):
    return communicator_of(load_cluster(cluster), ranks)


# Search results of NCCL in logs: NVIDIA/nccl issue 1197 (H100: rings and trees 12 x 30, NVLS 8 x 40
# with 60 between nodes), "24 coll channels" of 8 A100 and 8 H100, "16 coll channels" of 8 H800 (issue 892),
# "12 coll channels" of 8 V100. The row of B200 is this search's own result.
@pytest.mark.parametrize(
    ("cluster", "count", "speed", "channels"),
    [
        ("1x8xh100-sxm", 12, 30.0, 24),
        ("1x8xa100-sxm-80gb", 12, 20.0, 24),
        ("1x8xh800-sxm", 8, 20.0, 16),
        ("1x8xv100-sxm-32gb", 6, 20.0, 12),
        ("1x8xb200-sxm", 16, 45.0, 32),
    ],
)
def test_rings_of_one_node_are_those_that_nccl_logs(cluster, count, speed, channels):
    comm = seen(cluster, 8)
    assert (comm.ring.count, comm.ring.intra_bytes_per_s) == (count, pytest.approx(speed * GB))
    assert comm.num_channels == channels


def test_channels_through_the_switch_are_those_that_nccl_logs():
    comm = seen("1x8xh100-sxm", 8)
    assert comm.switch.count == 8
    assert (comm.switch.intra_bytes_per_s, comm.switch.inter_bytes_per_s) == (40 * GB, 60 * GB)
    assert (comm.tree.count, comm.tree.intra_bytes_per_s) == (12, 30 * GB)


def test_eight_network_cards_give_sixteen_channels():
    comm = seen("8x8xh100-sxm", 64)
    assert (comm.ring.count, comm.num_channels, comm.num_nodes) == (8, 16, 8)
    # A card of 400 Gb/s carries 48 GB/s. Each of 8 rings leaves the node at another device, so that
    # a device's NVLinks carry 7 of them (the bandwidths that NCCL 2.27.5 logged are those of 8 x 48).
    assert comm.ring.inter_bytes_per_s == 48 * GB


@pytest.mark.parametrize(
    "cluster", ["1x8xh100-sxm", "4x8xh100-sxm", "2x8xa100-sxm-80gb", "1x4xl40s", "8x1xh100-sxm"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_channels_fit_the_links(cluster, ranks):
    comm = seen(cluster, ranks)
    device = load_cluster(cluster).devices[0]
    if comm.ranks_per_node > 1:
        links = max(
            nvlink_bytes_per_s(device.link_bytes_per_s or 0.0, comm.capability),
            pcie_bytes_per_s(device.pcie_bytes_per_s),
        )
        inside = comm.ring.count * (1.0 - (comm.num_nodes > 1) / comm.ranks_per_node)
        assert inside * comm.ring.intra_bytes_per_s <= links * (1 + 1e-9)
    assert comm.tree.count == comm.ring.count >= 1


def test_a_bridge_between_pairs_does_not_join_a_host():
    assert not seen("1x4xh100-pcie", 4).nvlink


def test_speeds_fall():
    for capability in (70, 80, 90, 100):
        for over in (False, True):
            speeds = channel_speeds(capability, over_network=over)
            assert list(speeds) == sorted(speeds, reverse=True)


def test_nccl_needs_devices_of_nvidia():
    cluster = load_cluster("1x8xmi300x")
    assert not has_nccl(cluster, 8)
    with pytest.raises(SpecError, match="does not run on mi300x"):
        communicator_of(cluster, 8)
