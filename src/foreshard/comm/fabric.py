"""What collectives see of a cluster: two levels of bandwidth and latency, and how well they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from foreshard.catalog.fabrics import LinkConstants, comm_constants, link_constants, link_generation
from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.catalog.kernels import Tables
    from foreshard.spec.cluster import Cluster, NodeGroup

_IN_NETWORK = ("hopper", "blackwell", "rubin")
HOST_STAGED = "turing-pcie"
"""Measured where no device reads another's memory: a share of the PCIe rate, through the host's memory."""
_MESH = 8.0
"""Devices that the links of a mesh board join in pairs (OCP OAM base board); fewer use fewer of them."""
_UNBOUNDED = 1e15
"""Factor on the rate of what takes no time: far above any, and what is divided by it stays above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric(LinkConstants):
    """Bandwidths, latencies and efficiencies of a cluster; every field a float or an array (rows)."""

    intra_bytes_per_s: Any  # per device, one direction, inside the scale-up domain (datasheet)
    domain: Any  # devices in one scale-up domain
    # devices of a node; NIC rate of the whole node, one direction; latency of one crossing
    per_node: Any
    nic_bytes_per_s: Any
    nic_sharers: Any  # ranks of a node among which its NICs are shared: its devices, unless fewer send
    nic_latency_s: Any
    in_network: Any  # 1 where the switch can reduce (NVLS), else 0
    # fraction of the datasheet NIC rate that rings, trees and direct sends reach
    nic_ring_eff: Any
    nic_tree_eff: Any
    nic_exchange_eff: Any
    # software time of a collective that leaves the domain, once (proxy thread, GPU to NIC handshake)
    nic_launch_s: Any
    # 1 where all-reduces run as a ring, or as a tree where there is one, whatever is faster
    ring_only: Any = 0.0
    tree_only: Any = 0.0
    # measured tables of collectives inside one domain (`cost.tables`), 0 where there is none
    all_reduce_table: Any = 0.0
    all_gather_table: Any = 0.0
    all_to_all_table: Any = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFabric(Fabric):
    """A fabric of which one part alone takes time: seconds of a collective are those it occupies that part.

    Algorithms are chosen as on the whole.
    """

    whole: Fabric


def links_alone(fabric: Fabric) -> PartialFabric:
    """Return a fabric on which the bytes in links of the scale-up domain are all that takes time."""
    return _part(fabric, nic_bytes_per_s=fabric.nic_bytes_per_s * _UNBOUNDED)


def network_alone(fabric: Fabric) -> PartialFabric:
    """Return a fabric on which the bytes in NICs are all that takes time."""
    return _part(fabric, intra_bytes_per_s=fabric.intra_bytes_per_s * _UNBOUNDED)


def _part(fabric: Fabric, **rates: Any) -> PartialFabric:
    """Return a fabric with these rates, without latency, pipeline filling and local copies."""
    values = {field.name: getattr(fabric, field.name) for field in fields(Fabric)}
    for name, value in values.items():
        if name.endswith("_table"):
            values[name] = 0.0
        elif name.endswith("ramp") or name.endswith("copy") or _is_seconds(name):
            values[name] = 0.0 * value
    return PartialFabric(whole=fabric, **(values | rates))


def _is_seconds(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("per_s")


def fabric_from(constants: LinkConstants, *, ideal: bool = False, **nodes: float) -> Fabric:
    """Join datasheet values of nodes with the constants of their link generation and of the network.

    An `ideal` one has every efficiency 1 and every ramp and copy 0 (fidelity ``datasheet``).
    """
    network, nodes = comm_constants()["network"], {"nic_sharers": nodes["per_node"]} | nodes
    values = asdict(constants) | {f"nic_{name}": value for name, value in network.items()}
    values["reference"] = values["reference"] or float(nodes["domain"])
    if ideal:
        kept = {name: value for name, value in values.items() if name.endswith(("_s", "reference"))}
        values = {name: float(name.endswith("_eff")) for name in values} | kept
    return Fabric(**values, **{name: float(value) for name, value in nodes.items()})


def fabric_of(
    group: NodeGroup,
    *,
    nccl: str = "2.2x",
    fidelity: str = "zero-shot",
    oversubscription: float = 1.0,
    exclude: str = "",
    collectives: str = "auto",
    tables: Tables | None = None,
    senders: int | None = None,
) -> Fabric:
    """Return the fabric of one group of equal nodes.

    `nccl` is the era of the library: ``2.2x`` (2.23 and later) or ``old`` (2.10 and before). The fidelity
    ``datasheet`` uses NCCL's own latency table and full link rate, others the fitted constants, without the
    family of measured rows to `exclude`. Oversubscription (edge over core bandwidth) divides the NIC rate.
    `collectives` is the algorithm of all-reduces, ``auto`` for the faster of those there are; `tables` are
    measured ones, which hold of whatever algorithm was measured. Of `senders` ranks of a node that send over
    the network at once each has its share of the NICs, at most one of them; None: all devices do.

    Raises
    ------
    SpecError
        The rate between the devices of a node is not known.
    """
    device, pcie = group.device, group.nvlink_domain <= 1
    rate = device.pcie_bytes_per_s if pcie else device.link_bytes_per_s
    if not rate and group.num_devices > 1:
        raise SpecError(
            f"{device.name} has no known bandwidth to its neighbours",
            key="device.pcie_bytes_per_s" if pcie else "device.link_bytes_per_s",
            value=rate,
            rule="Devices of one node need an NVLink or PCIe rate",
            fix="Give the rate in a [[devices]] table",
        )
    domain = group.per_node if pcie else min(group.nvlink_domain, group.num_devices)
    nic = group.nic_bytes_per_s / oversubscription
    if not nic or (group.count == 1 and domain < group.per_node):
        # Bridged pairs inside one node, or no NIC at all: they meet over the host.
        nic = (device.pcie_bytes_per_s or rate or 1.0) * group.per_node * link_constants("pcie").ring_eff
        senders = None
    sharers = group.per_node if senders is None else max(group.num_nics, min(senders, group.per_node))
    ideal = fidelity == "datasheet"
    generation = (
        "datasheet" if ideal else link_generation(device.arch, "" if pcie else device.link, name=device.name)
    )
    if pcie and group.pcie == "host" and not ideal:
        generation = HOST_STAGED
    if generation == "volta-nvlink" and domain > 8:
        generation = "nvlink"  # DGX-2 has switches; the row describes the cube mesh of 8
    family = device.arch.split()[0] if device.arch else ""
    fabric = fabric_from(
        link_constants(
            generation, nccl="2.2x" if ideal else nccl, exclude=exclude, clock_hz=device.clock_hz or 0.0
        ),
        intra_bytes_per_s=rate or 1.0,
        domain=domain,
        per_node=group.per_node,
        nic_bytes_per_s=nic,
        nic_sharers=sharers,
        nic_latency_s=group.nic_latency_s,
        in_network=not pcie and domain > 2 and family in _IN_NETWORK and generation != "hopper-c2c",
        ideal=ideal,
    )
    if generation == "mesh":
        fabric = replace(fabric, reference=max(float(fabric.reference), _MESH))
    if pcie and group.pcie == "switch":
        fabric = replace(fabric, scaling=0.0, exchange_scaling=0.0)
    if group.collectives and not ideal:
        fabric = replace(fabric, **dict(group.collectives))
    if tables is not None:
        fabric = replace(fabric, **tables.collectives(device))
    if collectives == "auto":
        return fabric
    return replace(fabric, ring_only=1.0 * (collectives == "ring"), tree_only=1.0 * (collectives == "tree"))


def slowest(fabrics: Iterable[Fabric]) -> Fabric:
    """Return the fabric of a group that spans several: the slowest link, the longest latencies.

    A ring or tree waits for its worst edge, so the link row of the slowest member decides bandwidth; the
    smallest domain and NIC share bound all. A message goes and ramps up as at the slower of its ends.
    """
    rows = list(fabrics)
    base = min(rows, key=lambda x: x.intra_bytes_per_s * x.ring_eff * (x.domain / x.reference) ** x.scaling)
    longest = ["exchange_ramp", *(f.name for f in fields(Fabric) if _is_seconds(f.name))]
    sharers = min(x.nic_sharers for x in rows)
    return replace(
        base,
        **{name: max(getattr(x, name) for x in rows) for name in longest},
        exchange_eff=min(x.intra_bytes_per_s * x.exchange_eff for x in rows) / base.intra_bytes_per_s,
        domain=min(x.domain for x in rows),
        per_node=min(x.per_node for x in rows),
        nic_sharers=sharers,
        nic_bytes_per_s=min(x.nic_bytes_per_s / x.nic_sharers for x in rows) * sharers,
        in_network=min(x.in_network for x in rows),
    )


def fabric_between(
    cluster: Cluster,
    ranks: Iterable[int],
    *,
    nccl: str = "2.2x",
    fidelity: str = "zero-shot",
    concurrent: int = 1,
    collectives: str = "auto",
    tables: Tables | None = None,
    senders: int | None = None,
) -> Fabric:
    """Return the fabric that a group of ranks sees: its slowest shared path.

    Links between racks (``[[links]]``) bound the NIC rate and add their latency when the group has ranks in
    both racks; `concurrent` groups that cross one at once share it equally. ``oversubscription`` divides the
    NIC rate. `senders` are those of :func:`fabric_of`.
    """
    wanted = ranks if isinstance(ranks, Sequence) else tuple(ranks)
    touched = [g for g, count in enumerate(cluster.counts_by_group(wanted)) if count]
    # How many ranks there are matters to links between racks alone.
    devices = len(set(wanted)) if cluster.links and len(touched) > 1 else 0
    sharing = concurrent if devices else 1
    return _between(cluster, tuple(touched), devices, nccl, fidelity, sharing, collectives, tables, senders)


def crossed_links(cluster: Cluster, ranks: Iterable[int], *, concurrent: int = 1) -> dict[int, float]:
    """Return the links between racks that a group of ranks crosses, and how many streams each carries.

    The devices of one domain drive a link together, and so do `concurrent` groups: with the rate of
    one of their streams the link carries so many of them, as `fabric_between` divides it. Keys are indices
    of ``cluster.links``.
    """
    wanted = {int(rank) for rank in ranks}
    racks = {cluster.node_group_of(rank).rack for rank in wanted} if cluster.links else set()
    if len(racks) < 2:
        return {}
    domain = float(fabric_between(cluster, wanted).domain)
    return {
        index: concurrent * min(len(wanted), domain)
        for index, link in enumerate(cluster.links)
        if set(link.between) <= racks
    }


@lru_cache(maxsize=1024)
def _between(
    cluster: Cluster,
    use: tuple[int, ...],
    devices: int,
    nccl: str,
    fidelity: str,
    concurrent: int,
    collectives: str,
    tables: Tables | None,
    senders: int | None,
) -> Fabric:
    """Return the fabric of so many ranks on some node groups."""
    touched = [cluster.nodes[g] for g in use]
    over = cluster.network.oversubscription
    options: dict[str, Any] = {"nccl": nccl, "fidelity": fidelity}
    options |= {"collectives": collectives, "tables": tables, "senders": senders}
    fabric = slowest(fabric_of(g, oversubscription=over, **options) for g in touched)
    if len(touched) > 1:
        # Different boards share no NVLink domain: what two groups join over is the network.
        fabric = replace(fabric, domain=min(fabric.domain, fabric.per_node))
    racks = {group.rack for group in touched}
    for link in cluster.links:
        if len(racks) > 1 and set(link.between) <= racks:
            # Spread over the devices of one domain, which drive the link together.
            share = link.bandwidth_bytes_per_s / concurrent / min(devices, fabric.domain)
            fabric = replace(
                fabric,
                nic_bytes_per_s=min(fabric.nic_bytes_per_s, share * fabric.nic_sharers),
                nic_latency_s=max(fabric.nic_latency_s, link.latency_s),
            )
    return fabric
