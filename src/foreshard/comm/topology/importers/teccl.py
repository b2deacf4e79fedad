"""Topologies of the synthesizers TE-CCL and TACCL, as JSON.

Three kinds of file are read:

- a matrix, with the attributes of TE-CCL's ``Topology`` (teccl/topologies/topology.py): ``capacity`` in GB/s,
  ``alpha`` in seconds, ``switch_indices``;
- TE-CCL's input (teccl/input_data.py): ``TopologyParams`` with the ``name`` DGX1, NDv2 or DGX2 and
  ``chassis``;
- TACCL's profile of a machine (taccl/examples/topo): ``gpus_per_node``, ``nics_per_node``, inverse bandwidths
  in us per MB (10**6 bytes) and latencies in us. It does not say which devices are joined: the ``name`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from foreshard.comm.topology import fabrics
from foreshard.comm.topology.draft import Draft
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.importers.connected import connected
from foreshard.comm.topology.machines import CUBE_MESH, lanes_of, machine, meshed, switched
from foreshard.errors import SpecError, unknown
from foreshard.spec import codec

_MAX_VERTICES = 1024


def teccl_topology(text: str, *, file: str | None = None, num_nodes: int = 2) -> Topology:
    """Return the topology of a TE-CCL or TACCL file; a TACCL profile is of so many nodes on one switch.

    Raises
    ------
    SpecError
        For none of the three kinds, or values out of range.
    """
    data = codec.parse_json(text, file=file)
    readers: dict[str, Callable[..., Topology]] = {
        "capacity": _of_matrix,
        "TopologyParams": _of_name,
        "gpus_per_node": partial(_of_profile, num_nodes=num_nodes),
    }
    for key, reader in readers.items():
        if isinstance(data, dict) and key in data:
            return connected(reader(data, file), file=file)
    rule = "The file has 'capacity', 'TopologyParams' or 'gpus_per_node'"
    raise SpecError("no topology of TE-CCL or TACCL", file=file, rule=rule)


def _of_matrix(data: Mapping[str, Any], file: str | None) -> Topology:
    """Return devices and switches joined where a matrix has a capacity."""
    capacity = _matrix(data, "capacity", file)
    size = len(capacity)
    alpha = _matrix(data, "alpha", file) if "alpha" in data else [[0.0] * size for _ in range(size)]
    if len(alpha) != size:
        raise SpecError(
            f"alpha has {len(alpha)} rows", file=file, key="alpha", rule=f"It has {size}, as capacity"
        )
    switches = data.get("switch_indices", [])
    if not isinstance(switches, list) or any(i not in range(size) for i in switches):
        rule = f"It lists vertices of 0 to {size - 1}"
        raise SpecError("not a list of vertices", file=file, key="switch_indices", value=switches, rule=rule)
    draft = Draft()
    for i in range(size):
        draft.vertex("switch" if i in switches else "device", f"{'switch' if i in switches else 'gpu'}{i}")
    for i, row in enumerate(capacity):
        for j, rate in enumerate(row):
            if rate:
                # TE-CCL writes -1 for the latency of no link.
                draft.send(i, j, rate * 1e9, max(0.0, alpha[i][j]))
    return draft.topology(str(data.get("name", "TE-CCL matrix")))


def _matrix(data: Mapping[str, Any], key: str, file: str | None) -> list[list[float]]:
    rows = data[key]
    rule = f"It is a square matrix of numbers, with 1 to {_MAX_VERTICES:,} rows"
    square = isinstance(rows, list) and 0 < len(rows) <= _MAX_VERTICES
    if not square or any(not isinstance(row, list) or len(row) != len(rows) for row in rows):
        raise SpecError(f"{key} is no such matrix", file=file, key=key, rule=rule)
    lowest = -1.0 if key == "alpha" else 0.0
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value < 1e9:
                place = f"{key}[{i}][{j}]"
                raise SpecError(f"{value!r:.40}", file=file, key=place, value=value, rule="It is at least 0")
    return rows


def _of_name(data: Mapping[str, Any], file: str | None) -> Topology:
    """Return the topology that TE-CCL builds for a name and a number of chassis."""
    params = data["TopologyParams"] if isinstance(data["TopologyParams"], dict) else {}
    name, chassis = str(params.get("name", "")), params.get("chassis", 1)
    if not isinstance(chassis, int) or not 1 <= chassis <= 512:
        rule = "It is a whole number of 1 to 512"
        raise SpecError(f"chassis {chassis!r:.40}", file=file, key="chassis", value=chassis, rule=rule)
    if name.lower() == "ndv2":
        return teccl_ndv2(chassis)
    if name.lower() == "dgx2":
        return teccl_dgx2()
    if name.lower() == "dgx1":
        return fabrics.one_machine(machine("dgx-1"), name="TE-CCL DGX1")
    raise unknown("topology", name, ("DGX1", "NDv2", "DGX2"), key="TopologyParams.name", file=file)


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


def _of_profile(data: Mapping[str, Any], file: str | None, num_nodes: int) -> Topology:
    """Return machines with the rates of a TACCL profile, on one switch."""
    name = str(data.get("name", ""))
    num_devices, num_nics = (_count(data, key, file) for key in ("gpus_per_node", "nics_per_node"))
    lanes = data.get("node_invbws_list")
    if not isinstance(lanes, list) or not lanes:
        raise SpecError("no bandwidths", file=file, key="node_invbws_list", rule="It has at least one entry")
    key = "node_invbws_list"
    rates = [1e12 / _positive({key: inverse}, key, file) for inverse in lanes]
    nic = 1e12 / _positive(data, "remote_invbw", file)
    latency, remote = (_positive(data, key, file) * 1e-6 for key in ("alpha", "remote_alpha"))
    if name.lower().startswith("ndv2") and num_devices == len(CUBE_MESH):
        # The profile has the rates of one lane and of two.
        build = meshed(
            lanes_of(CUBE_MESH),
            min(rates),
            num_nics=num_nics,
            nic_bytes_per_s=nic,
            hop_s=latency,
            nic_s=remote / 2,
        )
    elif name.lower().startswith("dgx2"):
        build = switched(
            num_devices,
            max(rates),
            num_nics=num_nics,
            nic_bytes_per_s=nic,
            hop_s=latency / 2,
            nic_s=remote / 2,
        )
    else:
        raise unknown("machine", name, ("NDv2", "DGX2"), key="name", file=file, rule="Machines are")
    return fabrics.flat([build] * num_nodes, name=name)


def _count(data: Mapping[str, Any], key: str, file: str | None) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
        raise SpecError(f"{key} {value!r:.40}", file=file, key=key, value=value, rule="It is 1 to 1024")
    return value


def _positive(data: Mapping[str, Any], key: str, file: str | None) -> float:
    value = data.get(key)
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0.0 < number < 1e12:
        rule = "It is a number above 0"
        raise SpecError(f"{key} {value!r:.40}", file=file, key=key, value=value, rule=rule)
    return number
