"""Device classes: workers of one class can change places and nothing changes."""

from __future__ import annotations

import numpy as np

from foreshard.control.slots import Chain, State, link_kinds

_MOST_LINKS = 256
"""Sets of links whose classes are kept, one number a worker each: as many as states."""


def device_classes(
    chain: Chain, state: State, apart: frozenset[int], places: list[int], *, by_memory: bool = True
) -> list[int]:
    """Return the class of every worker; those that budgets count apart are alone in theirs.

    `places` are those of `link_kinds`. Workers that differ in memory are alike where nothing of it counts.
    """
    rows = [hash(row.tobytes()) for row in np.asarray(chain.layer_s)]
    known: dict[object, int] = {}
    kinds = []
    columns = zip(
        rows,
        places,
        state.speed.tolist(),
        (chain.memory_bytes if by_memory else np.zeros(chain.num_workers)).tolist(),
        state.available.tolist(),
        state.usd_per_h.tolist(),
        state.busy_w.tolist(),
        state.idle_w.tolist(),
        state.kg_per_j.tolist(),
        strict=True,
    )
    for worker, column in enumerate(columns):
        key = (*column, worker if worker in apart else -1)
        kinds.append(known.setdefault(key, len(known)))
    return kinds


def remembered_link_kinds(state: State, known: dict[bytes, list[int]]) -> list[int]:
    """Return `link_kinds`, which are looked up where another state had the same links."""
    key = b"".join(
        np.ascontiguousarray(table).tobytes()
        for table in (state.bandwidth_bytes_per_s, state.latency_s, state.usd_per_byte)
    )
    if key not in known:
        if len(known) > _MOST_LINKS:
            known.clear()
        known[key] = link_kinds(state)
    return known[key]
