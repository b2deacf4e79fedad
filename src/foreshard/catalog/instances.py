"""Cloud instances: devices per node, network and price of each, and the defaults derived from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from types import MappingProxyType

from foreshard.catalog.shipped import shipped
from foreshard.spec.device import Device

# A price this old is still used, and said to be old.
PRICE_MAX_AGE_DAYS = 365
# Assumed, not fitted: one-way latency of a small RDMA message over InfiniBand or RoCE with a few switches on
# the way. TCP over Ethernet is several times slower; state nic_latency there.
DEFAULT_NIC_LATENCY_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance type as its provider sells it."""

    name: str  # ``provider-type``, lower case
    device: str  # canonical device name
    per_node: int
    nic_bytes_per_s: float | None  # whole node, one direction; None when the source does not say
    # kind of network between nodes and of links inside a node, as the source writes them
    network: str
    intra_link: str
    usd_per_h: float | None  # on-demand, whole node; None when no source was found
    price_region: str
    price_date: str | None  # as the source writes it: a day, a quarter or a year
    price_source: str
    spec_source: str
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A value taken from the catalog and the sentence that says from where."""

    value: float
    source: str
    price_date: str | None = None


_NODES_OF_FOUR = ("gb200", "gb300", "gh200", "tpu", "rubin")  # trays and boards of these hold four
_NODES_OF_SIXTEEN = ("v100-sxm3", "trainium")
# Every other device: nodes of 8 PCIe devices have 100 Gb/s.
_OTHER = "aws-g5.48xlarge"


@cache
def instances() -> Mapping[str, Instance]:
    """Return every known instance by name."""
    return MappingProxyType({row["name"]: Instance(**row) for row in shipped("instances.json")})


def sellers() -> tuple[str, ...]:
    """Return who sells instances at a known price; their names begin with it."""
    sold = (name for name, one in instances().items() if one.usd_per_h is not None)
    return tuple(dict.fromkeys(name.partition("-")[0] for name in sold))


_PREFIX = re.compile(r"^(?:standard[-_ ]|ml\.)", re.IGNORECASE)  # of Azure's sizes and SageMaker's
_AZURE_SIZE = re.compile(r"^(n[cdv])(m?)-(.+)$")  # a family without its number of processors: nd-h100-v5


def instances_named(name: str) -> tuple[str, ...]:
    """Return the instances that a name means: as sold, without its vendor, or by a family with one size.

    Examples
    --------
    >>> instances_named("Standard_ND96isr_H100_v5"), instances_named("p4d"), instances_named("a3-mega")
    (('azure-nd96isr-h100-v5',), ('aws-p4d.24xlarge',), ('gcp-a3-megagpu-8g',))
    >>> instances_named("nd-h100-v5"), instances_named("g5")[0], instances_named("ml.p5.48xlarge")
    (('azure-nd96isr-h100-v5',), 'aws-g5.12xlarge', ('aws-p5.48xlarge',))
    """
    low = re.sub(r"[\s_:/]+", "-", _PREFIX.sub("", name.strip()).lower())
    known = instances()
    if low in known:
        return (low,)
    vendors = {whole.partition("-")[0] for whole in known}
    vendor, _, rest = low.partition("-")
    plain = rest if vendor in vendors and rest else low
    sold = {
        whole: whole.partition("-")[2] for whole in known if plain is low or whole.startswith(f"{vendor}-")
    }
    exact = tuple(whole for whole, kind in sold.items() if kind == plain)
    if exact or len(plain) < 2:
        return exact
    family = tuple(whole for whole, kind in sold.items() if kind.startswith(f"{plain}."))
    return family or tuple(whole for whole, kind in sold.items() if _is_family(plain, kind))


def _is_family(name: str, kind: str) -> bool:
    """Return whether a name is that of an Azure or Google instance with parts of it left out."""
    if re.fullmatch(r"a[234]x?(-[a-z]+)?", name):  # a3-mega for a3-megagpu-8g
        return kind.startswith(name if "-" in name else f"{name}-")
    old = re.fullmatch(r"nd(m?)v([0-9])", name)  # NDv4, from before devices were part of the name
    if old:
        return re.fullmatch(rf"nd[0-9]+a?{old[1]}s?r?s?-(?:a100-)?v{old[2]}", kind) is not None
    short = _AZURE_SIZE.match(name)
    if not short:
        return False
    series, more, rest = short.groups()
    sized = re.fullmatch(rf"{series}[0-9]+([a-z]*)-(.+)", kind)
    if sized is None:
        return False
    # A100 of 40 GB is sold as nd96asr-v4, without the device's name
    tail = "v4" if (series, more, rest) == ("nd", "", "a100-v4") else rest
    return sized[2] == tail and ("m" in sized[1]) == bool(more)


@cache
def interconnects() -> Mapping[str, float]:
    """Return the bandwidth of each named link, bytes/s, one direction."""
    return MappingProxyType({row["name"]: row["bytes_per_s"] for row in shipped("interconnects.json")})


@cache
def nic_rates_per_device(device: str, per_node: int) -> tuple[float, ...]:
    """Return the NIC rates of instances with a device, bytes/s per device of a node, lowest first.

    Parts of a node may have less than their share: where there are instances of as many devices, of these.
    """
    sold = [one for one in instances().values() if one.device == device and one.nic_bytes_per_s]
    as_large = [one for one in sold if one.per_node >= per_node]
    return tuple(sorted((one.nic_bytes_per_s or 0.0) / one.per_node for one in as_large or sold))


def largest_node(device: Device) -> int:
    """Return how many devices of this kind a node is sold with at most."""
    sold = [one.per_node for one in instances().values() if one.device == device.name]
    return max([usual_node_size(device), *sold])


def usual_node_size(device: Device) -> int:
    """Return how many devices of this kind a node is sold with."""
    if device.name.startswith(_NODES_OF_SIXTEEN):
        return 16
    return 4 if device.name.startswith(_NODES_OF_FOUR) else 8


def default_nic(device: str, per_node: int) -> Default:
    """Return the network bandwidth of a node, bytes/s one direction, when the user states none."""
    known = shipped("default_nics.toml")
    if device in known["links_per_device"]:
        entry = known["links_per_device"][device]
        links = entry["count"] / entry["of"]
        rate = interconnects()[entry["link"]] * links * per_node
        source = f"{links:g} {entry['link']} per device ({entry['source']})"
    elif device in known["instance_per_device"]:
        instance = instances()[known["instance_per_device"][device]]
        rate = _stated_nic(instance) / instance.per_node * per_node
        source = f"the rate per device of {instance.name}"
    else:
        name = known["instance_per_node"].get(device, _OTHER)
        rate = _stated_nic(instances()[name])
        unknown = "" if device in known["instance_per_node"] else ", as no instance has this device"
        source = f"that of {name}{unknown}"
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
        (
            "libcloud" not in entry.price_source,
            entry.per_node != per_node,
            entry.usd_per_h / entry.per_node,
            entry.name,
        )
        for entry in instances().values()
        if entry.device == device and entry.usd_per_h is not None
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
