"""Single machines: devices, what joins them inside the machine, and the ports that join the fabric.

A `Machine` adds one machine to a draft and returns its ports in order; ``fabrics.py`` plugs them in. Rates
are those of datasheets, one direction. Values that a repository is named for were read there;
those of data sheets and white papers are recalled (their device rates agree with the catalog).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from foreshard.comm.topology.draft import Draft, Port
from foreshard.errors import unknown

Machine = Callable[[Draft, int], tuple[Port, ...]]
"""Adds the machine as node of a number to the draft; returns its ports."""

# One device to another over NVLink: TE-CCL teccl/topologies/ndv2.py, 0.7 us; over NVSwitch its dgx2.py has
# half of that on each of the two hops.
NVLINK_S = 0.7e-6
# Into the fabric and out of it again: TE-CCL ndv2.py, 1.3 us for each of the two hops, and TACCL
# taccl/examples/topo/topo-ndv2-1MB.json, "remote_alpha" 2.6 us for both.
NIC_S = 1.3e-6
# One PCIe hop; assumed, so that devices on one PCIe switch are 1 us apart and NVLink is the shorter way.
PCIE_S = 0.5e-6
# x16 slots after encoding: PCI-SIG, 8, 16 and 32 GT/s per lane at 128b/130b.
PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9
# Between sockets: NCCL src/graph/topo.h, SKL_QPI_BW 10 and SRP_QPI_BW 22 GB/s.
_SOCKETS_3, _SOCKETS_5 = 10e9, 22e9

# Lanes between the V100 of a DGX-1, hybrid cube mesh (read in TE-CCL teccl/topologies/dgx1.py; NVIDIA's
# DGX-1 white paper draws it).
CUBE_MESH = (
    (0, 2, 1, 1, 2, 0, 0, 0),
    (2, 0, 1, 2, 0, 1, 0, 0),
    (1, 1, 0, 2, 0, 0, 2, 0),
    (1, 2, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 2, 1, 1),
    (0, 1, 0, 0, 2, 0, 1, 2),
    (0, 0, 2, 0, 1, 1, 0, 2),
    (0, 0, 0, 1, 1, 2, 2, 0),
)
# Links from each to higher-numbered graphics compute dies of an MI250 node, as (die, die, links); the matrix
# in ForestColl topologies.py. Each link 50 GB/s (AMD CDNA 2 white paper: 100 GB/s both directions).
MI250_LINKS = (
    *((0, 1, 4), (0, 4, 2), (0, 8, 1), (1, 5, 1), (1, 9, 1), (1, 10, 1), (2, 3, 4), (2, 6, 1)),
    *((2, 9, 1), (2, 10, 1), (3, 7, 2), (3, 11, 1), (4, 5, 4), (4, 6, 1), (5, 6, 1), (5, 7, 1)),
    *((6, 7, 4), (8, 9, 4), (8, 12, 2), (9, 13, 1), (10, 11, 4), (10, 14, 1), (11, 15, 2)),
    *((12, 13, 4), (12, 14, 1), (13, 14, 1), (13, 15, 1), (14, 15, 4)),
)


def switched(
    num_devices: int,
    bytes_per_s: float,
    *,
    num_nics: int,
    nic_bytes_per_s: float,
    can_reduce: bool = False,
    hop_s: float = NVLINK_S / 2,
    nic_s: float = NIC_S,
) -> Machine:
    """Return a machine whose devices meet at one switch; neighbouring devices share a NIC."""

    def build(draft: Draft, node: int) -> tuple[Port, ...]:
        devices = _devices(draft, node, num_devices)
        switch = draft.switch(f"node{node}.nvswitch", node=node, can_reduce=can_reduce)
        for device in devices:
            draft.join(device, switch, bytes_per_s, hop_s)
        return nics(draft, node, devices, num_nics, nic_bytes_per_s, nic_s)

    return build


def meshed(
    lanes: Sequence[tuple[int, int, float]],
    lane_bytes_per_s: float,
    *,
    num_nics: int,
    nic_bytes_per_s: float,
    hop_s: float = NVLINK_S,
    nic_s: float = NIC_S,
) -> Machine:
    """Return a machine whose devices are joined directly, by lanes given as (device, device, lanes)."""

    def build(draft: Draft, node: int) -> tuple[Port, ...]:
        devices = _devices(draft, node, 1 + max(max(one, other) for one, other, _ in lanes))
        for one, other, number in lanes:
            draft.join(devices[one], devices[other], number * lane_bytes_per_s, hop_s)
        return nics(draft, node, devices, num_nics, nic_bytes_per_s, nic_s)

    return build


def pcie_box() -> Machine:
    """Return a machine without device links: two CPUs, two PCIe 4 switches below each, eight devices.

    Devices, and two NICs of 200 Gb/s, are spread over the switches in order.
    """

    def build(draft: Draft, node: int) -> tuple[Port, ...]:
        devices = _devices(draft, node, 8)
        switches = _pcie_tree(draft, node, PCIE_4, _SOCKETS_5)
        for i, device in enumerate(devices):
            draft.join(device, switches[i // 2], PCIE_4, PCIE_S)
        return _pcie_nics(draft, node, switches[::2], PCIE_4, 25e9)

    return build


def cube_mesh(*, nic_switches: Sequence[int] = (0, 1, 2, 3)) -> Machine:
    """Return a DGX-1 or NDv2: eight V100 in a hybrid cube mesh, and PCIe to the NICs.

    A lane is 25 GB/s by datasheet (NVLink 2); NCCL counts 20.0 (topo.h, SM70_NVLINK_BW) and TACCL measured
    21.7 (46 us per MB in topo-ndv2-1MB.json). Two devices share a PCIe switch; `nic_switches` have a NIC.
    """

    def build(draft: Draft, node: int) -> tuple[Port, ...]:
        devices = _devices(draft, node, 8)
        for one, other, lanes in lanes_of(CUBE_MESH):
            draft.join(devices[one], devices[other], lanes * 25e9, NVLINK_S)
        switches = _pcie_tree(draft, node, PCIE_3, _SOCKETS_3)
        for i, device in enumerate(devices):
            draft.join(device, switches[i // 2], PCIE_3, PCIE_S)
        return _pcie_nics(draft, node, [switches[i] for i in nic_switches], PCIE_3, 12.5e9)

    return build


def lanes_of(matrix: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return the pairs that a symmetric matrix of lanes joins, each once, as (device, device, lanes)."""
    return [(i, j, row[j]) for i, row in enumerate(matrix) for j in range(i + 1, len(row)) if row[j]]


def full_lanes(num_devices: int) -> list[tuple[int, int, int]]:
    """Return one lane between every pair of devices."""
    return [(i, j, 1) for i in range(num_devices) for j in range(i + 1, num_devices)]


def nics(
    draft: Draft,
    node: int,
    devices: Sequence[int],
    num_nics: int,
    bytes_per_s: float,
    latency_s: float,
    *,
    slots: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> tuple[Port, ...]:
    """Add NICs and join each to its equal share of neighbouring devices at the NIC's rate.

    The latency is that from device to NIC and back: two devices of one NIC are no shorter way to each other.
    `slots` are the shared resources that bytes out of and into a device occupy on the way, where it has such.
    """
    ports = []
    for i, share in enumerate(_shares(devices, num_nics)):
        nic = draft.vertex("nic", f"node{node}.nic{i}", node=node)
        for device in share:
            out, into = ((slot,) for slot in slots[device]) if device in slots else ((), ())
            draft.send(device, nic, bytes_per_s, latency_s, shared=out)
            draft.send(nic, device, bytes_per_s, latency_s, shared=into)
        ports.append(Port(vertex=nic, bytes_per_s=bytes_per_s))
    return tuple(ports)


def _shares(devices: Sequence[int], num_nics: int) -> Iterator[Sequence[int]]:
    """Yield the devices next to each NIC; more NICs than devices give each device several."""
    for i in range(num_nics):
        first = i * len(devices) // num_nics
        yield devices[first : max(first + 1, (i + 1) * len(devices) // num_nics)]


def _devices(draft: Draft, node: int, num_devices: int) -> list[int]:
    return [draft.vertex("device", f"node{node}.gpu{i}", node=node) for i in range(num_devices)]


def _pcie_tree(draft: Draft, node: int, bytes_per_s: float, socket_bytes_per_s: float) -> list[int]:
    """Add two CPUs, joined, with two PCIe switches below each; return the switches."""
    cpus = [draft.vertex("cpu", f"node{node}.cpu{i}", node=node) for i in range(2)]
    draft.join(cpus[0], cpus[1], socket_bytes_per_s, PCIE_S)
    switches = []
    for i in range(4):
        switches.append(draft.switch(f"node{node}.pcie{i}", node=node))
        draft.join(switches[-1], cpus[i // 2], bytes_per_s, PCIE_S)
    return switches


def _pcie_nics(
    draft: Draft, node: int, switches: Sequence[int], pcie: float, bytes_per_s: float
) -> tuple[Port, ...]:
    """Add one NIC below each of the PCIe switches."""
    ports = []
    for i, switch in enumerate(switches):
        nic = draft.vertex("nic", f"node{node}.nic{i}", node=node)
        draft.join(nic, switch, pcie, PCIE_S)
        ports.append(Port(vertex=nic, bytes_per_s=bytes_per_s, latency_s=NIC_S))
    return tuple(ports)


MACHINES: Mapping[str, Machine] = {
    # NVIDIA DGX-1 with V100 data sheet: 4 x 100 Gb/s InfiniBand, one per PCIe switch.
    "dgx-1": cube_mesh(),
    # Azure NDv2: one 100 Gb/s NIC for eight V100, beside devices 0 and 1 (TACCL, arXiv 2111.04867).
    "ndv2": cube_mesh(nic_switches=(0,)),
    # NVIDIA DGX-2 data sheet: 16 V100 x 6 NVLink 2 at 25 GB/s on NVSwitch, 8 x 100 Gb/s.
    "dgx-2": switched(16, 150e9, num_nics=8, nic_bytes_per_s=12.5e9),
    # NVIDIA DGX A100 data sheet: 12 NVLink 3 at 25 GB/s, 8 x 200 Gb/s for compute.
    "hgx-a100": switched(8, 300e9, num_nics=8, nic_bytes_per_s=25e9),
    # NVIDIA DGX H100 data sheet: 18 NVLink 4 at 25 GB/s, NVSwitch 3 reduces (SHARP), 8 x 400 Gb/s.
    "hgx-h100": switched(8, 450e9, num_nics=8, nic_bytes_per_s=50e9, can_reduce=True),
    # NVIDIA DGX B200 data sheet: 18 NVLink 5 at 50 GB/s, 8 x 400 Gb/s.
    "hgx-b200": switched(8, 900e9, num_nics=8, nic_bytes_per_s=50e9, can_reduce=True),
    # NVIDIA GB200 NVL72: 72 devices on one NVLink 5 switch domain, a 400 Gb/s ConnectX-7 for each.
    "nvl72": switched(72, 900e9, num_nics=72, nic_bytes_per_s=50e9, can_reduce=True),
    # AMD Instinct MI300X platform data sheet: every pair of eight joined at 64 GB/s; 8 x 400 Gb/s as usual.
    "mi300x": meshed(full_lanes(8), 64e9, num_nics=8, nic_bytes_per_s=50e9),
    # AMD MI250: 16 dies; a 200 Gb/s NIC for each of the eight packages, of which ForestColl counts 16 GB/s
    # for each die.
    "mi250": meshed(MI250_LINKS, 50e9, num_nics=8, nic_bytes_per_s=25e9),
    # Two sockets, four PCIe 4 switches, eight devices, a 200 Gb/s NIC at each socket.
    "pcie-8": pcie_box(),
}
"""Machines by name."""


def machine(name: str) -> Machine:
    """Return a machine by its name.

    Raises
    ------
    SpecError
        If no machine has that name.
    """
    if name not in MACHINES:
        raise unknown("machine", name, MACHINES, key="machine")
    return MACHINES[name]
