"""Topologies as TE-CCL published them; rates are one direction."""

from __future__ import annotations

from foreshard.comm.topology.draft import Draft
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.machines import CUBE_MESH, lanes_of


def teccl_dgx2() -> Topology:
    """Return TE-CCL's two DGX-2.

    Source: microsoft/TE-CCL teccl/topologies/dgx2.py (8d954b3): 125 GB/s and 0.35 us between a device and the
    switch; every odd device sends to the even one before it in the other chassis, 12.5 GB/s and 2.6 us.
    """
    draft = Draft()
    for node in range(2):
        devices = [draft.vertex("device", f"node{node}.gpu{i}", node=node) for i in range(16)]
        switch = draft.switch(f"node{node}.nvswitch", node=node)
        for device in devices:
            draft.join(device, switch, 125e9, 0.35e-6)
    for node in range(2):
        for i in range(1, 16, 2):
            draft.send(17 * node + i, 17 * (1 - node) + i - 1, 12.5e9, 2.6e-6)
    return draft.topology("TE-CCL DGX-2 x2")


def teccl_ndv2(num_nodes: int) -> Topology:
    """Return TE-CCL's NDv2.

    Source: microsoft/TE-CCL teccl/topologies/ndv2.py (8d954b3), whose matrices are transposed before use:
    lanes of 25 GB/s and 0.7 us; device 0 sends at 12.5 GB/s and 1.3 us to device 1 of the other chassis, and
    with more than two chassis into a switch from which the device 1 of each receives.
    """
    draft = Draft()
    for node in range(num_nodes):
        devices = [draft.vertex("device", f"node{node}.gpu{i}", node=node) for i in range(8)]
        for one, other, lanes in lanes_of(CUBE_MESH):
            draft.join(devices[one], devices[other], lanes * 25e9, 0.7e-6)
    if num_nodes == 2:
        draft.send(0, 8 + 1, 12.5e9, 1.3e-6)
        draft.send(8, 1, 12.5e9, 1.3e-6)
    elif num_nodes > 2:
        switch = draft.switch("ib")
        for node in range(num_nodes):
            draft.send(8 * node, switch, 12.5e9, 1.3e-6)
            draft.send(switch, 8 * node + 1, 12.5e9, 1.3e-6)
    return draft.topology(f"TE-CCL NDv2 x{num_nodes}")
