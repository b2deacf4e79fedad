"""Costs of a batch by kind and by worker; what a message and a ring take, and over which link.

A new kind of cost, and so of budget, is added here and in `control/slots.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from foreshard.control.slots import State


def cost_table(
    state: State, worker: np.ndarray, busy_s: np.ndarray, egress_usd: np.ndarray, time_s: float
) -> dict[str, float]:
    """Return costs of a batch by kind, and by kind and worker.

    Parameters
    ----------
    state : State
    worker : ndarray of int, shape (active,)
    busy_s : ndarray, shape (active,)
    egress_usd : ndarray, shape (W,)
        What bytes sent by each worker cost.
    time_s : float
    """
    egress = egress_usd[worker]
    if math.isfinite(time_s):
        rent = state.usd_per_h[worker] * (time_s / 3600.0)
        energy = state.busy_w[worker] * busy_s + state.idle_w[worker] * np.maximum(time_s - busy_s, 0.0)
    else:
        rent = energy = np.full(len(worker), math.inf)
    kg_per_j = state.kg_per_j[worker]
    by_kind = {
        "usd": rent + egress,
        "rent_usd": rent,
        "egress_usd": egress,
        "joule": energy,
        "carbon_kg": np.where(kg_per_j > 0.0, energy, 0.0) * kg_per_j,
        "duty": busy_s,
    }
    return Costs(worker, by_kind)


class Costs(dict[str, float]):
    """Costs by kind; those of single workers ('joule:3') are looked up when asked for."""

    __slots__ = ("_kinds", "_place")

    def __init__(self, worker: np.ndarray, by_kind: Mapping[str, np.ndarray]):
        super().__init__({kind: float(values.sum()) for kind, values in by_kind.items() if kind != "duty"})
        self._place = {int(rank): at for at, rank in enumerate(worker)}
        self._kinds = by_kind

    def by_worker(self, kind: str) -> np.ndarray:
        """Return the costs of a kind by worker, in the order of the structure's workers."""
        return self._kinds[kind]

    def __missing__(self, key: str) -> float:
        kind, _, worker = key.partition(":")
        if kind not in self._kinds or not worker.isdecimal():
            raise KeyError(key)
        at = self._place.get(int(worker))
        return 0.0 if at is None else float(self._kinds[kind][at])


def message_s(size_bytes: Any, rate_bytes_per_s: Any, latency_s: Any) -> Any:
    """Return the seconds of a message between stages, both ways; floats, or arrays that broadcast."""
    return 2.0 * latency_s + size_bytes / rate_bytes_per_s


def ring_s(num: Any, num_layers: Any, size_bytes: Any, rate_bytes_per_s: Any, latency_s: Any) -> Any:
    """Return the seconds in which `num` workers sum gradients of some layers.

    A ring all-reduce per layer: 2 (num - 1) hops, each with one part in `num` of the bytes. Floats, or arrays
    that broadcast.
    """
    return 2.0 * (num - 1) * (num_layers * latency_s + size_bytes / (num * rate_bytes_per_s))


def slowest_link(state: State, workers: Sequence[int] | np.ndarray) -> tuple[float, float]:
    """Return the least bandwidth and the greatest latency between any two of them."""
    if len(workers) == 2:
        a, b = workers
        rates, waits = state.bandwidth_bytes_per_s, state.latency_s
        return min(float(rates[a, b]), float(rates[b, a])), max(float(waits[a, b]), float(waits[b, a]))
    at, apart = np.asarray(workers), _apart(len(workers))
    rates, waits = state.bandwidth_bytes_per_s[at][:, at], state.latency_s[at][:, at]
    return float(rates[apart].min()), float(waits[apart].max())


@cache
def _apart(count: int) -> np.ndarray:
    return ~np.eye(count, dtype=bool)


def stage_link(
    state: State, before: Sequence[int] | np.ndarray, after: Sequence[int] | np.ndarray
) -> tuple[float, float]:
    """Return the least bandwidth and the greatest latency from a worker of one stage to one of the next."""
    pairs = np.ix_(np.asarray(before), np.asarray(after))
    return float(state.bandwidth_bytes_per_s[pairs].min()), float(state.latency_s[pairs].max())
