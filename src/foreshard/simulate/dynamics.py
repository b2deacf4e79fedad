"""How a cluster changes: named processes and traces, drawn into one path of slots.

A path numbers its distinct conditions (speeds, prices, link rates) and its distinct patterns of available
devices, so that whatever is worked out for one of them is worked out once. The same seed gives the same path.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.scenario import Scenario, StochasticProcess, ranks_of

CO_LOCATED = (1.0, 0.912, 0.809, 0.756, 0.678, 0.6, 0.489, 0.392, 0.141, 0.056)
"""Speed of a V100 job with another beside it, as a part of its speed alone: alone, then deciles 0.9 to 0.1.

Source: 636 pairs of jobs on one V100 in simulation_throughputs.json of stanford-futuredata/gavel@c4fa400
(Gavel, OSDI 2020, MIT licence).
"""
_MAX_TRACE_ROWS = 10**6
"""Rows of a trace: more would take seconds to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What happens in every slot."""

    # int, shape (slots,); row of `speed`, `price`, `link` and `carbon` that holds in a slot
    condition: np.ndarray
    pattern: np.ndarray  # int, shape (slots,); row of `available` that holds in a slot
    # speed, price: shape (conditions, devices); factors of the stated speeds and prices
    speed: np.ndarray
    price: np.ndarray
    # shape (conditions, links); factors of the rates of the links between racks, in the order of the
    # cluster's links
    link: np.ndarray
    available: np.ndarray  # bool, shape (patterns, devices)
    carbon: np.ndarray  # shape (conditions, devices); factors of the carbon of the electricity

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        return len(self.condition)


def draw(scenario: Scenario, cluster: Cluster, *, slots: int, seed: int) -> Path:
    """Return one path of a scenario.

    Parameters
    ----------
    scenario : Scenario
    cluster : Cluster
    slots : int
    seed : int
        Every process draws from a stream of its own, so that adding one does not change the others.

    Raises
    ------
    SpecError
        For ranks, links or traces that are not there, and when at some slot no device is available.
    """
    width, num_links = cluster.num_devices, len(cluster.links)
    speed, price, carbon = (np.ones((slots, width)) for _ in range(3))
    link, available = np.ones((slots, num_links)), np.ones((slots, width), dtype=bool)
    for index, process in enumerate(scenario.process):
        rng = np.random.default_rng([seed, index])
        try:
            columns = _columns(process, cluster)
            drawn = _drawn(process, scenario, columns, slots, rng)
        except SpecError as error:
            place = f"process[{index}]"
            error.file = error.file or scenario.file
            error.key = f"{place}.{error.key}" if error.key else place
            raise
        if process.what == "availability":
            available[:, columns] &= drawn > 0.5
        else:
            target = {"speed": speed, "price": price, "bandwidth": link, "carbon": carbon}[process.what]
            target[:, columns] *= drawn
    _someone_is_there(available, scenario)
    joined, condition = np.unique(
        np.round(np.concatenate([speed, price, link, carbon], axis=1), 12), axis=0, return_inverse=True
    )
    patterns, pattern = np.unique(available, axis=0, return_inverse=True)
    return Path(
        condition=np.ravel(condition),
        pattern=np.ravel(pattern),
        speed=joined[:, :width],
        price=joined[:, width : 2 * width],
        link=joined[:, 2 * width : 2 * width + num_links],
        available=patterns,
        carbon=joined[:, 2 * width + num_links :],
    )


def _someone_is_there(available: np.ndarray, scenario: Scenario) -> None:
    empty = np.flatnonzero(~available.any(axis=1))
    if len(empty):
        raise SpecError(
            f"at slot {empty[0]} no device is available",
            file=scenario.file,
            key="process",
            rule="Every slot trains a batch, which takes a device",
            fix="Let some devices stay",
        )


def _columns(process: StochasticProcess, cluster: Cluster) -> list[int]:
    """Return the devices or the links that a process drives."""
    if process.what != "bandwidth":
        return list(ranks_of(process.ranks, cluster.num_devices))
    wanted = None if process.between is None else set(process.between)
    found = [k for k, link in enumerate(cluster.links) if wanted is None or set(link.between) == wanted]
    if not found:
        raise SpecError(
            "no such link between racks",
            key="between",
            value=" - ".join(process.between or ()) or None,
            rule="A bandwidth process drives [[links]] of the cluster",
            fix="Name two joined racks",
        )
    return found


def _drawn(
    process: StochasticProcess, scenario: Scenario, columns: list[int], slots: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the factor of every slot and column; for availability 1 and 0."""
    clock = np.arange(slots) * scenario.slot
    if process.how == "fixed":
        return np.full((slots, len(columns)), process.factor)
    if process.how == "one-at-a-time":
        who = _chain(len(columns), 1, process.stay or 0.0, slots, rng)
        return np.where(who == np.arange(len(columns)), 1.0 / (process.factor or 1.0), 1.0)
    if process.how in ("markov", "co-located"):
        factors = np.array(process.factors if process.how == "markov" else CO_LOCATED)
        chains = 1 if process.together else len(columns)
        drawn = factors[_chain(len(factors), chains, process.stay or 0.0, slots, rng)]
        return np.broadcast_to(drawn, (slots, len(columns)))
    if process.how == "diurnal":
        return np.repeat(_diurnal(process, clock)[:, None], len(columns), axis=1)
    if process.how == "failures":
        return _failures(process, scenario.slot, len(columns), slots, rng)
    return _trace(process, scenario.path_of(process.file or ""), clock, len(columns))


def _chain(levels: int, chains: int, stay: float, slots: int, rng: np.random.Generator) -> np.ndarray:
    """Return sticky chains, shape (slots, chains): a level stays, or any other is as likely."""
    if levels < 2:
        raise SpecError("a chain of one level", key="factors", rule="A chain needs two levels or more")
    first = rng.integers(levels, size=(1, chains))
    leaps = rng.random((slots - 1, chains)) >= stay
    far = rng.integers(1, levels, size=(slots - 1, chains))
    steps = np.concatenate([first, np.where(leaps, far, 0)])
    return np.cumsum(steps, axis=0) % levels


def _diurnal(process: StochasticProcess, clock: np.ndarray) -> np.ndarray:
    """Return a wave from 1/swing (at its phase) to 1, in steps of equal ratio."""
    turn = clock / (process.period or 1.0) - process.phase
    depth = (1.0 + np.cos(2.0 * math.pi * turn)) / 2.0
    steps = process.levels - 1
    return np.asarray((process.swing or 1.0) ** -(np.round(depth * steps) / steps))


def _failures(
    process: StochasticProcess, slot_s: float, chains: int, slots: int, rng: np.random.Generator
) -> np.ndarray:
    fail = min(1.0, slot_s / (process.mean_up or slot_s))
    heal = min(1.0, slot_s / (process.mean_down or slot_s))
    chance = rng.random((slots, chains))
    up = np.ones(chains, dtype=bool)
    out = np.empty((slots, chains))
    for t in range(slots):
        up = np.where(up, chance[t] >= fail, chance[t] < heal)
        out[t] = up
    return out


def _trace(process: StochasticProcess, path: FilePath, clock: np.ndarray, columns: int) -> np.ndarray:
    """Return the looped values of a trace; a count makes so many devices available, the first ones."""
    times, values, counts = read_trace(path)
    # The last value holds as long as a typical one before it.
    span = times[-1] + (float(np.median(np.diff(times))) if len(times) > 1 else 1.0)
    now = values[np.searchsorted(times, clock % span, side="right") - 1]
    if counts:
        if process.what != "availability":
            raise SpecError(
                "a count of devices", key="file", value=path.name, rule="Only availability counts"
            )
        return (np.arange(columns)[None, :] < now[:, None]) * 1.0
    return np.repeat(now[:, None], columns, axis=1)


def read_trace(path: FilePath) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return times, values and whether the values count devices; lines that begin with # are remarks."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(line for line in stream if not line.startswith("#")))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise SpecError(f"cannot read the trace: {why}", file=str(path), fix="Check the path") from None
    counts = bool(rows) and "count" in rows[0]
    name = "count" if counts else "value"
    try:
        if not 0 < len(rows) <= _MAX_TRACE_ROWS:
            raise ValueError
        pairs = np.array([(float(row["time_s"]), float(row[name])) for row in rows])
    except (KeyError, TypeError, ValueError):
        raise _bad_trace(path) from None
    times, values = pairs[:, 0] - pairs[0, 0], pairs[:, 1]
    positive = values >= 0 if counts else values > 0
    if not np.isfinite(pairs).all() or (np.diff(times) <= 0).any() or not positive.all():
        raise _bad_trace(path)
    return times, values, counts


def _bad_trace(path: FilePath) -> SpecError:
    return SpecError(
        "not a trace",
        file=str(path),
        key="time_s",
        rule="A CSV with columns time_s, rising, and value above 0 or count",
        fix="Correct the file",
    )


def describe(path: Path) -> dict[str, Any]:
    """Return how a path looks: slots, distinct conditions and patterns, changes per 1000 slots."""
    moved = (np.diff(path.condition) != 0) | (np.diff(path.pattern) != 0)
    return {
        "slots": path.num_slots,
        "conditions": len(path.speed),
        "patterns": len(path.available),
        "changes_per_1000": 1000.0 * float(moved.mean()) if len(moved) else 0.0,
    }
