"""Load a cluster from a catalog name, a shorthand or a TOML file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from foreshard import units
from foreshard.catalog.devices import device_assumption, resolve_device
from foreshard.catalog.instances import (
    DEFAULT_NIC_LATENCY_S,
    Default,
    Instance,
    default_nic,
    default_price,
    instance_price,
    instances,
)
from foreshard.errors import SpecError
from foreshard.spec import codec
from foreshard.spec.cluster import Cluster, Link, Network, NodeGroup
from foreshard.spec.codec import Range, Size, Unit
from foreshard.spec.device import Device

# Ten times the largest training run published (about 100,000 devices); more is a slip of the pen.
MAX_DEVICES = 2**20
# The standard TOML reader needs seconds per 10 MB; a cluster of MAX_DEVICES distinct nodes is no file.
MAX_TOML_BYTES = 4 * 2**20
_MAX_SHORTHAND_CHARS = 4096

# Chips that share one ICI network at most: a pod (Google Cloud TPU documentation, recalled).
_TPU_POD = {"tpu-v2": 256, "tpu-v3": 1024, "tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256}
_TPU_POD |= {"tpu-v7x": 9216}

Rate = Annotated[float, Unit("bytes_per_s"), Range(1.0, 1e15)]
Latency = Annotated[float, Unit("s"), Range(0.0, 60.0)]
Name = Annotated[str, Size(1, 200)]
Kind = Literal["flat", "fat-tree", "rail", "leaf-spine", "torus", "dragonfly", "graph"]
PeakName = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
Peak = Annotated[float, Unit("flops_per_s"), Range(1e6, 1e20)]
Bytes = Annotated[float, Unit("bytes"), Range(2.0**20, 1e16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesTable:
    """One ``[[nodes]]`` table of a cluster file."""

    count: Annotated[int, Range(1, MAX_DEVICES)]
    device: Name
    per_node: Annotated[int, Range(1, MAX_DEVICES)]
    nic: Rate | None = None
    nic_latency: Latency | None = None
    usd_per_h: Annotated[float, Range(0.0, 1e9)] | None = None
    rack: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTable:
    """The ``[network]`` table."""

    kind: Kind = "flat"
    oversubscription: Annotated[float, Range(1.0, 1e4)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """One ``[[links]]`` table."""

    between: tuple[Name, Name]
    bandwidth: Rate
    latency: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """One ``[[devices]]`` table: a device of one's own, whole or as changes to a `base`."""

    name: Name
    base: Name | None = None
    vendor: str | None = None
    arch: str | None = None
    form: str | None = None
    year: Annotated[int, Range(1900, 2200)] | None = None
    peak: Mapping[PeakName, Peak] | None = None
    memory: Bytes | None = None
    capacity: Bytes | None = None
    memory_bandwidth: Rate | None = None
    num_sms: Annotated[int, Range(0, 10**6)] | None = None
    clock: Annotated[float, Unit("hz"), Range(0.0, 1e12)] | None = None
    l2: Annotated[float, Unit("bytes"), Range(0.0, 1e13)] | None = None
    link: str | None = None
    link_bandwidth: Annotated[float, Unit("bytes_per_s"), Range(0.0, 1e15)] | None = None
    pcie: Annotated[float, Unit("bytes_per_s"), Range(0.0, 1e15)] | None = None
    tdp: Annotated[float, Unit("w"), Range(0.0, 1e6)] | None = None
    source: str | None = None
    notes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A cluster file; the schema with its documentation is catalog/schema/cluster.toml."""

    name: str | None = None
    nodes: Annotated[tuple[NodesTable, ...], Size(1)]
    network: NetworkTable = NetworkTable()  # noqa: RUF009 (frozen)
    links: tuple[LinkTable, ...] = ()
    devices: tuple[DeviceTable, ...] = ()


def load_cluster(text: str | Path) -> Cluster:
    """Return the cluster that a catalog name, a shorthand or a TOML file describes.

    Parameters
    ----------
    text : str or Path
        ``aws-p5.48xlarge``, ``4xaws-p5.48xlarge``; ``8x8xh100-sxm``,
        ``2x4xa100-sxm-40gb+2x4xv100-sxm-16gb@100Gb/s`` (nodes x devices per node x device, and the NIC rate
        of every node); or the path of a TOML file.

    Returns
    -------
    Cluster
        With every default taken from the catalog listed in `assumptions`.

    Raises
    ------
    SpecError
        With file, key, rule and fix, for anything else.

    Examples
    --------
    >>> load_cluster("8x8xh100-sxm").num_devices
    64
    """
    if isinstance(text, Path) or text.endswith(".toml") or os.path.exists(text):
        return _from_file(text)
    return _from_shorthand(text)


def nvlink_domain(device: Device, per_node: int) -> int:
    """Return how many consecutive devices at most share the fast device links."""
    if device.name.endswith("-nvl72"):
        return max(72, per_node)
    if device.name in _TPU_POD:
        return max(_TPU_POD[device.name], per_node)
    return per_node if device.link_bytes_per_s > 0 and device.form != "pcie" else 1


def _from_shorthand(text: str) -> Cluster:
    if len(text) > _MAX_SHORTHAND_CHARS:
        raise _bad_shorthand(text, "the cluster description is too long")
    terms, at, rate = text.strip().rpartition("@")
    if not at:
        terms, rate = rate, ""
    assumptions: list[str] = []
    nic = _shorthand_rate(text, rate) if at else None
    nodes = tuple(_term(text, term.strip(), nic, assumptions) for term in terms.split("+"))
    return _checked(Cluster(name=text.strip(), nodes=nodes, assumptions=tuple(dict.fromkeys(assumptions))))


def _shorthand_rate(text: str, rate: str) -> float:
    try:
        nic = units.parse(rate, "bytes_per_s")
    except SpecError as error:
        raise SpecError(error.what, key="cluster", value=error.value, rule=error.rule, fix=error.fix) from None
    if not 1.0 <= nic <= 1e15:
        raise _bad_shorthand(text, f"the NIC rate '{rate.strip()}' is out of range")
    return nic


def _term(text: str, term: str, nic: float | None, assumptions: list[str]) -> NodeGroup:
    """Build the nodes of one term, NODESxPER_NODExDEVICE or [NODESx]INSTANCE."""
    sized = re.fullmatch(r"([0-9]{1,7})x([0-9]{1,7})x(.+)", term)
    if sized:
        table = NodesTable(count=int(sized[1]), per_node=int(sized[2]), device=sized[3], nic=nic)
        if table.count < 1 or table.per_node < 1:
            raise _bad_shorthand(text, f"'{term}' has no devices")
        return _nodes(table, resolve_device(table.device), None, assumptions)
    counted = re.fullmatch(r"(?:([0-9]{1,7})x)?(.+)", term)
    instance = _instance(counted[2]) if counted else None
    count = int(counted[1] or 1) if counted else 0
    if instance is None or count < 1:
        raise _bad_shorthand(text, f"cannot read '{term[:80]}'")
    table = NodesTable(count=count, per_node=instance.per_node, device=instance.device, nic=nic)
    return _nodes(table, resolve_device(instance.device), instance, assumptions)


def _instance(name: str) -> Instance | None:
    return instances().get(name.lower().replace("_", "-").strip())


def _bad_shorthand(text: str, what: str) -> SpecError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    tail = re.sub(r"^[0-9]{1,9}x", "", text[:100].lower())
    near = get_close_matches(tail, instances(), n=1, cutoff=0.7)
    return SpecError(
        what,
        key="cluster",
        value=shown,
        rule="A cluster is NODESxPER_NODExDEVICE terms joined by '+' with an optional '@RATE', an instance name, "
        "or the path of a TOML file",
        fix=f"Did you mean '{near[0]}'?" if near else "Write it like '8x8xh100-sxm@3200Gb/s'. See 'foreshard clusters'",
    )


def _from_file(path: str | Path) -> Cluster:
    file = str(path)
    data = codec.parse_toml(codec.read_text(path, max_bytes=MAX_TOML_BYTES), file=file)
    table = codec.decode(ClusterFile, data, file=file)
    own = _own_devices(table.devices, file)
    assumptions: list[str] = []
    nodes = []
    for index, entry in enumerate(table.nodes):
        device = own[entry.device] if entry.device in own else _named(entry.device, file, f"nodes[{index}].device", own)
        nodes.append(_nodes(entry, device, None, assumptions))
    cluster = Cluster(
        name=table.name or Path(path).stem,
        nodes=tuple(nodes),
        network=Network(kind=table.network.kind, oversubscription=table.network.oversubscription),
        links=_links(table, file),
        assumptions=tuple(dict.fromkeys(assumptions)),
    )
    return _checked(cluster, file)


def _named(name: str, file: str, key: str, own: Mapping[str, Device] = MappingProxyType({})) -> Device:
    """Return a catalog device; an error names the file and key, and may mean a device of the file."""
    try:
        return resolve_device(name)
    except SpecError as error:
        near = get_close_matches(name, own, n=1)
        fix = f"Did you mean '{near[0]}'?" if near else error.fix
        raise SpecError(error.what, file=file, key=key, value=error.value, rule=error.rule, fix=fix) from None


def _links(table: ClusterFile, file: str) -> tuple[Link, ...]:
    racks = {entry.rack for entry in table.nodes if entry.rack}
    for index, link in enumerate(table.links):
        for rack in link.between:
            if rack not in racks or link.between[0] == link.between[1]:
                raise SpecError(
                    f"'{rack}' is not one of two racks",
                    file=file,
                    key=f"links[{index}].between",
                    value=list(link.between),
                    rule="A link joins two different racks that nodes name",
                    fix=f"Known racks: {', '.join(sorted(racks)[:20]) or 'none, give nodes a rack'}",
                )
    return tuple(
        Link(between=link.between, bandwidth_bytes_per_s=link.bandwidth, latency_s=link.latency) for link in table.links
    )


def _nodes(table: NodesTable, device: Device, instance: Instance | None, assumptions: list[str]) -> NodeGroup:
    """Fill what a nodes table leaves open from the catalog, listing each default."""
    nic = table.nic
    if nic is None:
        known = instance.nic_bytes_per_s if instance else None
        nic = known if known is not None else _default(default_nic(device.name, table.per_node), device, assumptions)
    if table.nic_latency is None:
        assumptions.append(f"NIC latency {units.format_seconds(DEFAULT_NIC_LATENCY_S)}, not stated")
    price = None
    if table.usd_per_h is None:
        price = instance_price(instance, table.per_node) if instance else default_price(device.name, table.per_node)
        if price is not None:
            assumptions.append(f"{device.name}: {price.source}")
    _device_assumptions(table, device, instance, assumptions)
    return NodeGroup(
        count=table.count,
        device=device,
        per_node=table.per_node,
        nic_bytes_per_s=nic,
        nic_latency_s=DEFAULT_NIC_LATENCY_S if table.nic_latency is None else table.nic_latency,
        usd_per_h=table.usd_per_h if price is None else price.value,
        price_date=price.price_date if price else None,
        rack=table.rack,
        nvlink_domain=nvlink_domain(device, table.per_node),
    )


def _default(default: Default, device: Device, assumptions: list[str]) -> float:
    assumptions.append(f"{device.name}: {default.source}")
    return default.value


def _device_assumptions(
    table: NodesTable, device: Device, instance: Instance | None, assumptions: list[str]
) -> None:
    said = device_assumption(table.device) if table.device != device.name else None
    if said:
        assumptions.append(said)
    if instance and instance.notes:
        assumptions.append(f"{instance.name}: {instance.notes}")
    if not device.verified:
        assumptions.append(f"{device.name}: values not checked against a second source ({device.source})")
    if device.form == "pcie" and device.link_bytes_per_s > 0 and table.per_node > 1:
        assumptions.append(f"{device.name}: devices of a node meet over PCIe, link bridges are optional and not assumed")


def _checked(cluster: Cluster, file: str | None = None) -> Cluster:
    if cluster.num_devices > MAX_DEVICES:
        raise SpecError(
            f"the cluster has {cluster.num_devices} devices",
            file=file,
            key="nodes",
            value=cluster.num_devices,
            rule=f"A cluster has at most {MAX_DEVICES} devices",
            fix="Lower count or per_node",
        )
    return cluster


def _own_devices(tables: tuple[DeviceTable, ...], file: str) -> dict[str, Device]:
    own: dict[str, Device] = {}
    for index, table in enumerate(tables):
        key = f"devices[{index}]"
        if table.name in own or _is_known(table.name):
            raise SpecError(
                f"device '{table.name}' exists already",
                file=file,
                key=f"{key}.name",
                value=table.name,
                rule="A device of one's own has a name no other device has",
                fix="Choose another name",
            )
        own[table.name] = _own_device(table, file, key)
    return own


def _is_known(name: str) -> bool:
    try:
        resolve_device(name)
    except SpecError:
        return False
    return True


# DeviceTable key -> Device field, and the value when there is no base (absent: required).
_FIELD_OF = {
    "vendor": "vendor",
    "arch": "arch",
    "form": "form",
    "year": "year",
    "peak": "peak_flops_per_s",
    "memory": "memory_bytes",
    "memory_bandwidth": "memory_bytes_per_s",
    "num_sms": "num_sms",
    "clock": "clock_hz",
    "l2": "l2_bytes",
    "link": "link",
    "link_bandwidth": "link_bytes_per_s",
    "pcie": "pcie_bytes_per_s",
    "tdp": "tdp_w",
    "source": "source",
    "notes": "notes",
}
_WITHOUT_BASE = {
    "vendor": "unknown",
    "arch": "unknown",
    "form": "custom",
    "year": 0,
    "num_sms": 0,
    "clock": 0.0,
    "l2": 0.0,
    "link": "",
    "link_bandwidth": 0.0,
    "pcie": 0.0,
    "tdp": 0.0,
    "notes": "",
}


def _own_device(table: DeviceTable, file: str, key: str) -> Device:
    given = {name: getattr(table, name) for name in _FIELD_OF if getattr(table, name) is not None}
    given["source"] = table.source or f"{file}, {key}"
    if table.base is not None:
        base = _named(table.base, file, f"{key}.base")
        capacity = table.capacity or (table.memory or base.capacity_bytes)
        changes = {_FIELD_OF[name]: value for name, value in given.items()}
        return replace(base, name=table.name, capacity_bytes=capacity, verified=True, **changes)
    values = _WITHOUT_BASE | given
    for name in ("peak", "memory", "memory_bandwidth"):
        if name not in values:
            raise SpecError(
                f"'{name}' is missing",
                file=file,
                key=f"{key}.{name}",
                rule="A device without a base states peak, memory and memory_bandwidth",
                fix="Add it, or name a base",
            )
    fields = {_FIELD_OF[name]: value for name, value in values.items()}
    return Device(name=table.name, capacity_bytes=table.capacity or table.memory, verified=True, **fields)
