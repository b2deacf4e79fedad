"""Topologies as papers and tools published them, to be measured against the values they state.

Rates are one direction and latencies 0 where the source has none. `PUBLISHED` gives for each the best
all-gather bandwidth (output bytes over time) that its cuts allow: the least of N * B(S) / |S| over sets S
that leave a rank out, with N ranks, |S| of them in S, and B(S) what leaves S (ForestColl README; arXiv
2402.06787).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from foreshard.comm.topology.draft import Draft
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.importers.teccl import teccl_dgx2, teccl_ndv2
from foreshard.comm.topology.machines import MI250_LINKS


class Published(NamedTuple):
    """A topology and the best all-gather bandwidth on it."""

    build: Callable[[], Topology]
    all_gather_bytes_per_s: float


def forestcoll_a100(num_nodes: int, latency_s: float = 0.0) -> Topology:
    """Return ForestColl's nodes of eight A100.

    Source: liangyuRain/ForestColl topologies.py (fc693e2): 300 GB/s from each device to the NVSwitch; with
    several nodes, 25 GB/s from device b to its NIC and on to one of two InfiniBand switches, b modulo 2.
    """
    draft = Draft()
    for node in range(num_nodes):
        devices = [draft.vertex("device", f"node{node}.gpu{i}", node=node) for i in range(8)]
        switch = draft.switch(f"node{node}.nvswitch", node=node)
        for device in devices:
            draft.join(device, switch, 300e9, latency_s)
    if num_nodes > 1:
        fabric = [draft.switch(f"ib{i}") for i in range(2)]
        for node in range(num_nodes):
            for i in range(8):
                nic = draft.vertex("nic", f"node{node}.mlx5_{i}", node=node)
                draft.join(9 * node + i, nic, 25e9, latency_s)  # a node is eight devices and their switch
                draft.join(nic, fabric[i % 2], 25e9, latency_s)
    return draft.topology(f"ForestColl A100 x{num_nodes}")


def forestcoll_mi250(num_nodes: int) -> Topology:
    """Return ForestColl's nodes of sixteen MI250 dies.

    Source: liangyuRain/ForestColl topologies.py (fc693e2): links of 50 GB/s; with several nodes, 16 GB/s from
    each die to one InfiniBand switch.
    """
    draft = Draft()
    for node in range(num_nodes):
        dies = [draft.vertex("device", f"node{node}.gcd{i}", node=node) for i in range(16)]
        for one, other, links in MI250_LINKS:
            draft.join(dies[one], dies[other], links * 50e9)
    if num_nodes > 1:
        fabric = draft.switch("ib")
        for die in range(16 * num_nodes):
            draft.join(die, fabric, 16e9)
    return draft.topology(f"ForestColl MI250 x{num_nodes}")


PUBLISHED: Mapping[str, Published] = {
    # One device is left out: it receives 300 GB/s, and 25 GB/s more from another node. 8 * 300 / 7.
    "forestcoll-a100-x1": Published(lambda: forestcoll_a100(1), 2400e9 / 7),
    "forestcoll-a100-x2": Published(lambda: forestcoll_a100(2), 16 * 325e9 / 15),
    # A node is left out: it receives 200 GB/s. 32 * 200 / 24.
    "forestcoll-a100-x4": Published(lambda: forestcoll_a100(4), 6400e9 / 24),
    "forestcoll-a100-x8": Published(lambda: forestcoll_a100(8), 12800e9 / 56),
    # Dies 0 and 1 are left out: they receive 300 GB/s, and 32 GB/s more from another node.
    "forestcoll-mi250-x1": Published(lambda: forestcoll_mi250(1), 4800e9 / 14),
    "forestcoll-mi250-x2": Published(lambda: forestcoll_mi250(2), 32 * 332e9 / 30),
    # An odd device is left out: it receives 125 GB/s. TE-CCL's output for 1 GB reaches 129.032 GB/s.
    "teccl-dgx2-x2": Published(teccl_dgx2, 32 * 125e9 / 31),
    # A chassis is left out: it receives 12.5 GB/s.
    "teccl-ndv2-x2": Published(lambda: teccl_ndv2(2), 16 * 12.5e9 / 8),
    "teccl-ndv2-x4": Published(lambda: teccl_ndv2(4), 32 * 12.5e9 / 24),
}
"""By name; ForestColl computes the same values for its five."""
