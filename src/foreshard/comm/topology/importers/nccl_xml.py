"""NCCL's topology of a machine, as ``NCCL_TOPO_DUMP_FILE`` writes it and ``NCCL_TOPO_FILE`` reads it.

Rates are NCCL's own, of src/graph/topo.h and topo.cc (069a3d4): what it counts for a link, a little below
the datasheet. In a file that NCCL has yet to fill in, PCI devices of the classes GPU and network stand for
devices and NICs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foreshard.comm.topology import fabrics
from foreshard.comm.topology.draft import Draft, Port
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.importers.connected import connected
from foreshard.comm.topology.machines import NIC_S, NVLINK_S, PCIE_S
from foreshard.errors import SpecError

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_MAX_DEPTH = 32
_MAX_ELEMENTS = 100_000
_MAX_CPUS = 256  # every pair is joined
# By compute capability, from this one on: bytes/s of one NVLink (SM60_NVLINK_BW and those after it).
_NVLINK = ((100, 40.1e9), (90, 20.6e9), (87, 20e9), (86, 12e9), (80, 20e9), (70, 20e9), (0, 18e9))
# Hundreds of Mb/s of one PCIe lane by "link_speed", whatever follows "GT/s"; 60 where it is not known.
_PCIE_LANE = {"2.5": 15, "5": 30, "5.0": 30, "8": 60, "8.0": 60, "16": 120, "16.0": 120}
_PCIE_LANE |= {"32": 240, "32.0": 240, "64": 480, "64.0": 480}
_LOCAL = 5000e9  # LOC_BW: parts of one chip
_NET_MBPS = 10_000  # of a NIC that does not tell its speed
# Between CPUs: (model number from this one on, bytes/s); the rates are of topo.h, the numbers are recalled.
# Intel by "modelid": Broadwell, Skylake, Sapphire Rapids, Granite Rapids; AMD by "familyid": Zen 1, 3 and 5.
_INTEL = ((173, 40e9), (143, 22e9), (85, 10e9), (0, 6e9))
_AMD = ((191, 32e9), (175, 24e9), (0, 16e9))
_SOCKET = {"ppc64": 32e9, "arm64": 6e9}


def nccl_topology(text: str, *, file: str | None = None, num_nodes: int = 1) -> Topology:
    """Return the topology of so many equal machines that NCCL described, their NICs on one switch if several.

    Ranks are in the order of the file's ``rank``, else ``dev``, else of its lines. Every NVSwitch is one.

    Raises
    ------
    SpecError
        If the text is no such XML, has a document type or entities, or a link leads nowhere.
    """
    system = _parsed(text, file)

    def build(draft: Draft, node: int) -> tuple[Port, ...]:
        return _Machine(draft, node, file).add(system)

    one = fabrics.one_machine(build, name=file or "NCCL topology")
    connected(one, file=file)
    if num_nodes == 1:
        return one
    return connected(fabrics.flat([build] * num_nodes, name=file or "NCCL topology"), file=file)


def _parsed(text: str, file: str | None) -> Element:
    """Return the root element, after refusing what could make the parser work without bound."""
    from xml.etree.ElementTree import ParseError, fromstring

    lower = text.lower()
    for word in ("<!doctype", "<!entity"):
        if word in lower:
            rule = "A topology has no document type and no entities"
            raise SpecError(f"the file has '{word[2:].upper()}'", file=file, rule=rule, fix="Remove it")
    try:
        root = fromstring(text)
    except ParseError as error:
        what = f"not valid XML: {error}"
        rule = "The file is what NCCL_TOPO_DUMP_FILE writes"
        raise SpecError(what, file=file, rule=rule, fix="Dump it again") from error
    if root.tag != "system":
        rule = "The outermost element is <system>"
        raise SpecError(f"<{root.tag:.40}>", file=file, key="system", value=root.tag[:40], rule=rule)
    if sum(1 for _ in root.iter()) > _MAX_ELEMENTS:
        raise SpecError("too many elements", file=file, rule=f"At most {_MAX_ELEMENTS:,}")
    return root


@dataclass(slots=True)
class _Machine:
    """One machine that is added to a draft."""

    draft: Draft
    node: int
    file: str | None
    at: dict[int, int] = field(default_factory=dict)  # vertex of a device, by its element's id
    by_bus: dict[str, int] = field(default_factory=dict)  # vertex of a device, by its PCI address
    cpus: list[int] = field(default_factory=list)
    cpu_of: dict[int, int] = field(default_factory=dict)  # nearest CPU of a device
    ports: list[Port] = field(default_factory=list)
    num_switches: int = 0

    def add(self, system: Element) -> tuple[Port, ...]:
        """Add devices in the order of ranks, then the tree below each CPU, then NVLink."""
        found = list(_devices(system))
        for i, (device, bus) in enumerate(sorted(found, key=lambda pair: _place(pair[0], found))):
            vertex = self.draft.vertex("device", f"node{self.node}.gpu{i}", node=self.node)
            self.at[id(device)] = vertex
            self.by_bus.setdefault(bus, vertex)
        cpus = system.findall("cpu")
        if len(cpus) > _MAX_CPUS:
            raise SpecError(f"{len(cpus):,} CPUs", file=self.file, key="cpu", rule=f"At most {_MAX_CPUS}")
        for i, cpu in enumerate(cpus):
            self.cpus.append(self.draft.vertex("cpu", f"node{self.node}.cpu{i}", node=self.node))
            for child in cpu:
                self._below(child, self.cpus[-1], None, depth=0)
        for i, cpu_vertex in enumerate(self.cpus):
            for j in range(i):
                self.draft.join(self.cpus[j], cpu_vertex, _between_cpus(cpus[i]), PCIE_S)
        self._nvlinks(found)
        return tuple(self.ports)

    def _below(self, element: Element, parent: int, pci: Element | None, depth: int) -> None:
        """Add an element of the PCI tree and what is below it."""
        if depth > _MAX_DEPTH:
            rule = f"PCI devices are nested at most {_MAX_DEPTH} deep"
            raise SpecError("nested too deeply", file=self.file, key="pci", rule=rule)
        rate = _LOCAL if pci is None else self._pcie(pci)
        if id(element) in self.at:
            self._device(element, parent, self._pcie(element) if element.tag == "pci" else rate)
        elif element.tag == "nic":
            self._nic(element, parent, rate)
        elif element.tag == "pci":
            self._pci(element, parent, depth)

    def _pci(self, element: Element, parent: int, depth: int) -> None:
        """Add what a PCI device holds; one that holds other PCI devices is a switch."""
        inner = [child for child in element if child.tag == "pci"]
        for child in element:
            if child.tag in ("gpu", "nic"):
                self._below(child, parent, element, depth + 1)
        if not len(element) and element.get("class", "").startswith("0x02"):
            rate = self._pcie(element)
            self._add_nic(parent, rate, [rate])
        if inner:
            switch = self.draft.switch(f"node{self.node}.pcie{self.num_switches}", node=self.node)
            self.num_switches += 1
            self.draft.join(parent, switch, self._pcie(element), PCIE_S)
            for child in inner:
                self._below(child, switch, None, depth + 1)

    def _device(self, element: Element, parent: int, rate: float) -> None:
        vertex = self.at[id(element)]
        self.draft.join(vertex, parent, rate, PCIE_S)
        self.cpu_of[vertex] = self.cpus[-1]
        for chip in element.findall("c2c"):
            # MB/s of one link, and how many.
            total = self._count(chip, "bw") * 1e6 * self._count(chip, "count")
            self.draft.join(vertex, self.cpus[-1], total, NVLINK_S)

    def _nic(self, element: Element, parent: int, rate: float) -> None:
        """Add a NIC; each network port of it takes a cable of its own."""
        nets = element.findall("net")
        if not nets:
            return
        speeds = [self._number(net, "speed", _NET_MBPS) or _NET_MBPS for net in nets]
        self._add_nic(parent, rate, [mbps * 1e6 / 8 for mbps in speeds])

    def _add_nic(self, parent: int, rate: float, speeds: list[float]) -> None:
        name = f"node{self.node}.nic{len({port.vertex for port in self.ports})}"
        nic = self.draft.vertex("nic", name, node=self.node)
        self.draft.join(nic, parent, rate, PCIE_S)
        self.ports += [Port(vertex=nic, bytes_per_s=speed, latency_s=NIC_S) for speed in speeds]

    def _nvlinks(self, found: list[tuple[Element, str]]) -> None:
        """Add the NVLinks of each device, those to one place as one link."""
        switch = None
        for device, _ in found:
            source, sm = self.at[id(device)], self._number(device, "sm", 0)
            rates: dict[int, float] = defaultdict(float)
            for link in device.findall("nvlink"):
                kind = link.get("tclass", "")
                if kind.startswith("0x068000"):
                    if switch is None:
                        switch = self.draft.switch(
                            f"node{self.node}.nvswitch", node=self.node, can_reduce=sm >= 90
                        )
                    target = switch
                elif kind.startswith("0x068001"):
                    target = self.cpu_of[source]
                else:
                    target = self._target(link)
                rates[target] += self._count(link, "count") * _nvlink_rate(sm)
            for target, rate in rates.items():
                if target in self.by_bus.values():
                    # The other device lists its own direction.
                    self.draft.send(source, target, rate, NVLINK_S)
                else:
                    self.draft.join(source, target, rate, NVLINK_S / 2)

    def _target(self, link: Element) -> int:
        bus = link.get("target", "").lower()
        if bus not in self.by_bus:
            rule = "An NVLink leads to a device of the file, or to a switch: class 0x068000"
            what = f"no device at '{bus:.40}'"
            raise SpecError(what, file=self.file, key="nvlink.target", value=bus[:40], rule=rule)
        return self.by_bus[bus]

    def _pcie(self, pci: Element) -> float:
        """Return the bytes/s of a PCI device: lanes * (100 Mb/s of a lane) / 8."""
        speed = pci.get("link_speed", "").split(" ")[0]
        lanes = self._number(pci, "link_width", 16) or 16
        return lanes * _PCIE_LANE.get(speed, 60) * 1e8 / 8

    def _count(self, element: Element, name: str) -> float:
        value = self._number(element, name, 0)
        if value <= 0:
            key, rule = f"{element.tag}.{name}", "It is above 0"
            raise SpecError(f"{name} {value:g}", file=self.file, key=key, value=value, rule=rule)
        return value

    def _number(self, element: Element, name: str, otherwise: float) -> float:
        text = element.get(name)
        try:
            value = otherwise if text is None else float(text)
        except ValueError:
            value = float("nan")
        if not 0 <= value < 1e12:
            key, rule = f"{element.tag}.{name}", "It is a number of at least 0"
            raise SpecError(f"{name} '{text:.40}'", file=self.file, key=key, value=text, rule=rule)
        return value


def _devices(system: Element) -> Iterator[tuple[Element, str]]:
    """Yield the devices of the file with their PCI addresses."""
    pcis = list(system.iter("pci"))
    found = [(gpu, pci.get("busid", "").lower()) for pci in pcis for gpu in pci.findall("gpu")]
    yield from found or (
        (pci, pci.get("busid", "").lower()) for pci in pcis if pci.get("class", "").startswith("0x03")
    )


def _place(device: Element, found: list[tuple[Element, str]]) -> int:
    """Return what orders a device among all: the first attribute that every device has."""
    for name in ("rank", "dev"):
        numbers = [_whole(other.get(name)) for other, _ in found]
        if None not in numbers and len(set(numbers)) == len(numbers):
            return _whole(device.get(name)) or 0
    return next(i for i, (other, _) in enumerate(found) if other is device)


def _whole(text: str | None) -> int | None:
    """Return the whole number that an attribute writes, None for none."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None


def _nvlink_rate(compute_capability: float) -> float:
    return next(rate for first, rate in _NVLINK if compute_capability >= first)


def _between_cpus(cpu: Element) -> float:
    arch, vendor = cpu.get("arch", ""), cpu.get("vendor", "")
    if arch in _SOCKET:
        return _SOCKET[arch]
    table, name = (_AMD, "familyid") if vendor == "AuthenticAMD" else (_INTEL, "modelid")
    model = _whole(cpu.get(name)) or 0
    return next(rate for first, rate in table if model >= first)
