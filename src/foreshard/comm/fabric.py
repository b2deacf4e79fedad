"""What collectives see of a cluster: two levels of bandwidth and latency, and how well they are used."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshard.catalog.fabrics import LinkConstants, link_constants, link_generation, network_constants
from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster, NodeGroup

_IN_NETWORK = ("hopper", "blackwell", "rubin")
_NCCL_ROWS = {
    "pascal": 0,
    "volta": 0,
    "turing": 0,
    "ampere": 1,
    "ada": 1,
    "hopper": 2,
    "blackwell": 3,
    "rubin": 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Bandwidths, latencies and efficiencies of a cluster; every field a float or an array (rows).

    Parameters
    ----------
    intra_bytes_per_s
        Per device, one direction, inside the scale-up domain (datasheet).
    intra_latency_s
        One hop of a ring inside the domain, smallest message.
    domain
        Devices in one scale-up domain.
    per_node, nic_bytes_per_s, nic_latency_s
        Devices of a node; NIC rate of the whole node, one direction; latency of one crossing.
    in_network
        1 where the switch can reduce (NVLS), else 0.
    nccl_row
        Row of NCCL's own tables: 0 Volta, 1 Ampere, 2 Hopper, 3 Blackwell; plus 10 over PCIe.

    The others are ``LinkConstants`` and ``NetworkConstants`` of ``foreshard.catalog.fabrics``.
    """

    intra_bytes_per_s: Any
    intra_latency_s: Any
    domain: Any
    per_node: Any
    nic_bytes_per_s: Any
    nic_latency_s: Any
    in_network: Any
    launch_s: Any
    exchange_launch_s: Any
    exchange_hop_s: Any
    switch_launch_s: Any
    ring_eff: Any
    gather_eff: Any
    exchange_eff: Any
    switch_eff: Any
    ramp: Any
    exchange_ramp: Any
    switch_ramp: Any
    copy: Any
    exchange_copy: Any
    scaling: Any
    exchange_scaling: Any
    reference: Any
    nic_ring_eff: Any
    nic_tree_eff: Any
    nic_exchange_eff: Any
    nic_launch_s: Any
    nccl_row: Any

    @staticmethod
    def stack(fabrics: Sequence[Fabric]) -> Fabric:
        """Return one fabric whose fields are arrays, one row per given fabric."""
        return Fabric(
            **{f.name: np.array([getattr(x, f.name) for x in fabrics], dtype=float) for f in fields(Fabric)}
        )

    def take(self, index: Any) -> Fabric:
        """Return the rows at ``index``; scalar fields stay scalars."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Fabric(
            **{k: v[index] if isinstance(v, np.ndarray) and v.ndim else v for k, v in values.items()}
        )


def fabric_from(
    constants: LinkConstants,
    *,
    intra_bytes_per_s: float,
    domain: float,
    per_node: float,
    nic_bytes_per_s: float,
    nic_latency_s: float,
    in_network: bool,
    ideal: bool = False,
    nccl_row: int = 1,
) -> Fabric:
    """Join datasheet values of a cluster with the constants of its link generation.

    ``ideal`` sets every efficiency to 1 and every ramp and copy to 0 (fidelity ``datasheet``).
    """
    network = network_constants()
    values = {f.name: getattr(constants, f.name) for f in fields(LinkConstants) if f.name != "hop_s"}
    net = {
        "nic_ring_eff": network.ring_eff,
        "nic_tree_eff": network.tree_eff,
        "nic_exchange_eff": network.exchange_eff,
    }
    if not values["reference"]:
        values["reference"] = float(domain)
    if ideal:
        values = {
            k: 1.0 if k.endswith("_eff") else v if k.endswith(("_s", "reference")) else 0.0
            for k, v in values.items()
        }
        net = dict.fromkeys(net, 1.0)
    return Fabric(
        intra_bytes_per_s=float(intra_bytes_per_s),
        intra_latency_s=constants.hop_s,
        domain=float(domain),
        per_node=float(per_node),
        nic_bytes_per_s=float(nic_bytes_per_s),
        nic_latency_s=float(nic_latency_s),
        nic_launch_s=network.launch_s,
        in_network=float(in_network),
        nccl_row=float(nccl_row),
        **values,
        **net,
    )


def fabric_of(
    group: NodeGroup,
    *,
    nccl: str = "2.2x",
    fidelity: str = "zero-shot",
    oversubscription: float = 1.0,
    exclude: str = "",
) -> Fabric:
    """Return the fabric of one group of equal nodes.

    Parameters
    ----------
    group
        Nodes of one kind.
    nccl
        Era of the collective library: ``2.2x`` (2.23 and later) or ``old`` (2.10 and before).
    fidelity
        ``datasheet`` uses NCCL's own latency table and full link rate; ``zero-shot`` and ``calibrated``
        the fitted constants.
    oversubscription
        Edge over core bandwidth of the network; divides the NIC rate.
    exclude
        Family of measured rows that the constants must not have seen (validation).

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
    ideal = fidelity == "datasheet"
    generation = (
        "datasheet" if ideal else link_generation(device.arch, "" if pcie else device.link, name=device.name)
    )
    if generation == "volta-nvlink" and domain > 8:
        generation = "nvlink"  # DGX-2 has switches; the row describes the cube mesh of 8
    family = device.arch.split()[0] if device.arch else ""
    return fabric_from(
        link_constants(generation, nccl="2.2x" if ideal else nccl, exclude=exclude),
        intra_bytes_per_s=rate or 1.0,
        domain=domain,
        per_node=group.per_node,
        nic_bytes_per_s=nic,
        nic_latency_s=group.nic_latency_s,
        in_network=not pcie and domain > 2 and family in _IN_NETWORK and generation != "hopper-c2c",
        ideal=ideal,
        nccl_row=_NCCL_ROWS.get(family, 1) + (10 if pcie else 0),
    )


def slowest(fabrics: Iterable[Fabric]) -> Fabric:
    """Return the fabric of a group that spans several: the slowest link, the longest latencies.

    A ring or tree waits for its worst edge, so the link row of the slowest member decides bandwidth; the
    smallest domain and NIC share bound all.
    """
    rows = list(fabrics)
    base = min(rows, key=lambda x: x.intra_bytes_per_s * x.ring_eff * (x.domain / x.reference) ** x.scaling)
    latencies = [f.name for f in fields(Fabric) if f.name.endswith("_s") and not f.name.endswith("per_s")]
    per_node = min(x.per_node for x in rows)
    return replace(
        base,
        **{name: max(getattr(x, name) for x in rows) for name in latencies},
        domain=min(x.domain for x in rows),
        per_node=per_node,
        nic_bytes_per_s=min(x.nic_bytes_per_s / x.per_node for x in rows) * per_node,
        in_network=min(x.in_network for x in rows),
    )


def fabric_between(
    cluster: Cluster,
    ranks: Iterable[int],
    *,
    nccl: str = "2.2x",
    fidelity: str = "zero-shot",
    concurrent: int = 1,
) -> Fabric:
    """Return the fabric that a group of ranks sees: its slowest shared path.

    Parameters
    ----------
    cluster, ranks
        Where the group lives; ranks are device indices in cluster order.
    concurrent
        Groups that cross the same inter-rack link at once; each gets an equal share of it.

    Returns
    -------
    Fabric
        Links between racks (``[[links]]``) bound the NIC rate and add their latency when the group has
        ranks in both racks; ``oversubscription`` divides the NIC rate.
    """
    wanted = sorted({int(rank) for rank in ranks})
    touched, start = [], 0
    for group in cluster.nodes:
        first = bisect_left(wanted, start)
        if first < len(wanted) and wanted[first] < start + group.num_devices:
            touched.append(group)
        start += group.num_devices
    over = cluster.network.oversubscription
    fabric = slowest(fabric_of(g, nccl=nccl, fidelity=fidelity, oversubscription=over) for g in touched)
    if len(touched) > 1:
        # Different boards share no NVLink domain: what two groups join over is the network.
        fabric = replace(fabric, domain=min(fabric.domain, fabric.per_node))
    racks = {group.rack for group in touched}
    for link in cluster.links:
        if len(racks) > 1 and set(link.between) <= racks:
            # Spread over the devices of one domain, which drive the link together.
            share = link.bandwidth_bytes_per_s / concurrent / min(len(wanted), fabric.domain)
            fabric = replace(
                fabric,
                nic_bytes_per_s=min(fabric.nic_bytes_per_s, share * fabric.per_node),
                nic_latency_s=max(fabric.nic_latency_s, link.latency_s),
            )
    return fabric
