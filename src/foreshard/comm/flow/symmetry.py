"""Symmetry: a small flow program that stands for a large one in which many queues do the same.

Slots (queues, or single tasks in none) and resources are divided into classes, which are refined until
1. slots of one class run equal tasks at equal positions, which wait for tasks at equal positions of slots of
   equal classes, over routes of resources of equal classes;
2. resources of one class have equal capacities and carry equal numbers of equal tasks of each class of slots.
Then all tasks at one position of a class start and end together: if they do up to a moment, their rates
are equal, because filling depends on capacities and on numbers of flows only. One slot of each class is
simulated, on one resource of each class, which it occupies as often as all slots of its class do.

Classes are compared by 64-bit hashes: of a million slots, two that differ are taken for equal with a
probability below 1e-7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.comm.flow._symmetry_kernel import joined
from foreshard.comm.flow.program import FlowProgram
from foreshard.compiled import is_worth_compiling, loops

MAX_CLASSES_FRAC = 0.5
"""With more classes than this part of the slots, the small program saves less than it costs to make."""
MAX_ROUNDS = 64
"""Rounds of refinement: what takes more, as a chain of ranks over a network, is simulated sooner whole."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fold:
    """A flow program without repetition."""

    program: FlowProgram
    task: np.ndarray  # int, shape (T,); task of the small program that stands for each task of the large one
    kept: np.ndarray  # int; task of the large program that each task of the small one is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Description:
    """What the slots of a program do, as arrays over slots, runs and pairs (see ``_symmetry_kernel``)."""

    first: np.ndarray
    order: np.ndarray
    position: np.ndarray
    content: np.ndarray
    run_of_task: np.ndarray
    run_slot: np.ndarray
    run_route: np.ndarray
    run_index: np.ndarray
    first_pair: np.ndarray
    pair_other: np.ndarray
    pair_hash: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Carried:
    """Every resource that a run occupies: rows of run, resource and usage."""

    run: np.ndarray
    resource: np.ndarray
    usage: np.ndarray


def fold(program: FlowProgram, *, compiled: bool | None = None) -> Fold | None:
    """Return the small program of a symmetric one, or None where too little repeats or rounds run out."""
    if compiled is None:
        compiled = is_worth_compiling(program.num_tasks)
    kernel = loops("foreshard.comm.flow._symmetry_kernel", compiled)
    with np.errstate(over="ignore"):
        seen = _describe(program, kernel)
        carried = _carried(program, seen)
        classes = _classes(program, seen, carried, kernel)
    if classes is None:
        return None
    slot_class, resource_class = classes
    if slot_class.max(initial=-1) + 1 > MAX_CLASSES_FRAC * program.num_slots:
        return None
    return _folded(program, seen, carried, slot_class, resource_class)


def _describe(program: FlowProgram, kernel: Any) -> _Description:
    num_tasks, num_slots, num_edges = program.num_tasks, program.num_slots, len(program.indices)
    slot, indptr = program.slot, program.indptr
    first, order, position = (np.zeros(n, dtype=np.int64) for n in (num_slots + 1, num_tasks, num_tasks))
    kernel.order_by_slot(slot, first, order, position)
    numbers = (program.delay_s, program.num_bytes, program.weight, program.release_s, program.priority)
    columns = tuple(np.ascontiguousarray(column).view(np.uint64) for column in numbers)
    content, last_run = np.zeros(num_slots, dtype=np.uint64), np.full(num_slots, -1)
    run_of_task, *runs = (np.empty(num_tasks, dtype=np.int64) for _ in range(4))
    num_runs = kernel.describe(
        slot, position, columns, program.route, indptr, content, last_run, run_of_task, *runs
    )
    first_pair, last_pair = np.zeros(num_slots + 1, dtype=np.int64), np.full(num_slots, -1)
    pair_other, pair_hash = np.empty(num_edges, dtype=np.int64), np.empty(num_edges, dtype=np.uint64)
    kernel.describe_waits(
        order, first, slot, position, indptr, program.indices, first_pair, pair_other, pair_hash, last_pair
    )
    return _Description(
        first=first,
        order=order,
        position=position,
        content=content,
        run_of_task=run_of_task,
        run_slot=runs[0][:num_runs],
        run_route=runs[1][:num_runs],
        run_index=runs[2][:num_runs],
        first_pair=first_pair,
        pair_other=pair_other[: first_pair[-1]],
        pair_hash=pair_hash[: first_pair[-1]],
    )


def _carried(program: FlowProgram, seen: _Description) -> _Carried:
    length = np.where(seen.run_route >= 0, np.diff(program.route_indptr, append=0)[seen.run_route], 0)
    run = np.repeat(np.arange(len(length)), length)
    ahead = np.cumsum(length) - length
    entry = program.route_indptr[seen.run_route[run]] + np.arange(len(run)) - ahead[run]
    return _Carried(run=run, resource=program.route_resources[entry], usage=program.route_usage[entry])


def _classes(
    program: FlowProgram, seen: _Description, carried: _Carried, kernel: Any
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the class of each slot and of each resource, None where rounds do not suffice to tell."""
    usage = carried.usage.view(np.uint64)
    run_index = seen.run_index.astype(np.uint64)
    slots = seen.content
    resources = joined(np.zeros(1, dtype=np.uint64), program.capacity_bytes_per_s.view(np.uint64))
    pairs = (seen.first_pair, seen.pair_other, seen.pair_hash)
    order, num_peeled = _slot_order(seen, kernel)
    slot_class, resource_class = _numbered(slots), _numbered(resources)
    num_classes, is_finer, rounds = _num(slot_class) + _num(resource_class), True, 0
    while is_finer and _num(slot_class) <= MAX_CLASSES_FRAC * program.num_slots:
        if rounds == MAX_ROUNDS:
            return None
        rounds += 1
        of_runs = _sums(len(run_index), carried.run, joined(usage, resources[carried.resource]))
        of_slots = _sums(len(slots), seen.run_slot, joined(run_index, of_runs))
        old, slots = slots, np.empty_like(slots)
        kernel.spread(*pairs, order, num_peeled, of_slots, old, slots, np.zeros(len(slots), dtype=bool))
        tasks = joined(run_index[carried.run], slots[seen.run_slot[carried.run]])
        resources = joined(resources, _sums(len(resources), carried.resource, joined(usage, tasks)))
        slot_class, resource_class = _numbered(slots), _numbered(resources)
        is_finer = _num(slot_class) + _num(resource_class) > num_classes
        num_classes = _num(slot_class) + _num(resource_class)
    return slot_class, resource_class


def _slot_order(seen: _Description, kernel: Any) -> tuple[np.ndarray, int]:
    """Return the slots, each behind those it waits for, and how many are in no circle nor behind one."""
    num_slots = len(seen.content)
    owner = np.repeat(np.arange(num_slots), np.diff(seen.first_pair))
    by_other = np.argsort(seen.pair_other, kind="stable")
    after_indptr = np.searchsorted(seen.pair_other[by_other], np.arange(num_slots + 1))
    order, waits = np.empty(num_slots, dtype=np.int64), np.diff(seen.first_pair)
    num_peeled = kernel.peel(seen.first_pair, after_indptr, owner[by_other], waits, order)
    return order, num_peeled


def _numbered(hashes: np.ndarray) -> np.ndarray:
    return np.unique(hashes, return_inverse=True)[1]


def _num(classes: np.ndarray) -> int:
    return int(classes.max(initial=-1)) + 1


def _sums(size: int, row: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Return the sum of hashes of each row: equal for equal sets of them, in whatever order."""
    total = np.zeros(size, dtype=np.uint64)
    np.add.at(total, row, hashes)
    return total


def _folded(
    program: FlowProgram,
    seen: _Description,
    carried: _Carried,
    slot_class: np.ndarray,
    resource_class: np.ndarray,
) -> Fold:
    """Keep the first slot and the first resource of each class."""
    kept_slot = np.unique(slot_class, return_index=True)[1]
    length = np.diff(seen.first)[kept_slot]
    ahead = np.concatenate([[0], np.cumsum(length)])
    own = np.repeat(np.arange(len(kept_slot)), length)
    kept = seen.order[seen.first[kept_slot[own]] + np.arange(len(own)) - ahead[own]]
    task_of = ahead[slot_class[program.slot]] + seen.position
    indptr, edges = _rows(program.indptr, kept)
    route, table = _folded_routes(seen, carried, slot_class, resource_class, kept)
    small = FlowProgram(
        capacity_bytes_per_s=program.capacity_bytes_per_s[np.unique(resource_class, return_index=True)[1]],
        delay_s=program.delay_s[kept],
        num_bytes=program.num_bytes[kept],
        weight=program.weight[kept],
        priority=program.priority[kept],
        release_s=program.release_s[kept],
        route=route,
        queue=own,
        indptr=indptr,
        indices=task_of[program.indices[edges]],
        **table,
    )
    return Fold(program=small, task=task_of, kept=kept)


def _rows(indptr: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row pointers and the entries of some rows of a CSR matrix."""
    length = indptr[kept + 1] - indptr[kept]
    ahead = np.concatenate([[0], np.cumsum(length)])
    row = np.repeat(np.arange(len(kept)), length)
    return ahead.astype(np.int64), indptr[kept[row]] + np.arange(len(row)) - ahead[row]


def _folded_routes(
    seen: _Description,
    carried: _Carried,
    slot_class: np.ndarray,
    resource_class: np.ndarray,
    kept: np.ndarray,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the route of each kept task and the table of routes, one for each run of each class.

    A run occupies the kept resource of a class as much as the equal runs of all slots of its class together.
    """
    kept_resource = np.unique(resource_class, return_index=True)[1]
    runs_before = np.zeros(_num(slot_class) + 1, dtype=np.int64)
    np.maximum.at(runs_before[1:], slot_class[seen.run_slot], seen.run_index + 1)
    np.cumsum(runs_before, out=runs_before)
    run_class = runs_before[slot_class[seen.run_slot]] + seen.run_index
    is_kept = kept_resource[resource_class[carried.resource]] == carried.resource
    num_classes = len(kept_resource)
    key = run_class[carried.run[is_kept]] * num_classes + resource_class[carried.resource[is_kept]]
    cells, cell_of = np.unique(key, return_inverse=True)
    usage = np.bincount(cell_of, carried.usage[is_kept], minlength=len(cells)).astype(np.float64)
    counts = np.bincount(cells // num_classes, minlength=runs_before[-1])
    table = {
        "route_indptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "route_resources": cells % num_classes,
        "route_usage": usage,
    }
    return run_class[seen.run_of_task[kept]], table
