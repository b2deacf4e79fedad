"""Closed forms against hand-computed values and published bandwidths."""

from itertools import product

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.fabrics import link_constants
from foreshard.comm.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    reduce_scatter_s,
    send_s,
    token_exchange_s,
)
from foreshard.comm.fabric import Fabric, fabric_between, fabric_from
from foreshard.predict.run_setup import stacked

GB = 1e9
COLLECTIVES = (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s, broadcast_s)


def fabric(row="hopper-nvlink", rate=450 * GB, nic=400 * GB, domain=8, *, ideal=False, switch=True) -> Fabric:
    return fabric_from(
        link_constants(row),
        intra_bytes_per_s=rate,
        domain=domain,
        per_node=8,
        nic_bytes_per_s=nic,
        nic_latency_s=5e-6,
        in_network=switch,
        ideal=ideal,
    )


def bus_gb_per_s(time_s, num_bytes, ranks, passes) -> float:
    return float(passes * (ranks - 1) / ranks * num_bytes / time_s / GB)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_to_move_takes_no_time(collective):
    assert collective(1e6, 1, 1, fabric()) == 0.0
    assert collective(1e6, 0, 1, fabric()) == 0.0
    assert collective(0.0, 8, 1, fabric()) == 0.0
    assert send_s(0.0, True, fabric()) == 0.0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_rows_equal_scalars_and_are_float64(collective):
    sizes, ranks, strides = np.array([1e3, 1e6, 1e9]), np.array([2, 8, 64]), np.array([1, 1, 8])
    rows = collective(sizes, ranks, strides, stacked([fabric()] * 3, Fabric))
    assert rows.dtype == np.float64
    singles = [float(collective(*args, fabric())) for args in zip(sizes, ranks, strides, strict=True)]
    assert rows.tolist() == pytest.approx(singles, rel=1e-12)


def test_ideal_ring_is_the_textbook_time():
    f = fabric(ideal=True, switch=False)
    wire_s = 2 * 7 / 8 * 1e9 / 450e9
    assert all_reduce_s(1e9, 8, 1, f) == pytest.approx(f.launch_s + 14 * f.hop_s + wire_s)
    assert all_gather_s(1e9, 8, 1, f) == pytest.approx(f.launch_s + 7 * f.hop_s + wire_s / 2)


def test_ideal_groups_side_by_side_share_the_nic():
    f = fabric(ideal=True, switch=False)
    spread = all_gather_s(1e9, 4, 8, f)  # one rank per node: an eighth of the NIC
    packed = all_gather_s(1e9, 32, 1, f)  # eight ranks per node: all of it
    assert spread == pytest.approx(0.75 * 1e9 / 50e9, rel=0.01)
    assert packed == pytest.approx(31 / 32 * 1e9 / 400e9, rel=0.03)


@pytest.mark.parametrize(
    ("row", "rate", "busbw"),
    [
        ("ampere-nvlink", 300 * GB, (222, 235)),
        ("hopper-nvlink", 450 * GB, (445, 485)),
        ("blackwell-nvlink", 900 * GB, (704, 846)),
    ],
)
def test_eight_gpu_all_reduce_reaches_the_measured_bus_bandwidth(row, rate, busbw):
    f = fabric(row, rate, switch=row != "ampere-nvlink")
    assert (
        busbw[0] * 0.97 <= bus_gb_per_s(all_reduce_s(8 * 2**30, 8, 1, f), 8 * 2**30, 8, 2) <= busbw[1] * 1.03
    )


def test_large_all_gather_over_nodes_fills_the_nics():
    busbw = bus_gb_per_s(all_gather_s(8 * 2**30, 64, 1, fabric()), 8 * 2**30, 64, 1)
    assert 330 <= busbw <= 390


def test_two_node_all_reduce_is_bound_by_nvlink_not_nic():
    # Known from 2-node H100: bus bandwidth above the NIC's 400 GB/s, since each byte crosses once.
    busbw = bus_gb_per_s(all_reduce_s(8 * 2**30, 16, 1, fabric()), 8 * 2**30, 16, 2)
    assert 400 < busbw < 520


def test_nvl72_domain_keeps_a_large_group_off_the_network():
    inside = all_reduce_s(1e9, 64, 1, fabric("blackwell-nvlink", 900 * GB, domain=72))
    across = all_reduce_s(1e9, 64, 1, fabric("blackwell-nvlink", 900 * GB, domain=8))
    assert inside < 0.7 * across


def test_mesh_gives_a_pair_one_link_of_seven():
    f = fabric("mesh", 448 * GB, switch=False)
    pair = bus_gb_per_s(all_reduce_s(8e9, 2, 1, f), 8e9, 2, 2)
    box = bus_gb_per_s(all_reduce_s(8e9, 8, 1, f), 8e9, 8, 2)
    assert box / pair == pytest.approx(7.0, rel=0.3)


@pytest.mark.parametrize("device", ["mi300x", "mi250x", "gaudi2", "h100-sxm", "a100-pcie-80gb"])
def test_a_send_has_the_links_of_an_exchange_of_two(device):
    links = fabric_between(load_cluster(f"1x8x{device}"), (0, 1))
    exchanged = float(all_to_all_s(2 * GB, 2, 1, links))
    # The exchange also copies what a rank keeps.
    assert 1.0 <= exchanged / float(send_s(GB, False, links)) <= 1.6


def test_send_over_the_nic_uses_the_sender_share():
    f = fabric(ideal=True)
    assert send_s(1e9, False, f) == pytest.approx(1e9 / 450e9, rel=0.01)
    assert send_s(1e9, True, f) == pytest.approx(1e9 / 50e9, rel=0.01)


@pytest.mark.parametrize("ranks", [4, 8, 32])
def test_tokens_for_one_expert_are_an_all_to_all(ranks):
    sent = all_to_all_s(1e9, ranks, 1, fabric())
    assert token_exchange_s(1e9, 1, ranks, 1, fabric()) == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize(("ranks", "domain", "top_k"), [(4, 8, 3), (4, 2, 3), (6, 2, 4), (6, 3, 2)])
def test_tokens_go_once_to_a_rank_and_once_to_a_domain(ranks, domain, top_k):
    """Counted over every choice of experts, of a token of rank 0 and of all tokens that a rank forwards."""
    f = fabric(ideal=True, domain=domain)
    over_links, over_nic = 0.0, 0.0
    for chosen in product(range(ranks), repeat=top_k):
        domains = {rank // domain for rank in chosen}
        over_nic += len(domains - {0})
        # Over the NIC a token reaches the rank of that domain with the same place: it needs no link.
        over_links += sum(rank % domain != 0 for rank in set(chosen))
    over_links, over_nic = over_links / ranks**top_k, over_nic / ranks**top_k
    expected = max(over_links * 1e9 / 450e9, over_nic * 1e9 / 50e9)
    assert token_exchange_s(1e9, top_k, ranks, 1, f) == pytest.approx(expected, rel=0.02)


def test_tokens_sent_once_never_take_longer_than_copies_for_every_expert():
    for ranks, top_k in product((2, 8, 32, 64), (1, 2, 6, 22)):
        copies = all_to_all_s(top_k * 1e8, ranks, 1, fabric())
        assert token_exchange_s(1e8, top_k, ranks, 1, fabric()) <= copies * (1 + 1e-12)
    few, all_of_them = (token_exchange_s(1e8, 8, 64, 1, fabric(), reached=part) for part in (0.5, 1.0))
    assert few < all_of_them


def test_all_to_all_across_nodes_waits_for_the_nic():
    f = fabric(ideal=True)
    assert all_to_all_s(1e9, 32, 1, f) == pytest.approx(24 / 32 * 1e9 / 50e9, rel=0.01)
