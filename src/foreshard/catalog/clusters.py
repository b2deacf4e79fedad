"""Load a cluster from a catalog name, a shorthand or a TOML file."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from foreshard import quantity, units
from foreshard.catalog.cluster_file import MAX_DEVICES, NodesTable, links_of, named_device, read_cluster_file
from foreshard.catalog.devices import device_assumption, devices, resolve_device
from foreshard.catalog.instances import (
    DEFAULT_NIC_LATENCY_S,
    Instance,
    default_nic,
    default_price,
    instance_price,
    instances,
)
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster, Network, NodeGroup
from foreshard.spec.device import Device

_BY = r"\s*[xX×]\s*"  # between the numbers of a term
_MAX_SHORTHAND_CHARS = 4096  # about 200 terms; more nodes than that differ in a file

# Chips that share one ICI network at most: a pod (Google Cloud TPU documentation, recalled).
_TPU_POD = {"tpu-v2": 256, "tpu-v3": 1024, "tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256}
_TPU_POD |= {"tpu-v7x": 9216}


def load_cluster(text: str | Path) -> Cluster:
    """Return the cluster that a catalog name, a shorthand or a TOML file describes.

    Every default taken from the catalog is among its `assumptions`.

    Parameters
    ----------
    text : str or Path
        ``aws-p5.48xlarge``, ``4xaws-p5.48xlarge``; ``8x8xh100-sxm``,
        ``2x4xa100-sxm-40gb+2x4xv100-sxm-16gb@100Gb/s`` (nodes x devices per node x device, and the NIC rate
        of every node); or the path of a TOML file.

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
        error.key = "cluster"
        raise
    if not 1.0 <= nic <= 1e15:
        raise _bad_shorthand(text, f"the NIC rate '{rate.strip()}' is out of range")
    return nic


def _term(text: str, term: str, nic: float | None, assumptions: list[str]) -> NodeGroup:
    """Build the nodes of one term, NODESxPER_NODExDEVICE or [NODESx]INSTANCE."""
    sized = re.fullmatch(rf"([0-9]{{1,7}}){_BY}([0-9]{{1,7}}){_BY}(.+)", term)
    if sized:
        table = NodesTable(count=int(sized[1]), per_node=int(sized[2]), device=sized[3], nic=nic)
        if table.count < 1 or table.per_node < 1:
            raise _bad_shorthand(text, f"'{term}' has no devices")
        return _nodes(table, resolve_device(table.device), None, assumptions)
    counted = re.fullmatch(rf"(?:([0-9]{{1,7}}){_BY})?(.+)", term)
    instance = _instance(counted[2].lower().replace("_", "-").strip()) if counted else None
    count = int(counted[1] or 1) if counted else 0
    if re.fullmatch(rf"[0-9]+{_BY}[0-9]+{_BY}.+", term):
        raise _bad_shorthand(text, f"'{term[:80]}' has more than {MAX_DEVICES} devices")
    if instance is None or count < 1:
        raise _bad_shorthand(text, f"cannot read '{term[:80]}'")
    table = NodesTable(count=count, per_node=instance.per_node, device=instance.device, nic=nic)
    return _nodes(table, resolve_device(instance.device), instance, assumptions)


def _instance(name: str) -> Instance | None:
    """Return the instance of a name, which may leave out a vendor that no other has."""
    known = instances()
    ours = [name] if name in known else [whole for whole in known if whole.partition("-")[2] == name]
    return known[ours[0]] if len(ours) == 1 else None


def _bad_shorthand(text: str, what: str) -> SpecError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    tail = re.sub(r"^[0-9]{1,9}x", "", text[:100].lower())
    near = get_close_matches(tail, instances(), n=1, cutoff=0.7)
    short = re.fullmatch(r"([0-9]{1,7})x(.+)", text.strip())
    if not near and short and short[2].lower() in devices():
        near = [f"1x{text.strip()}"]
    if not near and text.strip().lower() in devices():
        near = [f"1x1x{text.strip().lower()}"]
    rule = (
        "A cluster is NODESxPER_NODExDEVICE terms joined by '+' with an optional '@RATE', "
        "an instance name, or the path of a TOML file"
    )
    fix = (
        f"Did you mean '{near[0]}'?"
        if near
        else "Write it like '8x8xh100-sxm@3200Gb/s'. See 'foreshard clusters'"
    )
    return SpecError(what, key="cluster", value=shown, rule=rule, fix=fix)


def _from_file(path: str | Path) -> Cluster:
    file = str(path)
    table, own = read_cluster_file(path)
    assumptions: list[str] = []
    nodes = []
    for index, entry in enumerate(table.nodes):
        device = own.get(entry.device) or named_device(entry.device, file, f"nodes[{index}].device", own)
        nodes.append(_nodes(entry, device, None, assumptions))
    cluster = Cluster(
        name=table.name or Path(path).stem,
        nodes=tuple(nodes),
        network=Network(kind=table.network.kind, oversubscription=table.network.oversubscription),
        links=links_of(table, file),
        assumptions=tuple(dict.fromkeys(assumptions)),
    )
    return _checked(cluster, file)


def _nodes(table: NodesTable, device: Device, instance: Instance | None, assumptions: list[str]) -> NodeGroup:
    """Fill what a nodes table leaves open from the catalog, listing each default."""
    nic = _nic(table, device, instance, assumptions)
    if table.nic_latency is None:
        assumptions.append(f"NIC latency {quantity.seconds(DEFAULT_NIC_LATENCY_S)}, not stated")
    usd_per_h, price_date = _price(table, device, instance, assumptions)
    _device_assumptions(table, device, instance, assumptions)
    return NodeGroup(
        count=table.count,
        device=device,
        per_node=table.per_node,
        nic_bytes_per_s=nic,
        nic_latency_s=DEFAULT_NIC_LATENCY_S if table.nic_latency is None else table.nic_latency,
        usd_per_h=usd_per_h,
        price_date=price_date,
        rack=table.rack,
        busy_w=table.power,
        idle_w=table.idle_power,
        carbon_kg_per_kwh=table.carbon_kg_per_kwh,
        host_memory_bytes=table.host_memory,
        nvlink_domain=nvlink_domain(device, table.per_node),
    )


def _nic(table: NodesTable, device: Device, instance: Instance | None, assumptions: list[str]) -> float:
    if table.nic is not None:
        return table.nic
    if instance and instance.nic_bytes_per_s is not None:
        return instance.nic_bytes_per_s
    default = default_nic(device.name, table.per_node)
    assumptions.append(f"{device.name}: {default.source}")
    return default.value


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
