"""`foreshard clusters`: the instance types that are known, or what a cluster description means."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import answering, give
from foreshard.cli.options.sources import configurable
from foreshard.report.screen import Screen, table

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster


@click.command("clusters")
@click.argument("cluster", required=False)
def command(cluster: str | None) -> None:
    """List every known instance type, or show what CLUSTER (name, shorthand or TOML file) means."""
    if cluster is None:
        from foreshard.catalog.instances import instances

        rows = [asdict(one) for one in instances().values()]
        give({"schema_version": 1, "instances": rows}, lambda: _list(rows))
        return
    from foreshard import api

    found = api.load_cluster(cluster)
    give({"schema_version": 1, "cluster": cluster_dict(found)}, lambda: _detail(found))


def cluster_dict(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster as its JSON object; devices by name."""
    return {
        "name": cluster.name,
        "num_nodes": cluster.num_nodes,
        "num_devices": cluster.num_devices,
        "usd_per_h": cluster.usd_per_h,
        "nodes": [
            {
                "count": group.count,
                "per_node": group.per_node,
                "device": group.device.name,
                "nic_bytes_per_s": group.nic_bytes_per_s,
                "nic_latency_s": group.nic_latency_s,
                "usd_per_h": group.usd_per_h,
                "price_date": group.price_date,
                "rack": group.rack,
                "nvlink_domain": group.nvlink_domain,
            }
            for group in cluster.nodes
        ],
        "network": asdict(cluster.network),
        "links": [asdict(link) for link in cluster.links],
        "assumptions": list(cluster.assumptions),
    }


def _gigabits(bytes_per_s: float | None) -> str | None:
    return None if bytes_per_s is None else f"{bytes_per_s * 8 / 1e9:,.0f}"


def _list(rows: list[dict[str, Any]]) -> Screen:
    lines = [
        (
            one["name"],
            one["per_node"],
            one["device"],
            _gigabits(one["nic_bytes_per_s"]),
            quantity.usd(one["usd_per_h"]),
            one["price_date"],
        )
        for one in rows
    ]
    columns = ("instance", ">devices", "device", ">NIC Gb/s", ">per hour", "price of")
    title = f"{len(rows)} instances; 4xNAME is four of them, 8x8xh100-sxm any nodes of devices."
    return Screen(tables=(table(title, columns, lines, spare=("price of", ">NIC Gb/s")),))


def _detail(cluster: Cluster) -> Screen:
    rows = [
        (
            group.count,
            group.per_node,
            group.device.name,
            _gigabits(group.nic_bytes_per_s),
            quantity.seconds(group.nic_latency_s),
            group.nvlink_domain,
            quantity.usd(group.usd_per_h),
            group.price_date,
        )
        for group in cluster.nodes
    ]
    columns = (
        ">nodes",
        ">devices",
        "device",
        ">NIC Gb/s",
        ">latency",
        ">link domain",
        ">per node-hour",
        "price of",
    )
    price = f", {quantity.usd(cluster.usd_per_h)} per hour" if cluster.usd_per_h is not None else ""
    line = (
        f"{cluster.num_devices} devices in {cluster.num_nodes} nodes, {cluster.network.kind} network{price}"
    )
    assumed = table("Assumptions", (">#", "assumed"), list(enumerate(cluster.assumptions, start=1)))
    spare = ("price of", ">latency", ">link domain")
    tables = (table("", columns, rows, spare=spare), *((assumed,) if cluster.assumptions else ()))
    return Screen(header=(cluster.name, line), tables=tables)


command = configurable(answering(command))
