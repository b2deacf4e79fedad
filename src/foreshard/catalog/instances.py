"""Cloud instances: devices per node, network and price of each, and the defaults derived from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from types import MappingProxyType

# A price this old is still used, and said to be old.
PRICE_MAX_AGE_DAYS = 365
# Assumed, not fitted: one-way latency of a small RDMA message over InfiniBand or RoCE with a few switches on
# the way. TCP over Ethernet is several times slower; state nic_latency there.
DEFAULT_NIC_LATENCY_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance type as its provider sells it.

    Attributes
    ----------
    name : str
        ``provider-type``, lower case.
    device : str
        Canonical device name.
    per_node : int
    nic_bytes_per_s : float or None
        Whole node, one direction; None when the source does not say.
    network, intra_link : str
        Kind of network between nodes and of links inside a node, as the source writes them.
    usd_per_h : float or None
        On-demand, whole node; None when no source was found.
    price_region, price_source, spec_source, notes : str
    price_date : str or None
        As the source writes it: a day, a quarter or a year.
    """

    name: str
    device: str
    per_node: int
    nic_bytes_per_s: float | None
    network: str
    intra_link: str
    usd_per_h: float | None
    price_region: str
    price_date: str | None
    price_source: str
    spec_source: str
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A value taken from the catalog and the sentence that says from where."""

    value: float
    source: str
    price_date: str | None = None


# Default network of a node by device, scaled with its devices: an instance whose rate per device is taken.
_INSTANCE_PER_DEVICE = {
    "h100-sxm": "azure-nd96isr-h100-v5",
    "h100-sxm-94gb-hbm2e": "azure-nd96isr-h100-v5",
    "h100-sxm-96gb": "azure-nd96isr-h100-v5",
    "h200-sxm": "azure-nd96isr-h200-v5",
    "h100-pcie": "azure-nc80adis-h100-v5",
    "h100-nvl": "azure-nc80adis-h100-v5",
    "h200-nvl": "azure-nc80adis-h100-v5",
    "a100-sxm-40gb": "azure-nd96asr-v4",
    "a100-sxm-80gb": "azure-nd96amsr-a100-v4",
    "a800-sxm-80gb": "azure-nd96amsr-a100-v4",
    "a100-pcie-40gb": "azure-nc96ads-a100-v4",
    "a100-pcie-80gb": "azure-nc96ads-a100-v4",
    "a800-pcie-80gb": "azure-nc96ads-a100-v4",
    "b100-sxm": "aws-p6-b200.48xlarge",
    "b200-sxm": "aws-p6-b200.48xlarge",
    "gb200-nvl72": "azure-nd128isr-ndr-gb200-v6",
    "mi300x": "azure-nd96isr-mi300x-v5",
    "mi325x": "azure-nd96isr-mi300x-v5",
    "mi350x": "azure-nd96isr-mi300x-v5",
    "mi355x": "azure-nd96isr-mi300x-v5",
    "l40s": "aws-g6e.48xlarge",
    "rtx-pro-6000-server": "gcp-g4-standard-384",
    "trainium-1": "aws-trn1.32xlarge",
    "trainium-2": "aws-trn2.48xlarge",
    "gaudi": "aws-dl1.24xlarge",
}
# Where no instance is known: a link of interconnects.json, how many of it per device, and who says so.
_LINKS_PER_DEVICE = {
    "h800-sxm": ("InfiniBand NDR 4x", 1.0, "as the H100 board"),
    "h20-sxm": ("InfiniBand NDR 4x", 1.0, "as the H100 board"),
    "h20-sxm-141gb": ("InfiniBand NDR 4x", 1.0, "as the H100 board"),
    "gh200-96gb": ("InfiniBand HDR 4x", 1.0, "Alps, one 200 Gb/s Slingshot port per superchip, recalled"),
    "gh200-144gb": ("InfiniBand HDR 4x", 1.0, "as GH200 96 GB"),
    "b300-sxm": ("InfiniBand XDR 4x", 1.0, "DGX B300 datasheet, 8 ports of 800 Gb/s"),
    "gb300-nvl72": ("InfiniBand XDR 4x", 1.0, "ConnectX-8 per GPU, recalled"),
    "rubin-nvl72": ("InfiniBand XDR 4x", 1.0, "as GB300"),
    "v100-sxm3-32gb": ("InfiniBand EDR 4x", 0.5, "8 ports per DGX-2H, arXiv 1909.08053 section 5"),
    "mi250x": ("InfiniBand HDR 4x", 1.0, "Frontier, four 200 Gb/s ports per four modules, recalled"),
    "mi250x-gcd": ("InfiniBand HDR 4x", 0.5, "half of MI250X"),
    "gaudi-2": ("Gaudi2 24x100GbE", 3 / 24, "3 of 24 ports leave the node, HLS-Gaudi2, recalled"),
    "gaudi-3": ("Gaudi3 24x200GbE", 3 / 24, "3 of 24 ports leave the node, recalled"),
}
# Nodes that share one NIC whatever the number of devices.
_INSTANCE_PER_NODE = {
    "v100-sxm-16gb": "azure-nd40rs-v2",
    "v100-sxm-32gb": "azure-nd40rs-v2",
    "v100-pcie-16gb": "azure-nc24rs-v3",
    "v100-pcie-32gb": "azure-nc24rs-v3",
    "p100-pcie": "azure-nc24rs-v2",
    "p100-sxm": "azure-nc24rs-v2",
    "k80": "azure-nc24r",
    "k80-board": "azure-nc24r",
    "t4": "aws-g4dn.12xlarge",
    "a10g": "aws-g5.48xlarge",
    "l4": "aws-g6.48xlarge",
}
# Every other device: nodes of 8 PCIe devices have 100 Gb/s.
_OTHER = "aws-g5.48xlarge"


@cache
def instances() -> Mapping[str, Instance]:
    """Return every known instance by name."""
    rows = json.loads(
        files("foreshard.catalog").joinpath("data", "instances.json").read_text(encoding="utf-8")
    )
    return MappingProxyType({row["name"]: Instance(**row) for row in rows})


@cache
def interconnects() -> Mapping[str, float]:
    """Return the bandwidth of each named link, bytes/s, one direction."""
    rows = json.loads(
        files("foreshard.catalog").joinpath("data", "interconnects.json").read_text(encoding="utf-8")
    )
    return MappingProxyType({row["name"]: row["bytes_per_s"] for row in rows})


def default_nic(device: str, per_node: int) -> Default:
    """Return the network bandwidth of a node, bytes/s one direction, when the user states none."""
    if device in _LINKS_PER_DEVICE:
        link, links, said = _LINKS_PER_DEVICE[device]
        rate, source = interconnects()[link] * links * per_node, f"{links:g} {link} per device ({said})"
    elif device in _INSTANCE_PER_DEVICE:
        instance = instances()[_INSTANCE_PER_DEVICE[device]]
        rate = _stated_nic(instance) / instance.per_node * per_node
        source = f"the rate per device of {instance.name}"
    else:
        name = _INSTANCE_PER_NODE.get(device, _OTHER)
        rate = _stated_nic(instances()[name])
        source = f"that of {name}" + (
            "" if device in _INSTANCE_PER_NODE else ", as no instance has this device"
        )
    return Default(value=rate, source=f"NIC {rate * 8 / 1e9:g} Gb/s per node, {source}")


def _stated_nic(instance: Instance) -> float:
    if instance.nic_bytes_per_s is None:
        raise AssertionError(f"{instance.name} is a reference and must state its network")
    return instance.nic_bytes_per_s


def default_price(device: str, per_node: int, *, today: date | None = None) -> Default | None:
    """Return the price of a node, USD/h, when the user states none; None when no source has one.

    A provider's list goes before other sources, then an instance with as many devices per node, then the
    cheapest per device. A price of another number of devices is scaled, and says so.
    """
    ranked = sorted(
        ("libcloud" not in one.price_source, one.per_node != per_node, one.usd_per_h / one.per_node, one.name)
        for one in instances().values()
        if one.device == device and one.usd_per_h is not None
    )
    if not ranked:
        return None
    best = instances()[ranked[0][-1]]
    return instance_price(best, per_node, today=today)


def instance_price(instance: Instance, per_node: int, *, today: date | None = None) -> Default | None:
    """Return the price of a node with per_node devices of an instance, USD/h, with its date."""
    if instance.usd_per_h is None:
        return None
    price = instance.usd_per_h / instance.per_node * per_node
    scaled = (
        "" if per_node == instance.per_node else f", scaled from {instance.per_node} to {per_node} devices"
    )
    source = (
        f"price {price:.6g} USD/h per node of {instance.name} ({instance.price_date or 'no date'}, "
        f"{instance.price_region or 'region not stated'}, {instance.price_source}){scaled}"
    )
    if is_old(instance.price_date, today=today):
        source += "; this price is more than a year old or undated, state usd_per_h to replace it"
    doubts = [clause.strip() for clause in instance.notes.split(";") if "not reflected" in clause]
    source += "".join(f"; {doubt}" for doubt in doubts)
    return Default(value=price, source=source, price_date=instance.price_date)


def is_old(price_date: str | None, *, today: date | None = None) -> bool:
    """Return whether a price date (day, quarter or year) lies more than a year back, or is none."""
    started = _first_day(price_date or "")
    return started is None or ((today or date.today()) - started).days > PRICE_MAX_AGE_DAYS


def _first_day(text: str) -> date | None:
    """Return the first day of '2025-03-02', '2026-Q1' or '2025'."""
    year, _, rest = text.partition("-")
    try:
        if rest.startswith("Q"):
            return date(int(year), 3 * int(rest[1:]) - 2, 1)
        return date.fromisoformat(text) if rest else date(int(year), 1, 1)
    except ValueError:
        return None
