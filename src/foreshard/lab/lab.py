"""A mixed cluster on one machine: how slow each rank is, how fast the links are, and what changes when.

Time is virtual, of measured processor time ('cpu') or of a table ('table'), times what each rank is slowed
by, with messages at the rates of the links; or the wall's, where `lab.network` slows ranks and links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from foreshard.cost.energy import WAITING_POWER
from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock, VirtualClock
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.codec import Range, Size, Unit, decode, invalid, parse_toml, read_text, whole
from foreshard.spec.device import Device
from foreshard.units import parse

MAX_RANKS = 1024
"""Ranks are processes of this machine: more are a typing error."""
# Lower rates are typing errors: a message of a layer would take hours.
_LEAST_BYTES_PER_S = 1e3
# Of links in a lab that states none: Ethernet of a small machine room.
_USUAL_BYTES_PER_S = parse("10 Gb/s", "bytes_per_s")
_USUAL_LATENCY_S = parse("50 us", "s")
_MEMORY_BYTES = 8.0 * 2**30
"""Of a rank that states none."""


Slow = Annotated[float, Range(1e-3, 1e9)]
Amount = Annotated[float, Range(0.0, 1e9)]
Power = Annotated[float, Unit("w")]
Rate = Annotated[float, Unit("bytes_per_s"), Range(_LEAST_BYTES_PER_S)]
Delay = Annotated[float, Unit("s")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One ``[[change]]``: from a step on a rank is slower or faster, or links are (of one rank, or of all).

    Or a rank is killed as the step begins (`there` false), or back at it; one away from step 0 joins later.
    """

    at_step: Annotated[int, Range(0, 10**9)]
    rank: Annotated[int, Range(0, MAX_RANKS)] | None = None
    slow: Slow | None = None
    bandwidth: Rate | None = None
    latency: Delay | None = None
    there: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as `lab --json` prints it."""
        found = asdict(self)
        return found | {"bandwidth_bytes_per_s": found.pop("bandwidth"), "latency_s": found.pop("latency")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A test bed.

    By rank: `slow` is how many times as long its work takes as here, devices are names, power is that while
    it computes and while it waits, with the carbon of its electricity; None where not stated. `hosts` are
    numbers of hosts, one a rank if empty. Bandwidth and latency are of every host's link; changes are by
    step. `table_s` has seconds per sample and layer of a forward and a backward, per layer of the optimizer,
    for the clock 'table'.
    """

    clock: str
    slow: tuple[float, ...]
    devices: tuple[str, ...]
    bandwidth_bytes_per_s: float
    latency_s: float
    changes: tuple[Change, ...] = ()
    table_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: tuple[float | None, ...] = ()
    usd_per_h: tuple[float | None, ...] = ()
    busy_w: tuple[float | None, ...] = ()
    idle_w: tuple[float | None, ...] = ()
    kg_per_kwh: tuple[float | None, ...] = ()
    hosts: tuple[int, ...] = ()
    name: str = "lab"

    def host_of(self, rank: int) -> int:
        """Return the host of a rank: of its own unless ranks share hosts."""
        return self.hosts[rank] if self.hosts else rank

    @property
    def is_even(self) -> bool:
        """Whether all ranks are equally fast in every step."""
        steps = {0, *(change.at_step for change in self.changes)}
        return all(len({self.slow_at(step, rank) for rank in range(len(self.slow))}) == 1 for step in steps)

    def to_dict(self) -> dict[str, Any]:
        """Return it as `lab --json` prints it."""
        stated = ("memory_bytes", "usd_per_h", "busy_w", "idle_w", "kg_per_kwh")
        return {
            "name": self.name,
            "clock": self.clock,
            "ranks": [
                {
                    "rank": rank,
                    "device": self.devices[rank],
                    "slow": self.slow[rank],
                    "host": self.host_of(rank),
                }
                | {key: self.stated(key, rank) for key in stated}
                for rank in range(len(self.slow))
            ],
            "network": {"bandwidth_bytes_per_s": self.bandwidth_bytes_per_s, "latency_s": self.latency_s},
            "changes": [change.to_dict() for change in self.changes],
            "table_s": dict(self.table_s),
        }

    def stated(self, name: str, rank: int) -> float | None:
        """Return what the file states of a rank; None where it does not."""
        values: tuple[float | None, ...] = getattr(self, name)
        return values[rank] if values else None

    def slow_at(self, step: int, rank: int) -> float:
        """Return how slow a rank is in a step."""
        return float(self._at(step, rank, "slow", self.slow[rank]))

    def there_at(self, step: int, rank: int) -> bool:
        """Return whether a rank is there in a step."""
        return bool(self._at(step, rank, "there", True))

    def _at(self, step: int, rank: int, name: str, first: float) -> float:
        """Return what the last change of a rank until a step made of a value, `first` before any."""
        now = first
        for change in self.changes:
            if change.at_step <= step and change.rank == rank and getattr(change, name) is not None:
                now = getattr(change, name)
        return now

    @property
    def has_absences(self) -> bool:
        """Return whether ranks are away at some step."""
        return any(change.there is not None for change in self.changes)

    def link_at(self, step: int, source: int, target: int) -> tuple[float, float]:
        """Return (bytes/s, latency in seconds) of a link in a step."""
        rate, latency = dict.fromkeys((source, target), self.bandwidth_bytes_per_s), self.latency_s
        for change in self.changes:
            if change.at_step > step:
                continue
            for end in (source, target):
                if change.bandwidth is not None and change.rank in (None, end):
                    rate[end] = change.bandwidth
            if change.latency is not None and change.rank in (None, source, target):
                latency = change.latency
        return min(rate.values()), latency

    def make_clock(self, step: list[int]) -> Clock:
        """Return a rank's clock; `step` holds the current step."""
        if self.clock == "wall":
            return Clock()

        def link(source: int, target: int) -> tuple[float, float]:
            return self.link_at(step[0], source, target)

        return VirtualClock(link, self._tabled if self.clock == "table" else None)

    def _tabled(self, action: str, samples: int, layers: int) -> float:
        forward, backward, size = self.table_s["forward"], self.table_s["backward"], samples * layers
        each_s = {"forward": forward, "backward": backward, "probe": forward + backward}
        if action == "optimizer":
            return self.table_s["optimizer"] * layers
        return each_s.get(action, 0.5 * backward) * size

    def cluster(self) -> Cluster:
        """Return the lab as a cluster of devices of its own, one a node; measured costs alone price them."""
        nodes = tuple(
            NodeGroup(
                count=1,
                per_node=1,
                device=_device(name, self.stated("memory_bytes", rank)),
                usd_per_h=self.stated("usd_per_h", rank),
                busy_w=self.stated("busy_w", rank),
                idle_w=self.stated("idle_w", rank),
                carbon_kg_per_kwh=self.stated("kg_per_kwh", rank),
                nic_bytes_per_s=self.bandwidth_bytes_per_s,
                nic_latency_s=self.latency_s,
                nvlink_domain=1,
            )
            for rank, name in enumerate(self.devices)
        )
        return Cluster(name=self.name, nodes=nodes)


def _device(name: str, memory_bytes: float | None) -> Device:
    """Return a device known by name and memory only: it stands for a slice of this machine."""
    memory = memory_bytes or _MEMORY_BYTES
    return Device(
        name=name,
        vendor="host",
        arch="host",
        form="virtual",
        peak_flops_per_s={},
        memory_bytes=memory,
        capacity_bytes=memory,
        source="lab",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRanks:
    """One ``[[ranks]]`` table: equal ranks in a row, of which `per_host` share a host and its link."""

    count: Annotated[int, Range(1, MAX_RANKS)] = 1
    per_host: Annotated[int, Range(1, MAX_RANKS)] = 1
    device: Annotated[str, Size(1)] | None = None
    slow: Slow = 1.0
    memory: Annotated[float, Unit("bytes"), Range(1.0)] | None = None
    usd_per_h: Amount | None = None
    power: Power | None = None
    idle_power: Power | None = None
    carbon_kg_per_kwh: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabLinks:
    """The ``[network]`` table."""

    bandwidth: Rate = _USUAL_BYTES_PER_S
    latency: Delay = _USUAL_LATENCY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LabFile:
    """The file of a lab; `foreshard schema lab` documents its keys."""

    name: str | None = None
    clock: Literal["wall", "cpu", "table"] = "cpu"
    ranks: Annotated[tuple[LabRanks, ...], Size(1)]
    network: LabLinks = LabLinks()
    change: tuple[Change, ...] = ()
    table: Mapping[Literal["forward", "backward", "optimizer"], Delay] = field(default_factory=dict)


def load_lab(path: str) -> Lab:
    """Return the lab of a TOML file."""
    file = decode(LabFile, parse_toml(read_text(path), file=path), file=path)
    ranks = [table for table in file.ranks for _ in range(table.count)]
    _check_ranks(file, len(ranks), path)
    _check_table(file, path)
    made = Lab(
        name=Path(path).stem if file.name is None else file.name,
        clock=file.clock,
        devices=tuple(rank.device or f"cpu-{rank.slow:g}x" for rank in ranks),
        slow=tuple(rank.slow for rank in ranks),
        memory_bytes=tuple(rank.memory for rank in ranks),
        usd_per_h=tuple(rank.usd_per_h for rank in ranks),
        busy_w=tuple(rank.power for rank in ranks),
        idle_w=tuple(_idle_w(rank) for rank in ranks),
        kg_per_kwh=tuple(rank.carbon_kg_per_kwh for rank in ranks),
        hosts=_hosts(file.ranks),
        bandwidth_bytes_per_s=file.network.bandwidth,
        latency_s=file.network.latency,
        changes=tuple(sorted(file.change, key=lambda change: change.at_step)),
        table_s={name: seconds for name, seconds in file.table.items()},
    )
    for step in sorted({change.at_step for change in made.changes}):
        if not any(made.there_at(step, rank) for rank in range(len(ranks))):
            raise SpecError(
                "nobody is left", file=path, key="change", value=step, rule="At every step some rank is there"
            )
    return made


def _hosts(tables: tuple[LabRanks, ...]) -> tuple[int, ...]:
    """Return the host of every rank; none where each rank has its own."""
    if all(table.per_host == 1 for table in tables):
        return ()
    hosts: list[int] = []
    for table in tables:
        first = hosts[-1] + 1 if hosts else 0
        hosts += [first + index // table.per_host for index in range(table.count)]
    return tuple(hosts)


def _idle_w(ranks: LabRanks) -> float | None:
    """Return the stated power while waiting, else the usual part of the power while computing."""
    if ranks.idle_power is None and ranks.power is not None:
        return WAITING_POWER * ranks.power
    return ranks.idle_power


def _check_ranks(file: LabFile, count: int, path: str) -> None:
    """Raise for too many ranks, and for changes that name none or change nothing."""
    whole(count, 1, MAX_RANKS, key="ranks", name="number of ranks", file=path)
    for index, ranks in enumerate(file.ranks):
        if ranks.device is not None and not ranks.device.strip():
            raise invalid(ranks.device, "Must be a name", key=f"ranks[{index}].device", file=path)
        _check_hosts(ranks, file.clock, f"ranks[{index}].per_host", path)
    for index, change in enumerate(file.change):
        key = f"change[{index}]"
        if change.rank is not None:
            whole(change.rank, 0, count - 1, key=f"{key}.rank", file=path)
        for name in ("slow", "there"):
            if getattr(change, name) is not None and change.rank is None:
                rule = f"A change of {name} names its rank"
                raise SpecError("no rank", file=path, key=f"{key}.rank", rule=rule)
        if (change.slow, change.bandwidth, change.latency, change.there) == (None,) * 4:
            rule = "A change says slow, bandwidth, latency or there"
            raise SpecError("nothing changes", file=path, key=key, rule=rule)


def _check_hosts(ranks: LabRanks, clock: str, key: str, path: str) -> None:
    """Raise for hosts of unequal sizes, and for hosts of several ranks whose links are modelled."""
    size = ranks.per_host
    if ranks.count % size:
        raise invalid(size, f"Must divide the {ranks.count} ranks of the table", key=key, file=path)
    if size > 1 and clock != "wall":
        what, rule = (
            f"{size} ranks a host",
            f'The clock "{clock}" has a link of its own for every pair of ranks',
        )
        raise SpecError(what, file=path, key=key, value=size, rule=rule, fix='Use clock = "wall"')


def _check_table(file: LabFile, path: str) -> None:
    """Raise unless the table of times is there exactly where the clock reads it."""
    if file.clock == "table" and len(file.table) < 3:
        rule = "The clock needs forward, backward, optimizer"
        stated = ", ".join(file.table)
        raise SpecError("the table is not complete", file=path, key="table", value=stated, rule=rule)
    if file.table and file.clock != "table":
        rule = "Only the clock 'table' reads it"
        raise SpecError("a table for another clock", file=path, key="table", value=file.clock, rule=rule)
