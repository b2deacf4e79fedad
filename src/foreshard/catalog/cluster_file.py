"""The cluster file: its tables, and the devices and links it defines; see catalog/schema/cluster.toml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError, did_you_mean
from foreshard.spec import codec
from foreshard.spec.cluster import MAX_DEVICES, Cluster, Link, Network, NodeGroup
from foreshard.spec.codec import Range, Size, Unit
from foreshard.spec.device import Device

# The standard TOML reader needs seconds per 10 MB; a cluster of MAX_DEVICES distinct nodes is no file.
MAX_TOML_BYTES = 4 * 2**20

Rate = Annotated[float, Unit("bytes_per_s"), Range(1.0, 1e15)]
Latency = Annotated[float, Unit("s"), Range(0.0, 60.0)]
Power = Annotated[float, Unit("w"), Range(0.0, 1e6)]
Name = Annotated[str, Size(1, 200)]
PeakName = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
Peak = Annotated[float, Unit("flops_per_s"), Range(1e6, 1e20)]
Bytes = Annotated[float, Unit("bytes"), Range(2.0**20, 1e16)]
CollectiveConstant = Literal[
    "launch_s",
    "hop_s",
    "exchange_launch_s",
    "exchange_hop_s",
    "switch_launch_s",
    "ring_eff",
    "gather_eff",
    "exchange_eff",
    "switch_eff",
    "ramp",
    "exchange_ramp",
    "switch_ramp",
    "nic_launch_s",
    "nic_ring_eff",
    "nic_tree_eff",
    "nic_exchange_eff",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesTable:
    """One ``[[nodes]]`` table of a cluster file."""

    count: Annotated[int, Range(1, MAX_DEVICES)]
    device: Name
    per_node: Annotated[int, Range(1, MAX_DEVICES)]
    nic: Rate | None = None
    nic_latency: Latency | None = None
    nics: Annotated[int, Range(1)] | None = None
    usd_per_h: Annotated[float, Range(0.0, 1e9)] | None = None
    rack: Name | None = None
    power: Power | None = None
    idle_power: Power | None = None
    carbon_kg_per_kwh: Annotated[float, Range(0.0, 1e6)] | None = None
    collectives: Mapping[CollectiveConstant, Annotated[float, Range(0.0, 10.0)]] | None = None
    host_memory: Bytes | None = None
    pcie: Literal["shared", "switch", "host"] = "shared"


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
    tdp: Power | None = None
    source: str | None = None
    notes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A cluster file; the schema with its documentation is catalog/schema/cluster.toml."""

    name: str | None = None
    nodes: Annotated[tuple[NodesTable, ...], Size(1)]
    network: Network = field(default_factory=Network)
    links: tuple[LinkTable, ...] = ()
    devices: tuple[DeviceTable, ...] = ()


def read_cluster_file(path: str | Path) -> tuple[ClusterFile, Mapping[str, Device]]:
    """Return the tables of a cluster file and the devices it defines, by name."""
    file = str(path)
    text = codec.read_text(path, max_bytes=MAX_TOML_BYTES)
    if text.lstrip().startswith("{"):
        rule = "A cluster is a name, a shorthand like 2x8xh100-sxm, or a TOML file"
        raise SpecError(
            "JSON, no cluster", file=file, rule=rule, fix="Give a plan by --plan, after the cluster"
        )
    return cluster_tables(codec.parse_toml(text, file=file), file)


def cluster_tables(data: Any, file: str) -> tuple[ClusterFile, Mapping[str, Device]]:
    """Return the same of what such a file holds."""
    table = codec.decode(ClusterFile, data, file=file)
    return table, _own_devices(table.devices, file)


def named_device(name: str, file: str, key: str, own: Mapping[str, Device] = MappingProxyType({})) -> Device:
    """Return a catalog device; an error names the file and key, and may mean a device of the file."""
    try:
        return resolve_device(name)
    except SpecError as error:
        error.file, error.key, error.fix = file, key, did_you_mean(name, own, otherwise=error.fix)
        raise


def network_of(table: ClusterFile, file: str) -> Network:
    """Return the network between nodes; switches are counted only where its kind has them."""
    network = table.network
    rules = (
        (
            "nodes_per_leaf",
            network.nodes_per_leaf,
            ("leaf-spine",),
            "Only leaf-spine has leaves of several nodes",
        ),
        ("spines", network.spines, ("leaf-spine", "rail"), "Only leaf-spine and rail have spines"),
    )
    for key, count, kinds, rule in rules:
        if count > 1 and network.kind not in kinds:
            raise SpecError(
                f"{key} {count} in a {network.kind} network",
                file=file,
                key=f"network.{key}",
                value=count,
                rule=rule,
                fix=f"Set kind to {kinds[0]}, or leave {key} out",
            )
    if network.spines > 1 and table.links:
        raise SpecError(
            f"{network.spines} spines and links between racks",
            file=file,
            key="network.spines",
            value=network.spines,
            rule="Links join the one spine of each rack",
            fix="Leave spines out, or the links",
        )
    return network


def links_of(table: ClusterFile, file: str) -> tuple[Link, ...]:
    """Return the links between racks, each end checked to be a rack that nodes name."""
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
        Link(between=link.between, bandwidth_bytes_per_s=link.bandwidth, latency_s=link.latency)
        for link in table.links
    )


def _own_devices(tables: tuple[DeviceTable, ...], file: str) -> dict[str, Device]:
    own: dict[str, Device] = {}
    for index, table in enumerate(tables):
        key = f"devices[{index}]"
        if table.name in own or _is_known(table.name):
            what = f"device '{table.name}' exists already"
            rule = "A device of one's own has a name no other device has"
            fix = "Choose another name"
            raise SpecError(what, file=file, key=f"{key}.name", value=table.name, rule=rule, fix=fix)
        own[table.name] = _own_device(table, file, key)
    return own


def _is_known(name: str) -> bool:
    try:
        resolve_device(name)
    except SpecError:
        return False
    return True


# DeviceTable keys whose Device field has another name.
_FIELD_OF = {
    "peak": "peak_flops_per_s",
    "memory": "memory_bytes",
    "memory_bandwidth": "memory_bytes_per_s",
    "clock": "clock_hz",
    "l2": "l2_bytes",
    "link_bandwidth": "link_bytes_per_s",
    "pcie": "pcie_bytes_per_s",
    "tdp": "tdp_w",
}


def _own_device(table: DeviceTable, file: str, key: str) -> Device:
    names = (field.name for field in fields(DeviceTable) if field.name != "base")
    stated = {_FIELD_OF.get(name, name): getattr(table, name) for name in names}
    given: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
    given |= {"source": table.source or f"{file}, {key}", "verified": True}
    given["capacity_bytes"] = given.pop("capacity", table.memory)
    if table.base is not None:
        base = named_device(table.base, file, f"{key}.base")
        return replace(base, **given | {"capacity_bytes": given["capacity_bytes"] or base.capacity_bytes})
    for name in ("peak", "memory", "memory_bandwidth"):
        if getattr(table, name) is None:
            rule = "A device without a base states peak, memory and memory_bandwidth"
            fix = "Add it, or name a base"
            raise SpecError(f"'{name}' is missing", file=file, key=f"{key}.{name}", rule=rule, fix=fix)
    return Device(**given)


def cluster_text(cluster: Cluster) -> str:
    """Return the cluster as a cluster file, its defaults written out.

    Raises
    ------
    SpecError
        A device is not in the catalog: its table stands in the user's own file.
    """
    parts = [f"name = {_quoted(cluster.name)}"]
    for group in cluster.nodes:
        resolve_device(group.device.name)
        parts.append("\n[[nodes]]\n" + "\n".join(f"{key} = {value}" for key, value in _node_keys(group)))
        if group.collectives:
            lines = (f"{name} = {value!r}" for name, value in group.collectives)
            parts.append("\n[nodes.collectives]\n" + "\n".join(lines))
    network = cluster.network
    parts.append(
        f"\n[network]\nkind = {_quoted(network.kind)}\noversubscription = {network.oversubscription!r}"
    )
    for link in cluster.links:
        between = ", ".join(_quoted(name) for name in link.between)
        rate, latency = f"{link.bandwidth_bytes_per_s!r} B/s", f"{link.latency_s!r} s"
        parts.append(
            f"\n[[links]]\nbetween = [{between}]\nbandwidth = {_quoted(rate)}\nlatency = {_quoted(latency)}"
        )
    return "\n".join(parts) + "\n"


def _node_keys(group: NodeGroup) -> list[tuple[str, str]]:
    """Return the keys of a ``[[nodes]]`` table with their values as TOML writes them."""
    keys = [
        ("count", str(group.count)),
        ("device", _quoted(group.device.name)),
        ("per_node", str(group.per_node)),
        ("nic", _quoted(f"{group.nic_bytes_per_s!r} B/s")),
        ("nic_latency", _quoted(f"{group.nic_latency_s!r} s")),
    ]
    optional = (
        ("nics", None if group.nics is None else str(group.nics)),
        ("usd_per_h", None if group.usd_per_h is None else repr(group.usd_per_h)),
        ("rack", None if group.rack is None else _quoted(group.rack)),
        ("power", None if group.busy_w is None else _quoted(f"{group.busy_w!r} W")),
        ("idle_power", None if group.idle_w is None else _quoted(f"{group.idle_w!r} W")),
        ("carbon_kg_per_kwh", None if group.carbon_kg_per_kwh is None else repr(group.carbon_kg_per_kwh)),
    )
    return keys + [(key, value) for key, value in optional if value is not None]


def _quoted(text: str) -> str:
    """Return a TOML string: JSON's escapes are among TOML's."""
    return json.dumps(text, ensure_ascii=False)
