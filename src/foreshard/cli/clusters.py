"""`foreshard clusters`: the instance types that are known, or what a cluster description means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from foreshard import quantity
from foreshard.catalog.instances import Instance, instances
from foreshard.cli.options.answer import give
from foreshard.cli.options.request import named_cluster
from foreshard.cli.options.sources import verb_command
from foreshard.report.plan_words import dated
from foreshard.report.screen import Screen, listing, table
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.units import number_of


@verb_command("clusters")
@click.argument("cluster", required=False)
def command(cluster: str | None) -> None:
    """List every known instance type, or show what CLUSTER (name, shorthand or TOML file) means."""
    if cluster is None:
        known = list(instances().values())
        give({"schema_version": 1, "instances": list(map(asdict, known))}, lambda: _list(known))
        return
    found = named_cluster(cluster)
    give({"schema_version": 1, "cluster": cluster_dict(found)}, lambda: _detail(found))


def cluster_dict(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster as its JSON object; devices by name."""
    return {
        "name": cluster.name,
        "num_nodes": cluster.num_nodes,
        "num_devices": cluster.num_devices,
        "usd_per_h": cluster.usd_per_h,
        "nodes": [
            {key: value for key, value in asdict(group).items() if key not in _POWER}
            | {"device": group.device.name}
            for group in cluster.nodes
        ],
        "network": asdict(cluster.network),
        "links": [asdict(link) for link in cluster.links],
        "assumptions": list(cluster.assumptions),
    }


_POWER = ("busy_w", "idle_w", "carbon_kg_per_kwh", "instance")


def _gigabits(bytes_per_s: float | None) -> str | None:
    return None if bytes_per_s is None else f"{bytes_per_s * 8 / 1e9:,.0f}"


_INSTANCES: dict[str, Callable[[Instance], object]] = {
    "instance": lambda instance: instance.name,
    ">devices": lambda instance: instance.per_node,
    "device": lambda instance: instance.device,
    ">NIC Gb/s": lambda instance: _gigabits(instance.nic_bytes_per_s),
    ">per hour": lambda instance: quantity.usd(instance.usd_per_h),
    "price of": lambda instance: instance.price_date and dated(instance.price_date),
    "region": lambda instance: instance.price_region,
    "source": lambda instance: instance.price_source,
}
_NODES: dict[str, Callable[[NodeGroup], object]] = {
    ">nodes": lambda group: group.count,
    ">devices": lambda group: group.per_node,
    "device": lambda group: group.device.name,
    ">NIC Gb/s": lambda group: _gigabits(group.nic_bytes_per_s),
    ">latency": lambda group: quantity.seconds(group.nic_latency_s),
    ">link domain": lambda group: group.nvlink_domain,
    ">per node-hour": lambda group: quantity.usd(group.usd_per_h),
    "price of": lambda group: group.price_date and dated(group.price_date),
}


def _list(known: list[Instance]) -> Screen:
    title = f"{len(known)} instances; 4xNAME is four of them, 8x8xh100-sxm any nodes of devices."
    return Screen(
        tables=(listing(title, known, _INSTANCES, spare=("source", "region", "price of", ">NIC Gb/s")),)
    )


def _detail(cluster: Cluster) -> Screen:
    price = f", {quantity.usd(cluster.usd_per_h)} per hour" if cluster.usd_per_h is not None else ""
    size = f"{number_of(cluster.num_devices, 'device')} in {number_of(cluster.num_nodes, 'node')}"
    tables = [listing("", cluster.nodes, _NODES, spare=("price of", ">latency", ">link domain"))]
    if cluster.assumptions:
        tables.append(table("Assumptions", (">#", "assumed"), list(enumerate(cluster.assumptions, start=1))))
    header = (cluster.name, f"{size}, {cluster.network.kind} network{price}")
    return Screen(header=header, tables=tuple(tables))
