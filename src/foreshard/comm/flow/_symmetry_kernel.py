"""The loops that describe each slot of a flow program by hashes: plain Python that numba can also compile.

All numbers that are hashed are ``uint64`` and wrap around; plain Python needs
``numpy.errstate(over="ignore")`` for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)  # splitmix64 (Steele et al. 2014)
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
STEP = np.uint64(0x9E3779B97F4A7C15)


def mixed(value: Any) -> Any:
    """Return 64 bits that look random and differ for different values."""
    value = (value ^ (value >> SHIFT_1)) * FACTOR_1
    value = (value ^ (value >> SHIFT_2)) * FACTOR_2
    return value ^ (value >> SHIFT_3)


def joined(first: Any, second: Any) -> Any:
    """Return one hash of two values, in this order."""
    return mixed(first * STEP + mixed(second + STEP))


def order_by_slot(slot: Any, first: Any, order: Any, position: Any) -> None:
    """Sort tasks by slot and number them inside each; `first`, of slots + 1 entries, comes in as zeros."""
    for task in range(len(slot)):
        position[task] = first[slot[task] + 1]
        first[slot[task] + 1] += 1
    for i in range(len(first) - 1):
        first[i + 1] += first[i]
    for task in range(len(slot)):
        order[first[slot[task]] + position[task]] = task


def describe(
    slot: Any,
    position: Any,
    columns: Any,
    route: Any,
    indptr: Any,
    content: Any,
    last_run: Any,
    run_of_task: Any,
    run_slot: Any,
    run_route: Any,
    run_index: Any,
) -> int:
    """Hash what the tasks of each slot are, and divide them into runs on one route; return how many runs.

    `content` is of all that says nothing of other slots and of resources. It comes in as zeros, ``last_run``
    as -1.
    """
    num_runs = 0
    for task in range(len(slot)):  # in the order of the columns: in that of slots, memory is the slower part
        own = slot[task]
        total = content[own]
        run = last_run[own]
        if run < 0 or run_route[run] != route[task]:
            run_slot[num_runs] = own
            run_route[num_runs] = route[task]
            run_index[num_runs] = 0 if run < 0 else run_index[run] + 1
            run = num_runs
            last_run[own] = run
            num_runs += 1
            total = joined(total, np.uint64(position[task]))
        run_of_task[task] = run
        for i in range(len(columns)):
            total = total * STEP + columns[i][task]
        content[own] = mixed(total * STEP + np.uint64(indptr[task + 1] - indptr[task]))
    return num_runs


def describe_waits(
    order: Any,
    first: Any,
    slot: Any,
    position: Any,
    indptr: Any,
    indices: Any,
    first_pair: Any,
    pair_other: Any,
    pair_hash: Any,
    last_pair: Any,
) -> None:
    """Hash what the tasks of each slot wait for, in a pair for each other slot.

    The hash of a pair is of which task waits for which, by their positions. ``last_pair`` comes in as -1.
    """
    num_pairs = 0
    for own in range(len(first) - 1):
        first_pair[own] = num_pairs
        for at in range(first[own], first[own + 1]):
            task = order[at]
            for i in range(indptr[task], indptr[task + 1]):
                other = slot[indices[i]]
                pair = last_pair[other]
                if pair < first_pair[own]:
                    pair = num_pairs
                    num_pairs += 1
                    last_pair[other] = pair
                    pair_other[pair], pair_hash[pair] = other, np.uint64(0)
                pair_hash[pair] += joined(np.uint64(at - first[own]), np.uint64(position[indices[i]]))
    first_pair[len(first) - 1] = num_pairs


def peel(first_pair: Any, after_indptr: Any, after: Any, waits: Any, order: Any) -> int:
    """List slots behind all that they wait for, as far as they wait in no circle; return how many those are.

    The slots in circles and behind them follow in `order`; ``waits`` comes in as the pairs of each slot.
    """
    num_slots = len(first_pair) - 1
    size, at = 0, 0
    for slot in range(num_slots):
        if waits[slot] == 0:
            order[size] = slot
            size += 1
    while at < size:
        slot = order[at]
        at += 1
        for i in range(after_indptr[slot], after_indptr[slot + 1]):
            waits[after[i]] -= 1
            if waits[after[i]] == 0:
                order[size] = after[i]
                size += 1
    num_peeled = size
    for slot in range(num_slots):
        if waits[slot] > 0:
            order[size] = slot
            size += 1
    return num_peeled


def spread(
    first_pair: Any,
    pair_other: Any,
    pair_hash: Any,
    order: Any,
    num_peeled: int,
    of_runs: Any,
    old: Any,
    new: Any,
    is_new: Any,
) -> None:
    """Hash each slot with those it waits for: with their new hashes where those come before it in any order.

    A chain of slots so gets its final classes in one pass instead of one for each slot of it. Slots in
    circles see each other's old hashes, or else their classes would depend on their numbers.
    """
    for n in range(len(order)):
        slot = order[n]
        total = of_runs[slot]
        for pair in range(first_pair[slot], first_pair[slot + 1]):
            other = pair_other[pair]
            total += joined(pair_hash[pair], new[other] if is_new[other] else old[other])
        new[slot] = joined(old[slot], total)
        is_new[slot] = n < num_peeled
