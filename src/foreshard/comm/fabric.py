"""What collectives see of a cluster: two levels of bandwidth and latency, and how well they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshard.catalog.fabrics import LinkConstants, link_constants, link_generation, network_constants
from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster, NodeGroup

# Fully connected or cube-mesh boxes: a group smaller than the box reaches only part of a device's links,
# so bandwidth grows with the group. Exponents of (ranks / 2): fitted for V100 and GH200, geometry for 8-way xGMI.
_FAMILIES_WITH_IN_NETWORK = ("hopper", "blackwell", "rubin")


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
    nic_ring_eff: Any
    nic_tree_eff: Any
    nic_exchange_eff: Any

    @staticmethod
    def stack(fabrics: Sequence[Fabric]) -> Fabric:
        """Return one fabric whose fields are arrays, one row per given fabric."""
        return Fabric(
            **{f.name: np.array([getattr(x, f.name) for x in fabrics], dtype=float) for f in fields(Fabric)}
        )

    def take(self, index: Any) -> Fabric:
        """Return the rows at ``index``; scalar fields stay scalars."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Fabric(**{k: v[index] if isinstance(v, np.ndarray) and v.ndim else v for k, v in values.items()})


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
    if ideal:
        values = {k: 1.0 if k.endswith("_eff") else v if k.endswith("_s") else 0.0 for k, v in values.items()}
        net = dict.fromkeys(net, 1.0)
    return Fabric(
        intra_bytes_per_s=float(intra_bytes_per_s),
        intra_latency_s=constants.hop_s,
        domain=float(domain),
        per_node=float(per_node),
        nic_bytes_per_s=float(nic_bytes_per_s),
        nic_latency_s=float(nic_latency_s) + network.overhead_s,
        in_network=float(in_network),
        **values,
        **net,
    )


def fabric_of(group: NodeGroup, *, nccl: str = "2.2x", fidelity: str = "zero-shot") -> Fabric:
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
    """
    device = group.device
    generation = link_generation(device.arch, device.link)
    pcie = generation.endswith("pcie")
    per_node, total = int(group.per_node), int(group.per_node) * int(group.count)
    nvlink_domain = int(group.nvlink_domain or 1)
    domain = per_node if pcie or nvlink_domain <= 1 else min(nvlink_domain, total)
    rate = device.pcie_bytes_per_s if pcie else device.link_bytes_per_s
    if not rate:
        raise SpecError(
            "bandwidth between the devices of a node is not known", key="device.link", value=device.link,
            rule="a device needs an NVLink or PCIe rate", fix="give the link rate in a [[devices]] table",
        )
    ideal = fidelity == "datasheet"
    constants = link_constants("datasheet" if ideal else generation, nccl="2.2x" if ideal else nccl)
    return fabric_from(
        constants,
        intra_bytes_per_s=rate,
        domain=domain,
        per_node=per_node,
        nic_bytes_per_s=group.nic_bytes_per_s,
        nic_latency_s=group.nic_latency_s,
        in_network=not pcie and domain > 2 and generation.split("-")[0] in _FAMILIES_WITH_IN_NETWORK,
        ideal=ideal,
    )


def slowest(fabrics: Iterable[Fabric]) -> Fabric:
    """Return the fabric of a group that spans several: the worst of every field."""
    rows = list(fabrics)
    worst = {}
    for field in fields(Fabric):
        values = [getattr(x, field.name) for x in rows]
        slow_is_large = field.name.endswith("_s") or field.name.endswith("copy") or field.name.endswith("ramp")
        large = slow_is_large and not field.name.endswith("bytes_per_s")
        worst[field.name] = max(values) if large else min(values)
    # NIC share per device, not per node, is what the slowest member limits.
    share = min(x.nic_bytes_per_s / x.per_node for x in rows)
    worst["nic_bytes_per_s"] = share * worst["per_node"]
    return Fabric(**worst)


def fabric_between(
    cluster: Cluster, ranks: Iterable[int], *, nccl: str = "2.2x", fidelity: str = "zero-shot"
) -> Fabric:
    """Return the fabric that a group of ranks sees: its slowest shared path.

    Links between racks (``[[links]]``) bound the NIC rate of a node group that lies behind them; the rate
    of such a link is shared by all devices of the smaller side, which is the safe reading.
    """
    wanted = sorted(set(int(r) for r in ranks))
    touched, start = [], 0
    for group in cluster.nodes:
        size = int(group.count) * int(group.per_node)
        members = sum(start <= r < start + size for r in wanted)
        if members:
            touched.append((group, members))
        start += size
    fabric = slowest(fabric_of(g, nccl=nccl, fidelity=fidelity) for g, _ in touched)
    racks = {getattr(g, "rack", None) for g, _ in touched}
    for link in getattr(cluster, "links", ()) or ():
        ends = set(link.between)
        if len(racks) > 1 and ends <= racks:
            smaller = min(sum(m for g, m in touched if g.rack == end) for end in ends)
            share = link.bytes_per_s / smaller
            fabric = replace(
                fabric,
                nic_bytes_per_s=min(fabric.nic_bytes_per_s, share * fabric.per_node),
                nic_latency_s=fabric.nic_latency_s + link.latency_s,
            )
    return fabric
