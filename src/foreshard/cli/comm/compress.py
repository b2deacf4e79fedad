"""`foreshard comm compress SIZE CLUSTER`: what compressed sums of gradients cost and save."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Amount, ByteCount, Count
from foreshard.errors import SpecError
from foreshard.report.screen import Screen, table

if TYPE_CHECKING:
    from foreshard.comm.compression.methods import CompressionMethod
    from foreshard.spec.cluster import Cluster, NodeGroup

USUAL = ("powersgd:4", "topk:0.01", "onebit", "int8", "fp8")
"""Methods that are compared unless some are named."""
_WIDTH = 4


@verb_command("compress")
@click.argument("size", type=ByteCount(), metavar="SIZE")
@click.argument("cluster", metavar="CLUSTER")
@click.option("--ranks", type=Count(2), help="Replicas: the first N devices (default: all).")
@click.option("--method", "methods", multiple=True, metavar="METHOD", help="As of run --compress; repeat it.")
@click.option(
    "--columns", type=Count(), help="Of the matrices that gradients are (default: as many as rows)."
)
@click.option(
    "--hidden-s",
    type=Amount(0, 86400, dimension="s"),
    help="Seconds of computation that the sum runs beside.",
)
def command(
    size: float,
    cluster: str,
    ranks: int | None,
    methods: tuple[str, ...],
    columns: int | None,
    hidden_s: float | None,
) -> None:
    """Compare compressed sums of SIZE bytes of float32 gradients over the replicas of CLUSTER.

    Times are closed forms: latency of the messages, bytes over each rank's part of the slowest link, and what
    the device reads and writes to compress over its memory bandwidth. Below the crossover bandwidth of a
    rank's link a method is faster than the plain ring. Where the sum is hidden nothing is gained.

    \b
    foreshard comm compress 100MiB 4x8xa100-sxm-80gb@25Gb/s
    foreshard comm compress 100MiB 4x8xa100-sxm-80gb --method powersgd:2 --hidden-s 20ms --json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard import api
    from foreshard.comm.compression.methods import compression_method

    loaded = api.load_cluster(cluster)
    number = ranks or loaded.num_devices
    chosen = [compression_method(text, key="--method") for text in methods or USUAL]
    data = compared(loaded, number, size, chosen, columns, hidden_s or 0.0)
    give(data, lambda: _screen(data))


def compared(
    cluster: Cluster,
    num_ranks: int,
    size: float,
    methods: list[CompressionMethod],
    columns: int | None,
    hidden_s: float,
) -> dict[str, Any]:
    """Return what `--json` prints."""
    from foreshard.comm.compression import cost

    nodes = _nodes(cluster, num_ranks)
    rate, latency_s = link_of(nodes, num_ranks)
    count = max(int(size) // _WIDTH, 1)
    across = columns or math.isqrt(count)
    shapes = [(max(count // across, 1), across)]
    plain = cost.plain_time(size, num_ranks, latency_s)
    plain_exposed_s = cost.exposed_s(plain.at(rate), hidden_s)
    rows = []
    for method in methods:
        encode_s = cost.touched_bytes(method, size, num_ranks) / nodes.device.memory_bytes_per_s
        time = cost.compressed_time(method, shapes, num_ranks, latency_s, encode_s=encode_s)
        exposed_s = cost.exposed_s(time.at(rate), hidden_s)
        crossover = cost.crossover_bytes_per_s(plain, time)
        rows.append(
            {
                "method": str(method),
                "link_bytes": time.num_bytes,
                "encode_s": encode_s,
                "time_s": time.at(rate),
                "exposed_s": exposed_s,
                "saved_s": plain_exposed_s - exposed_s,
                "crossover_bytes_per_s": crossover if math.isfinite(crossover) else None,
            }
        )
    return {
        "schema_version": 1,
        "size_bytes": int(size),
        "num_ranks": num_ranks,
        "link_bytes_per_s": rate,
        "plain": {"link_bytes": plain.num_bytes, "time_s": plain.at(rate), "exposed_s": plain_exposed_s},
        "methods": rows,
    }


def _nodes(cluster: Cluster, num_ranks: int) -> NodeGroup:
    """Return the slowest nodes of the cluster, of which the ranks wait for."""
    if num_ranks > cluster.num_devices:
        rule = f"The cluster has {cluster.num_devices} devices"
        raise SpecError(f"{num_ranks} ranks", key="--ranks", value=num_ranks, rule=rule)
    if num_ranks < 2:
        rule, fix = "A sum has at least two replicas", "Take a cluster of several devices"
        raise SpecError(f"{num_ranks} rank", key="CLUSTER", value=num_ranks, rule=rule, fix=fix)
    slowest = min(cluster.nodes, key=lambda nodes: nodes.nic_bytes_per_s / nodes.per_node)
    if not slowest.device.memory_bytes_per_s:
        what = f"{slowest.device.name} has no memory bandwidth"
        rule, fix = "Compression reads and writes the gradients", "Give it in a [[devices]] table"
        raise SpecError(what, key="device.memory_bytes_per_s", rule=rule, fix=fix)
    return slowest


def link_of(nodes: NodeGroup, num_ranks: int) -> tuple[float, float]:
    """Return bytes/s and latency of a rank's part of the slowest link that a ring of the ranks passes."""
    if num_ranks > max(nodes.per_node, nodes.nvlink_domain):
        return nodes.nic_bytes_per_s / nodes.per_node, nodes.nic_latency_s
    device = nodes.device
    rate = device.link_bytes_per_s if nodes.nvlink_domain > 1 else device.pcie_bytes_per_s
    if not rate:
        raise SpecError(
            f"{device.name} has no known bandwidth to its neighbours",
            key="device",
            rule="Replicas of one node need an NVLink or PCIe rate",
            fix="Give the rate in a [[devices]] table, or take more nodes",
        )
    return rate, nodes.nic_latency_s


def _screen(data: dict[str, Any]) -> Screen:
    plain = data["plain"]
    rows = [("none", quantity.size(plain["link_bytes"]), "", quantity.seconds(plain["time_s"]), "", "")]
    for row in data["methods"]:
        crossover = row["crossover_bytes_per_s"]
        rows.append(
            (
                row["method"],
                quantity.size(row["link_bytes"]),
                quantity.seconds(row["encode_s"]),
                quantity.seconds(row["time_s"]),
                quantity.seconds(row["saved_s"]) if row["saved_s"] > 0 else "none",
                "any" if crossover is None else _gigabits(crossover) if crossover else "never",
            )
        )
    header = (
        f"sum of {quantity.size(data['size_bytes'])} over {data['num_ranks']} replicas, "
        f"{_gigabits(data['link_bytes_per_s'])} each"
    )
    columns = ("method", ">on a link", ">compress", ">time", ">saves", ">faster below")
    return Screen(header=(header,), boxes=(), tables=(table("Compressed sums", columns, rows),))


def _gigabits(bytes_per_s: float) -> str:
    return f"{quantity.digits(bytes_per_s * 8e-9)} Gb/s"
