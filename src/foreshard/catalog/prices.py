"""Prices of one's own: a TOML file that stands in for the catalog's, by device or by instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.instances import instances
from foreshard.errors import SpecError, unknown
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import Range, Size, decode, parse_toml, read_text

_MAX_BYTES = 2**20
Price = Annotated[float, Range(0.0, 1e9)]
Text = Annotated[str, Size(1, 200)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceEntry:
    """One ``[[prices]]`` table: of a device of any node, or of a node of an instance."""

    device: Text | None = None
    instance: Text | None = None
    usd_per_device_h: Price | None = None
    usd_per_h: Price | None = None
    date: Text | None = None
    region: Text | None = None
    source: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFile:
    """A file of prices; date, region and source hold for the entries that state none."""

    date: Text | None = None
    region: Text | None = None
    source: Text | None = None
    prices: Annotated[tuple[PriceEntry, ...], Size(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars an hour: `of_device` of one device, `of_instance` of a node; with where they are from."""

    file: str
    of_device: Mapping[str, PriceEntry] = field(default_factory=dict)
    of_instance: Mapping[str, PriceEntry] = field(default_factory=dict)

    def of_node(self, device: str, instance: str | None, per_node: int) -> tuple[float, PriceEntry] | None:
        """Return the price of a node and its entry, of its instance before its device; None without one."""
        entry = self.of_instance.get(instance or "")
        if entry is not None and entry.usd_per_h is not None:
            return entry.usd_per_h, entry
        entry = self.of_device.get(device)
        if entry is not None and entry.usd_per_device_h is not None:
            return entry.usd_per_device_h * per_node, entry
        return None

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster at these prices; what a cluster file states itself stays."""
        nodes, said = [], []
        for group in cluster.nodes:
            stated = group.usd_per_h is not None and group.price_date is None
            found = None if stated else self.of_node(group.device.name, group.instance, group.per_node)
            if found is None:
                nodes.append(group)
                continue
            price, entry = found
            nodes.append(replace(group, usd_per_h=price, price_date=entry.date or "no date"))
            origin = ", ".join(filter(None, (entry.date, entry.region, entry.source))) or "no date"
            said.append(f"{group.device.name}: price {price:.6g} USD/h per node of {self.file} ({origin})")
        names = {group.device.name for group, old in zip(nodes, cluster.nodes, strict=True) if group != old}
        kept = [
            line
            for line in cluster.assumptions
            if not any(line.startswith(f"{name}: price ") for name in names)
        ]
        return replace(cluster, nodes=tuple(nodes), assumptions=(*kept, *dict.fromkeys(said)))

    def of_rental(self) -> dict[str, float]:
        """Return the price of a node of every instance that has one, by its own or by its device's."""
        found = {one.name: self.of_node(one.device, one.name, one.per_node) for one in instances().values()}
        return {name: price[0] for name, price in found.items() if price is not None}


def load_prices(path: str) -> Prices:
    """Return the prices of a TOML file.

    Raises
    ------
    SpecError
        For a file that cannot be read, an unknown device or instance, or an entry that is of neither.
    """
    data = parse_toml(read_text(path, max_bytes=_MAX_BYTES), file=path)
    table = decode(PriceFile, data, file=path)
    of_device: dict[str, PriceEntry] = {}
    of_instance: dict[str, PriceEntry] = {}
    for index, entry in enumerate(table.prices):
        dated = replace(
            entry,
            date=entry.date or table.date,
            region=entry.region or table.region,
            source=entry.source or table.source,
        )
        key = f"prices[{index}]"
        device = entry.device is not None and entry.usd_per_device_h is not None
        instance = entry.instance is not None and entry.usd_per_h is not None
        if device == instance:
            raise SpecError(
                "an entry of neither a device nor an instance, or of both",
                file=path,
                key=key,
                rule="An entry has device and usd_per_device_h, or instance and usd_per_h (of a node)",
                fix='Write it like {device = "h100-sxm", usd_per_device_h = 2.5}',
            )
        if device:
            of_device[_device(str(entry.device), path, key)] = dated
        elif entry.instance not in instances():
            raise unknown(
                "instance",
                str(entry.instance),
                instances(),
                key=f"{key}.instance",
                file=path,
                rule="Instances are listed by 'foreshard clusters', among them",
            ) from None
        else:
            of_instance[str(entry.instance)] = dated
    return Prices(file=path, of_device=of_device, of_instance=of_instance)


def _device(name: str, path: str, key: str) -> str:
    try:
        return resolve_device(name).name
    except SpecError as error:
        error.file, error.key = path, f"{key}.device"
        raise
