"""The Cluster of a training row: its devices in nodes, with the NIC the row states or its family declares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.instances import usual_node_size
from foreshard.errors import SpecError
from foreshard.spec.cluster import MAX_DEVICES, Cluster, NodeGroup
from foreshard.spec.device import Device
from foreshard.validation.facts import integer
from foreshard.validation.families import Family

_PER_DEVICE = re.compile(r"(?:per[- ]|/\s*)(?:gpu|device|accelerator|chip)\b")
_RATES = {"hdr": 200.0, "ndr": 400.0, "edr": 100.0}  # Gb/s of one InfiniBand port by generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReading:
    """A row while it is read: its cells, what they are of, and what was assumed so far."""

    raw: Mapping[str, str]
    device: Device
    name: str
    family: Family
    lines: list[str] = field(default_factory=list)

    def note(self, *lines: str) -> None:
        """Keep assumptions, each once."""
        self.lines.extend(line for line in dict.fromkeys(lines) if line not in self.lines)

    def whole(self, key: str) -> int | None:
        """Return a cell as a whole number >= 1, None when blank."""
        return integer(self.raw, key)


def nic_rate(text: str, per_node: int = 1) -> str | None:
    """Return the NIC rate of a node that an inter_link cell states, None when it states none.

    Storage and management ports do not count. A rate per GPU is of each of `per_node` devices.

    Examples
    --------
    >>> nic_rate("8x 200 Gbps HDR IB per DGX A100 (Selene)")
    '1600 Gb/s'
    >>> nic_rate("400 Gb/s per GPU", per_node=8)
    '3200 Gb/s'
    """
    parts = re.split(r"[,;]|\band\b", text)
    compute = [part for part in parts if re.search("compute", part.lower())]
    parts = compute or [part for part in parts if not re.search("storage|management", part.lower())]
    best = 0.0
    for part in parts:
        low = part.lower()
        count = re.search(r"(\d+)\s*x\s*[a-z\d]", low)
        rate = re.search(r"(?<![\d.])(\d+)\s*[Gg](?:b|bit|bps|bit/s|b/s|b/[Ss]ec|bE)?\b", part)
        kind = next((value for word, value in _RATES.items() if re.search(rf"\b{word}\b", low)), 0.0)
        each = float(rate[1]) if rate else kind
        devices = per_node if not count and _PER_DEVICE.search(low) else 1
        best = max(best, each * (int(count[1]) if count else devices))
    return f"{best:g} Gb/s" if best else None


def node_size(row: RowReading, gpus: int) -> int:
    """Return devices per node: stated, else what the device is sold in."""
    return min(row.whole("gpus_per_node") or usual_node_size(row.device), gpus)


def _in_integers(group: NodeGroup) -> NodeGroup:
    """Return the nodes with the int8 peak of their device where 8-bit floats would be."""
    peaks = group.device.peak_flops_per_s
    peaks = {**peaks, "fp8": peaks.get("int8", peaks.get("fp8", 0.0))}
    return replace(group, device=replace(group.device, peak_flops_per_s=peaks))


def row_cluster(row: RowReading, gpus: int) -> Cluster:
    """Return the devices a row used, with the NIC it states, its family declares, or the catalog's."""
    if gpus > MAX_DEVICES:
        raise SpecError(f"{gpus} devices", key="gpus", value=gpus, rule=f"At most {MAX_DEVICES} devices")
    raw, device, family, per_node = row.raw, row.device, row.family, node_size(row, gpus)
    if not raw["gpus_per_node"]:
        row.note(f"devices per node not stated: {per_node}")
    nodes, rest = divmod(gpus, per_node)
    rate = None
    if gpus > per_node:
        rate = nic_rate(raw["inter_link"], per_node)
        if (family.nic and "not stated" in raw["inter_link"]) or (rate is None and family.nic):
            rate = family.nic
            row.note(f"NIC {family.nic}: {family.nic_why}")
        elif rate is None:
            row.note("NIC not stated: the catalog's default for the device")
    suffix = f"@{rate.replace(' ', '')}" if rate else ""
    terms = [f"{nodes}x{per_node}x{device.name}"] + ([f"1x{rest}x{device.name}"] if rest else [])
    cluster = load_cluster("+".join(terms) + suffix)
    if "int8" in raw["dtype"].lower():  # 8-bit products at the rate of integers
        cluster = replace(cluster, nodes=tuple(_in_integers(group) for group in cluster.nodes))
    pod = re.search(r"\((\d+) chips/slice\)", raw["intra_link"])
    if pod:  # a slice of a TPU pod is one domain of its inter-chip links
        groups = tuple(replace(group, nvlink_domain=int(pod[1])) for group in cluster.nodes)
        return replace(cluster, nodes=groups)
    return cluster
