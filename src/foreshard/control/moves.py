"""The price of a change of structure: layers with their state go to whoever lacks them.

The bytes are those that `spec.plan_moves` works out layer by layer for a run; here they are differences of
sums, since a decision has to be quick for many workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreshard.control.slots import MP_OVER_DP, Chain, State, Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMove:
    """A change of structure without its pause.

    Attributes
    ----------
    time_s : float
        Of the newcomer that waits longest; all receive at once.
    egress_usd : float
    """

    time_s: float
    egress_usd: float


def move(chain: Chain, state: State, old: Structure, new: Structure) -> LayerMove:
    """Return what it takes to send every worker the states of layers that it lacks.

    Each takes them over its fastest link from a worker that held any and is there; when none of those is
    left, over its fastest link of all, and nobody is billed.
    """
    held = dict(spans_of(old))
    left = [worker for worker in held if state.available[worker]]
    before, slowest_s, egress = chain.before_state, 0.0, 0.0
    for worker, (first, stop) in spans_of(new):
        low, high = held.get(worker, (0, 0)) if state.available[worker] else (0, 0)
        low, high = max(low, first), min(high, stop)
        lacks = float(before[stop] - before[first])
        if high > low:
            lacks -= float(before[high] - before[low])
        if lacks <= 0.0:
            continue
        sources = left if worker not in held else [source for source in left if source != worker]
        sources = sources or [source for source in range(len(state.speed)) if source != worker]
        if not sources:
            continue
        rates = state.bandwidth_bytes_per_s[sources, worker]
        best = int(rates.argmax())
        slowest_s = max(slowest_s, lacks / float(rates[best]))
        egress += lacks * float(state.usd_per_byte[sources[best], worker]) if left else 0.0
    return LayerMove(time_s=slowest_s, egress_usd=egress)


def spans_of(structure: Structure) -> Iterator[tuple[int, tuple[int, int]]]:
    """Return every worker with the layers that it holds."""
    for group in structure.groups:
        if structure.reading == MP_OVER_DP:
            yield from ((worker, (group.cuts[0], group.cuts[1])) for worker in group.workers)
        else:
            yield from zip(group.workers, itertools.pairwise(group.cuts), strict=True)


def move_costs(state: State, new: Structure, done: LayerMove, *, pause_s: float) -> dict[str, float]:
    """Return costs of a change by kind: everybody in use waits for it and is paid, bytes are billed."""
    who, time_s = np.array(new.workers), pause_s + done.time_s
    rent = float(state.usd_per_h[who].sum()) / 3600.0 * time_s
    watts = state.idle_w[who]
    return {
        "usd": rent + done.egress_usd,
        "rent_usd": rent,
        "egress_usd": done.egress_usd,
        "joule": float(watts.sum()) * time_s,
        "carbon_kg": float(watts @ state.kg_per_j[who]) * time_s,
    }
