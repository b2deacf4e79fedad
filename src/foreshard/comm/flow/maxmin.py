"""Weighted max-min fair rates of flows that share resources, by progressive filling.

All rates rise together, in proportion to the weights. Where a resource is full, its flows keep their rates;
the others rise on. Flows of a higher priority are filled first, the rest share what is left.
"""

from __future__ import annotations

import numpy as np

from foreshard.comm.flow._kernel import NO_CAPACITY, Routes, Shares, Slots
from foreshard.comm.flow.compiled import loops
from foreshard.errors import SpecError

SAME_LEVEL = 1e-12
"""Relative; resources that fill nearer to each other than this are full together."""


def max_min_rates(
    indptr: np.ndarray,
    resources: np.ndarray,
    capacity_bytes_per_s: np.ndarray,
    *,
    weight: np.ndarray | None = None,
    priority: np.ndarray | None = None,
    usage: np.ndarray | None = None,
    compiled: bool = False,
) -> np.ndarray:
    """Return the rate of each flow.

    Parameters
    ----------
    indptr, resources : ndarray of int, shapes (flows + 1,) and (entries,)
        Resources that each flow occupies (CSR); each flow occupies one at least.
    capacity_bytes_per_s : ndarray, shape (resources,), above 0
    weight : ndarray, shape (flows,), above 0, optional
        Equal unless given.
    priority : ndarray of int, shape (flows,), optional
        Higher first; equal unless given.
    usage : ndarray, shape (entries,), above 0, optional
        Bytes on the resource for each byte of the flow; 1 unless given.
    compiled : bool
        Solve component by component in a loop compiled by numba; the same rates to rounding.

    Returns
    -------
    ndarray, shape (flows,), bytes/s

    Source
    ------
    Bertsekas and Gallager, Data Networks (1992), 6.5.2; optimality is tested in tests/laws/test_flow_laws.py.

    Examples
    --------
    Two flows share the first resource, one of them also crosses a narrower second one.

    >>> max_min_rates(np.array([0, 1, 3]), np.array([0, 0, 1]), np.array([10.0, 2.0])).tolist()
    [8.0, 2.0]
    """
    num_flows = len(indptr) - 1
    if num_flows and not np.all(np.diff(indptr) > 0):
        flow = int(np.argmin(np.diff(indptr)))
        rule = "Each flow occupies one resource at least"
        raise SpecError(f"flow {flow} occupies nothing", key="indptr", value=flow, rule=rule)
    weight = np.ones(num_flows) if weight is None else np.asarray(weight, dtype=np.float64)
    rank = np.zeros(num_flows, dtype=np.int64) if priority is None else np.asarray(priority, dtype=np.int64)
    usage = np.ones(len(resources)) if usage is None else np.asarray(usage, dtype=np.float64)
    capacity = np.asarray(capacity_bytes_per_s, dtype=np.float64)
    if compiled:
        return _compiled_rates(indptr, resources, capacity, weight, rank, usage)
    rate, left = np.zeros(num_flows), capacity.copy()
    owner = np.repeat(np.arange(num_flows), np.diff(indptr))
    for one in np.unique(rank)[::-1].tolist():
        entries = rank[owner] == one
        _fill(rate, left, owner[entries], resources[entries], usage[entries], weight, capacity)
    return rate


def _fill(
    rate: np.ndarray,
    left: np.ndarray,
    flow: np.ndarray,
    resource: np.ndarray,
    usage: np.ndarray,
    weight: np.ndarray,
    capacity: np.ndarray,
) -> None:
    """Fill one priority class: set its rates and take them from what is left."""
    while len(flow):
        load = np.bincount(resource, usage * weight[flow], minlength=len(left))
        used = load > 0.0
        level = np.full(len(left), np.inf)
        level[used] = left[used] / load[used]
        full = level <= level.min() * (1.0 + SAME_LEVEL)
        fixed = np.unique(flow[full[resource]])
        rate[fixed] = level.min() * weight[fixed]
        done = np.isin(flow, fixed)
        left -= np.bincount(resource[done], usage[done] * rate[flow[done]], minlength=len(left))
        left[left <= NO_CAPACITY * capacity] = 0.0
        flow, resource, usage = flow[~done], resource[~done], usage[~done]


def _compiled_rates(
    indptr: np.ndarray,
    resources: np.ndarray,
    capacity: np.ndarray,
    weight: np.ndarray,
    priority: np.ndarray,
    usage: np.ndarray,
) -> np.ndarray:
    num_flows = len(weight)
    alone = np.minimum.reduceat(capacity[resources] / usage, indptr[:-1]) if num_flows else np.empty(0)
    routes = Routes(capacity, indptr.astype(np.int64), resources.astype(np.int64), usage, alone)
    shift = entry_shift(indptr)
    slots = empty_slots(num_flows)._replace(route=np.arange(num_flows), weight=weight, priority=priority)
    kernel = loops("foreshard.comm.flow._kernel", True)
    kernel.rates_of_all(routes, slots, empty_shares(len(capacity), num_flows, shift), shift)
    return slots.new_rate


def empty_slots(num_slots: int) -> Slots:
    """Return slots that run nothing."""
    return Slots(
        task=np.full(num_slots, -1),
        phase=np.zeros(num_slots, dtype=np.int64),
        route=np.zeros(num_slots, dtype=np.int64),
        weight=np.ones(num_slots),
        priority=np.zeros(num_slots, dtype=np.int64),
        rate=np.zeros(num_slots),
        new_rate=np.zeros(num_slots),
        left_bytes=np.zeros(num_slots),
        since_s=np.zeros(num_slots),
        mark=np.zeros(num_slots, dtype=np.int64),
        seen=np.zeros(num_slots, dtype=np.int64),
        event_s=np.zeros(num_slots),
        heap=np.zeros(num_slots, dtype=np.int64),
        place=np.full(num_slots, -1),
    )


def entry_shift(route_indptr: np.ndarray) -> int:
    """Return the bits that number the resources of the longest route."""
    return int(np.diff(route_indptr).max(initial=1) - 1).bit_length()


def empty_shares(num_resources: int, num_slots: int, shift: int) -> Shares:
    """Return resources without flows; no route has more than ``2**shift`` resources."""
    return Shares(
        head=np.full(num_resources, -1),
        next=np.full(num_slots << shift, -1),
        before=np.full(num_slots << shift, -1),
        left=np.zeros(num_resources),
        load=np.zeros(num_resources),
        num_filling=np.zeros(num_resources, dtype=np.int64),
        level=np.zeros(num_resources),
        heap=np.zeros(num_resources, dtype=np.int64),
        place=np.full(num_resources, -1),
        seen=np.zeros(num_resources, dtype=np.int64),
        resources=np.zeros(num_resources, dtype=np.int64),
        flows=np.zeros(num_slots, dtype=np.int64),
        seeds=np.zeros(num_resources, dtype=np.int64),
    )
