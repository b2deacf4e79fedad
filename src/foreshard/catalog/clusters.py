"""Load a cluster from a catalog name, a shorthand or a TOML file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreshard import quantity
from foreshard.catalog.cluster_file import (
    ClusterFile,
    NodesTable,
    cluster_tables,
    links_of,
    named_device,
    network_of,
    read_cluster_file,
)
from foreshard.catalog.devices import device_assumption
from foreshard.catalog.instances import (
    DEFAULT_NIC_LATENCY_S,
    Instance,
    default_nic,
    default_price,
    instance_price,
    nic_rates_per_device,
)
from foreshard.catalog.shorthand import nic_rate, read_shorthand
from foreshard.catalog.transports import transport_of
from foreshard.errors import SpecError
from foreshard.spec.cluster import MAX_DEVICES, Cluster, NodeGroup
from foreshard.spec.device import Device

# How many times above or below those of every instance a NIC rate is doubted: a rate of one of two, four or
# eight devices that was taken for the node's is beyond it. Half of what two generations of NICs differ by.
_FAR = 2**0.5

# Chips that share one ICI network at most: a pod (Google Cloud TPU documentation, recalled).
_TPU_POD = {"tpu-v2": 256, "tpu-v3": 1024, "tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256}
_TPU_POD |= {"tpu-v7x": 9216}


def load_cluster(text: str | Path) -> Cluster:
    """Return the cluster that a catalog name, a shorthand or a TOML file describes.

    Every default taken from the catalog is among its `assumptions`.

    Parameters
    ----------
    text : str or Path
        ``aws-p5.48xlarge``, ``4xaws-p5.48xlarge``; ``8xh100`` (one node), ``8x8xh100-sxm``,
        ``2x4xa100-sxm-40gb+2x4xv100-sxm-16gb@100Gb/s`` (nodes x devices per node x device, and the NIC rate
        of every node); or the path of a TOML file. See `foreshard.catalog.shorthand.read_shorthand`.

    Raises
    ------
    SpecError
        With file, key, rule and fix, for anything else.

    Examples
    --------
    >>> load_cluster("8x8xh100-sxm").num_devices
    64
    """
    if isinstance(text, Path) or text.endswith(".toml") or os.path.isfile(text):
        return _from_file(text)
    try:
        return _from_shorthand(text)  # also where a folder, of a run perhaps, has the name of the cluster
    except SpecError:
        if os.path.exists(text):
            return _from_file(text)
        raise


def with_device(cluster: Cluster, name: str) -> Cluster:
    """Return the cluster with another device on each node.

    Board, price, power and measured constants of collectives are those of the new device, and so is a NIC
    rate that nobody stated. What was stated about the site stays: NIC, rack, network, links, electricity.
    """
    assumptions: list[str] = []
    nodes = []
    for group in cluster.nodes:
        (term,) = read_shorthand(f"{group.count}x{group.per_node}x{name}")
        own_latency = group.instance is None and group.nic_latency_s != DEFAULT_NIC_LATENCY_S
        table = NodesTable(
            count=term.count,
            per_node=term.per_node,
            device=term.named,
            nic=None if group.nic_assumed else group.nic_bytes_per_s,
            nic_latency=group.nic_latency_s if own_latency else None,
            nics=group.nics,
            rack=group.rack,
            carbon_kg_per_kwh=group.carbon_kg_per_kwh,
            host_memory=group.host_memory_bytes,
            pcie=group.pcie,
        )
        nodes.append(_nodes(table, term.device, term.instance, assumptions))
    return _cluster(cluster.name, nodes, assumptions, network=cluster.network, links=cluster.links)


def with_nic(cluster: Cluster, rate: str) -> Cluster:
    """Return the cluster with a stated NIC rate of each node, written as after the `@` of a shorthand."""
    nodes = []
    replaced = set(cluster.warnings)
    for group in cluster.nodes:
        stated, nics = nic_rate(rate, rate, group.per_node)
        nodes.append(replace(group, nic_bytes_per_s=stated, nics=nics, nic_assumed=False))
        if group.nic_assumed and group.instance is None:
            replaced.add(_default_nic_line(group.device, group.per_node))
    kept = [line for line in cluster.assumptions if line not in replaced]
    return _cluster(cluster.name, nodes, kept, network=cluster.network, links=cluster.links)


def nvlink_domain(device: Device, per_node: int) -> int:
    """Return how many consecutive devices at most share the fast device links."""
    if device.name.endswith("-nvl72"):
        return max(72, per_node)
    if device.name in _TPU_POD:
        return max(_TPU_POD[device.name], per_node)
    return per_node if device.link_bytes_per_s > 0 and device.form != "pcie" else 1


def _from_shorthand(text: str) -> Cluster:
    assumptions: list[str] = []
    nodes = []
    for term in read_shorthand(text):
        table = NodesTable(
            count=term.count,
            per_node=term.per_node,
            device=term.named,
            nic=term.nic_bytes_per_s,
            nics=term.nics,
        )
        nodes.append(_nodes(table, term.device, term.instance, assumptions))
    return _checked(_cluster(text.strip(), nodes, assumptions))


def _cluster(name: str, nodes: Sequence[NodeGroup], assumptions: Sequence[str], **more: Any) -> Cluster:
    """Return the cluster with what was assumed, and what is doubtful in it."""
    doubts = _unusual_rates(nodes)
    said = tuple(dict.fromkeys((*assumptions, *doubts)))
    return Cluster(name=name, nodes=tuple(nodes), assumptions=said, warnings=doubts, **more)


def _unusual_rates(nodes: Sequence[NodeGroup]) -> tuple[str, ...]:
    """Return a sentence for each NIC rate that is far from those of every instance with the device."""
    if sum(group.count for group in nodes) < 2:
        return ()
    found = []
    for group in nodes:
        known = nic_rates_per_device(group.device.name, group.per_node)
        each = group.nic_bytes_per_s / group.per_node
        if known and not known[0] / _FAR <= each <= known[-1] * _FAR:
            least, most = (f"{rate * 8 / 1e9:g}" for rate in (known[0], known[-1]))
            found.append(
                f"a NIC of {group.nic_bytes_per_s * 8 / 1e9:g} Gb/s for a node of {group.per_node} "
                f"{group.device.name} is {each * 8 / 1e9:g} Gb/s per device, where instances have "
                f"{least if least == most else f'{least} to {most}'}; "
                f"a rate of each device is written as @{each * group.per_node * 8 / 1e9:g}Gb/s/gpu"
            )
    return tuple(dict.fromkeys(found))


def _from_file(path: str | Path) -> Cluster:
    return _of_tables(*read_cluster_file(path), str(path), Path(path).stem)


def cluster_of_tables(data: Mapping[str, Any], file: str) -> Cluster:
    """Return the cluster that the tables of a cluster file describe; `file` names them in errors."""
    return _of_tables(*cluster_tables(data, file), file, file)


def _of_tables(table: ClusterFile, own: Mapping[str, Device], file: str, name: str) -> Cluster:
    assumptions: list[str] = []
    nodes = []
    for index, entry in enumerate(table.nodes):
        device = own.get(entry.device) or named_device(entry.device, file, f"nodes[{index}].device", own)
        nodes.append(_nodes(entry, device, None, assumptions))
    cluster = _cluster(
        table.name or name,
        nodes,
        assumptions,
        network=network_of(table, file),
        links=links_of(table, file),
    )
    return _checked(cluster, file)


def _nodes(table: NodesTable, device: Device, instance: Instance | None, assumptions: list[str]) -> NodeGroup:
    """Fill what a nodes table leaves open from the catalog, listing each default."""
    nic = _nic(table, device, instance, assumptions)
    latency_s = _nic_latency_s(table, instance, assumptions)
    usd_per_h, price_date = _price(table, device, instance, assumptions)
    _device_assumptions(table, device, instance, assumptions)
    return NodeGroup(
        count=table.count,
        device=device,
        per_node=table.per_node,
        nic_bytes_per_s=nic,
        nic_latency_s=latency_s,
        nics=table.nics,
        nic_assumed=table.nic is None,
        usd_per_h=usd_per_h,
        price_date=price_date,
        instance=instance.name if instance else None,
        rack=table.rack,
        busy_w=table.power,
        idle_w=table.idle_power,
        carbon_kg_per_kwh=table.carbon_kg_per_kwh,
        host_memory_bytes=table.host_memory,
        nvlink_domain=nvlink_domain(device, table.per_node),
        collectives=tuple((table.collectives or {}).items()),
        pcie=table.pcie,
    )


def _nic(table: NodesTable, device: Device, instance: Instance | None, assumptions: list[str]) -> float:
    if table.nic is not None:
        return table.nic
    if instance and instance.nic_bytes_per_s is not None:
        return instance.nic_bytes_per_s
    assumptions.append(_default_nic_line(device, table.per_node))
    return default_nic(device.name, table.per_node).value


def _default_nic_line(device: Device, per_node: int) -> str:
    return f"{device.name}: {default_nic(device.name, per_node).source}"


def _nic_latency_s(table: NodesTable, instance: Instance | None, assumptions: list[str]) -> float:
    """Return the latency that the user states, else that of the instance's transport, else the default."""
    if table.nic_latency is not None:
        return table.nic_latency
    transport = transport_of(instance.network) if instance else None
    if transport is None:
        assumptions.append(f"NIC latency {quantity.seconds(DEFAULT_NIC_LATENCY_S)}, not stated")
        return DEFAULT_NIC_LATENCY_S
    name, latency_s = transport
    assumptions.append(f"NIC latency {quantity.seconds(latency_s)} of {name}")
    return latency_s


def _price(
    table: NodesTable, device: Device, instance: Instance | None, assumptions: list[str]
) -> tuple[float | None, str | None]:
    """Return the price of a node and its date: the user's, else the catalog's, else none."""
    if table.usd_per_h is not None:
        return table.usd_per_h, None
    known = (
        instance_price(instance, table.per_node) if instance else default_price(device.name, table.per_node)
    )
    if known is None:
        return None, None
    assumptions.append(f"{device.name}: {known.source}")
    return known.value, known.price_date


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
        assumptions.append(
            f"{device.name}: devices of a node meet over PCIe, link bridges are optional and not assumed"
        )


def _checked(cluster: Cluster, file: str | None = None) -> Cluster:
    if cluster.num_devices > MAX_DEVICES:
        what = f"the cluster has {cluster.num_devices} devices"
        rule = f"A cluster has at most {MAX_DEVICES} devices"
        fix = "Lower count or per_node"
        raise SpecError(what, file=file, key="nodes", value=cluster.num_devices, rule=rule, fix=fix)
    return cluster
