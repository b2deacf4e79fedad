"""A mixed cluster on one machine: how slow each rank is, how fast the links are, and what changes when.

Time is virtual, of measured processor time ('cpu') or of a table ('table'), times what each rank is slowed
by, with messages at the rates of the links; or the wall's, where `lab.network` slows ranks and links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foreshard.cost.energy import WAITING_POWER
from foreshard.errors import SpecError
from foreshard.runtime.engine.clock import Clock, VirtualClock
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.codec import parse_toml, read_text
from foreshard.spec.device import Device
from foreshard.units import parse

CLOCKS = ("wall", "cpu", "table")
_KEYS = ("name", "clock", "ranks", "network", "change", "table")
_RANK_KEYS = ("count", "device", "slow", "memory", "usd_per_h", "power", "idle_power", "carbon_kg_per_kwh")
_CHANGE_KEYS = ("at_step", "rank", "slow", "bandwidth", "latency", "there")
_NETWORK_KEYS = ("bandwidth", "latency")
_TABLE_KEYS = ("forward", "backward", "optimizer")
MAX_RANKS = 1024
_Row = tuple[str, float, float | None, float | None, float | None, float | None, float | None]
_LEAST_BYTES_PER_S = 1e3
_MEMORY_BYTES = 8.0 * 2**30
"""Of a rank that states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From a step on, a rank is slower or faster, or the links are (of one rank, or of all).

    Or a rank is killed as the step begins (`there` false), or back at it; one away from step 0 joins later.
    """

    at_step: int
    rank: int | None = None
    slow: float | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    there: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A test bed.

    Attributes
    ----------
    clock : {'wall', 'cpu', 'table'}
    slow : tuple of float
        By rank: how many times as long its work takes as here.
    devices : tuple of str
        By rank: what its device is called.
    bandwidth_bytes_per_s, latency_s : float
        Of every link.
    changes : tuple of Change
        By step.
    table_s : dict
        Clock 'table': seconds per sample and layer of a forward and a backward, per layer of the optimizer.
    memory_bytes, usd_per_h : tuple
        By rank; None where not stated.
    busy_w, idle_w, kg_per_kwh : tuple
        By rank: power while it computes and while it waits, and the carbon of its electricity; None where
        not stated.
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
    name: str = "lab"

    def to_dict(self) -> dict[str, Any]:
        """Return it as `lab --json` prints it."""
        stated = ("memory_bytes", "usd_per_h", "busy_w", "idle_w", "kg_per_kwh")
        return {
            "name": self.name,
            "clock": self.clock,
            "ranks": [
                {"rank": rank, "device": self.devices[rank], "slow": self.slow[rank]}
                | {key: (getattr(self, key) or (None,) * len(self.slow))[rank] for key in stated}
                for rank in range(len(self.slow))
            ],
            "network": {"bandwidth_bytes_per_s": self.bandwidth_bytes_per_s, "latency_s": self.latency_s},
            "changes": [asdict(change) for change in self.changes],
            "table_s": dict(self.table_s),
        }

    def slow_at(self, step: int, rank: int) -> float:
        """Return how slow a rank is in a step."""
        now = self.slow[rank]
        for change in self.changes:
            if change.at_step <= step and change.rank == rank and change.slow is not None:
                now = change.slow
        return now

    def there_at(self, step: int, rank: int) -> bool:
        """Return whether a rank is there in a step."""
        now = True
        for change in self.changes:
            if change.at_step <= step and change.rank == rank and change.there is not None:
                now = change.there
        return now

    @property
    def has_absences(self) -> bool:
        """Return whether ranks are away at some step."""
        return any(change.there is not None for change in self.changes)

    def absences(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Return who is lost and who joins when, as (rank, step); one away from step 0 only joins."""
        lost, joins = [], []
        away = {rank for rank in range(len(self.slow)) if not self.there_at(0, rank)}
        for change in self.changes:
            if change.there is None or change.rank is None or change.at_step == 0:
                continue
            if change.there and change.rank in away:
                joins.append((change.rank, change.at_step))
                away.discard(change.rank)
            elif not change.there and change.rank not in away:
                lost.append((change.rank, change.at_step))
                away.add(change.rank)
        return tuple(lost), tuple(joins)

    def link_at(self, step: int, source: int, target: int) -> tuple[float, float]:
        """Return (bytes/s, latency in seconds) of a link in a step."""
        rate, latency = dict.fromkeys((source, target), self.bandwidth_bytes_per_s), self.latency_s
        for change in self.changes:
            if change.at_step > step:
                continue
            for end in (source, target):
                if change.bandwidth_bytes_per_s is not None and change.rank in (None, end):
                    rate[end] = change.bandwidth_bytes_per_s
            if change.latency_s is not None and change.rank in (None, source, target):
                latency = change.latency_s
        return min(rate.values()), latency

    def make_clock(self, step: list[int]) -> Clock:
        """Return a rank's clock; `step` holds the current step."""
        if self.clock == "wall":
            return Clock()

        def link(source: int, target: int) -> tuple[float, float]:
            return self.link_at(step[0], source, target)

        return VirtualClock(link, self._tabled if self.clock == "table" else None)

    def _tabled(self, action: str, samples: int, layers: int) -> float:
        table = self.table_s
        if action == "forward":
            return table["forward"] * samples * layers
        if action == "optimizer":
            return table["optimizer"] * layers
        if action == "probe":
            return (table["forward"] + table["backward"]) * samples * layers
        halves = 1.0 if action == "backward" else 0.5
        return table["backward"] * samples * layers * halves

    def cluster(self) -> Cluster:
        """Return the lab as a cluster of devices of its own, one a node; measured costs alone price them."""
        unstated = (None,) * len(self.slow)
        memory = self.memory_bytes or unstated
        busy, idle = self.busy_w or unstated, self.idle_w or unstated
        price, carbon = self.usd_per_h or unstated, self.kg_per_kwh or unstated
        nodes = tuple(
            NodeGroup(
                count=1,
                per_node=1,
                device=_device(name, memory[rank]),
                usd_per_h=price[rank],
                busy_w=busy[rank],
                idle_w=idle[rank],
                carbon_kg_per_kwh=carbon[rank],
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
        year=0,
        peak_flops_per_s={},
        memory_bytes=memory,
        capacity_bytes=memory,
        memory_bytes_per_s=0.0,
        num_sms=0,
        clock_hz=0.0,
        l2_bytes=0.0,
        link="",
        link_bytes_per_s=0.0,
        pcie_bytes_per_s=0.0,
        tdp_w=0.0,
        source="lab",
        verified=True,
    )


def load_lab(path: str) -> Lab:
    """Return the lab of a TOML file.

    Raises
    ------
    SpecError
        Naming file, key, value and rule.
    """
    return _Reader(path).lab(parse_toml(read_text(path), file=path))


class _Reader:
    def __init__(self, file: str):
        self.file = file

    def fail(self, what: str, key: str, value: Any, rule: str) -> SpecError:
        return SpecError(what, file=self.file, key=key, value=value, rule=rule)

    def known(self, data: Any, key: str, names: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise self.fail("not a table", key, data, f"{key or 'A lab'} is a TOML table")
        for name in data:
            if name not in names:
                raise self.fail(
                    f"unknown key {name!r}",
                    f"{key}.{name}" if key else name,
                    name,
                    f"Known keys: {', '.join(names)}",
                )
        return data

    def number(self, value: Any, key: str, low: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < 1e9:
            raise self.fail(f"{value!r} is not valid", key, value, f"Must be a number of at least {low:g}")
        return float(value)

    def whole(self, value: Any, key: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(f"{value!r} is not valid", key, value, f"Must be a whole number, {low} to {high}")
        return value

    def tables(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.fail("not an array", key, value, f"{key} is an array of tables, [[{key}]]")
        return value

    def lab(self, data: dict[str, Any]) -> Lab:
        self.known(data, "", _KEYS)
        clock = data.get("clock", "cpu")
        if clock not in CLOCKS:
            raise self.fail(f"unknown clock {clock!r}", "clock", clock, f"Clocks are {', '.join(CLOCKS)}")
        ranks = self.tables(data.get("ranks", []), "ranks")
        rows = [row for i, rank in enumerate(ranks) for row in self.rank(rank, f"ranks[{i}]")]
        if not 1 <= len(rows) <= MAX_RANKS:
            raise self.fail(f"{len(rows)} ranks", "ranks", len(rows), f"A lab has 1 to {MAX_RANKS} ranks")
        network = self.known(data.get("network", {}), "network", _NETWORK_KEYS)
        tables = self.tables(data.get("change", []), "change")
        changes = [self.change(table, f"change[{i}]", len(rows)) for i, table in enumerate(tables)]
        made = Lab(
            name=str(data.get("name", Path(self.file).stem)),
            clock=clock,
            devices=tuple(row[0] for row in rows),
            slow=tuple(row[1] for row in rows),
            memory_bytes=tuple(row[2] for row in rows),
            usd_per_h=tuple(row[3] for row in rows),
            busy_w=tuple(row[4] for row in rows),
            idle_w=tuple(row[5] for row in rows),
            kg_per_kwh=tuple(row[6] for row in rows),
            bandwidth_bytes_per_s=self.rate(network.get("bandwidth", "10 Gb/s"), "network.bandwidth"),
            latency_s=self.quantity(network.get("latency", "50 us"), "network.latency", "s"),
            changes=tuple(sorted(changes, key=lambda c: c.at_step)),
            table_s=self.table(data, clock),
        )
        for step in sorted({change.at_step for change in changes}):
            if not any(made.there_at(step, rank) for rank in range(len(rows))):
                raise self.fail("nobody is left", "change", step, "At every step some rank is there")
        return made

    def table(self, data: dict[str, Any], clock: str) -> dict[str, float]:
        table = self.known(data.get("table", {}), "table", _TABLE_KEYS)
        if clock == "table" and set(table) != set(_TABLE_KEYS):
            needed = ", ".join(_TABLE_KEYS)
            raise self.fail("the table is not complete", "table", sorted(table), f"The clock needs {needed}")
        if table and clock != "table":
            raise self.fail("a table for another clock", "table", clock, "Only the clock 'table' reads it")
        return {name: self.quantity(value, f"table.{name}", "s") for name, value in table.items()}

    def rank(self, data: Any, key: str) -> list[_Row]:
        self.known(data, key, _RANK_KEYS)
        slow = self.number(data.get("slow", 1.0), f"{key}.slow", 1e-3)
        count = self.whole(data.get("count", 1), f"{key}.count", 1, MAX_RANKS)
        device = data.get("device", f"cpu-{slow:g}x")
        if not isinstance(device, str) or not device.strip():
            raise self.fail(f"{device!r} is not valid", f"{key}.device", device, "A device has a name")
        memory = self.quantity(data["memory"], f"{key}.memory", "bytes", 1.0) if "memory" in data else None
        price, carbon = (
            self.number(data[name], f"{key}.{name}", 0.0) if name in data else None
            for name in ("usd_per_h", "carbon_kg_per_kwh")
        )
        busy, idle = (
            self.quantity(data[name], f"{key}.{name}", "w") if name in data else None
            for name in ("power", "idle_power")
        )
        if idle is None and busy is not None:
            idle = WAITING_POWER * busy
        return [(device, slow, memory, price, busy, idle, carbon)] * count

    def change(self, data: Any, key: str, num_ranks: int) -> Change:
        self.known(data, key, _CHANGE_KEYS)
        rank = self.whole(data["rank"], f"{key}.rank", 0, num_ranks - 1) if "rank" in data else None
        for name in ("slow", "there"):
            if name in data and rank is None:
                raise self.fail("no rank", f"{key}.rank", None, f"A change of {name} names its rank")
        if not {"slow", "bandwidth", "latency", "there"} & set(data):
            raise self.fail("nothing changes", key, None, "A change says slow, bandwidth, latency or there")
        if not isinstance(data.get("there", True), bool):
            raise self.fail(
                f"{data['there']!r} is not valid", f"{key}.there", data["there"], "Must be true or false"
            )
        return Change(
            at_step=self.whole(data.get("at_step"), f"{key}.at_step", 0, 10**9),
            rank=rank,
            slow=self.number(data["slow"], f"{key}.slow", 1e-3) if "slow" in data else None,
            bandwidth_bytes_per_s=(
                self.rate(data["bandwidth"], f"{key}.bandwidth") if "bandwidth" in data else None
            ),
            latency_s=self.quantity(data["latency"], f"{key}.latency", "s") if "latency" in data else None,
            there=data.get("there"),
        )

    def rate(self, value: Any, key: str) -> float:
        return self.quantity(value, key, "bytes_per_s", _LEAST_BYTES_PER_S)

    def quantity(self, value: Any, key: str, kind: str, low: float = 0.0) -> float:
        try:
            found = parse(value, kind)
        except SpecError as error:
            raise SpecError(
                error.what,
                file=self.file,
                key=key,
                value=error.value,
                rule=error.rule,
                fix=error.fix,
            ) from None
        if found < low:
            raise self.fail(f"{value!r} is too little", key, value, f"Must be at least {low:g} (SI)")
        return found
