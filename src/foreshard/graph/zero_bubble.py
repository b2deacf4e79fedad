"""Orders of work of pipelines that split backwards: zb-h1, zb-h2 and zbv.

Rows are (op, chunk, micro-batch), as in `graph.pipeline_schedules`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Op(IntEnum):
    """What a stage does with one chunk and one micro-batch."""

    FORWARD = 0
    BACKWARD = 1  # both gradients at once
    BACKWARD_INPUT = 2  # gradient of the input, on the way to the previous stage
    BACKWARD_WEIGHT = 3  # gradient of the weights, free to wait


def delayed_weights(order: np.ndarray, delay: int) -> np.ndarray:
    """Split backwards; the weight gradient of k follows the input gradient of k + delay (or the last)."""
    is_backward = order[:, 0] == Op.BACKWARD
    position = np.flatnonzero(is_backward)
    weights = order[is_backward].copy()
    weights[:, 0] = Op.BACKWARD_WEIGHT
    split = order.copy()
    split[is_backward, 0] = Op.BACKWARD_INPUT
    follows = position[np.minimum(np.arange(len(position)) + delay, len(position) - 1)]
    rank = np.argsort(np.concatenate([np.arange(len(order)), follows]), kind="stable")
    return np.concatenate([split, weights])[rank]


def zb_h2_orders(num_stages: int, num_micro_batches: int) -> list[np.ndarray]:
    """Return the orders of ZB-H2: where all ops are equal, no stage waits between its first and last op.

    Every stage holds at most 2p - 1 micro-batches. An op takes one unit; of what is ready a stage runs the
    input gradient first, then a forward, and a weight gradient only where neither is ready or may start.

    Source
    ------
    Qi et al. 2023 (arXiv 2401.10241), section 2.3 and table 1: 2p - 1 micro-batches at the peak, no bubble.
    """
    most = 2 * num_stages - 1
    ready = np.full(
        (2, num_stages, num_micro_batches), np.inf
    )  # unit from which a forward, a gradient is there
    ready[0, 0] = 0
    done = np.zeros((3, num_stages), dtype=int)  # forwards, input and weight gradients of each stage
    orders: list[list[tuple[int, int, int]]] = [[] for _ in range(num_stages)]
    unit = 0
    while done[2].min() < num_micro_batches:
        for stage, order in enumerate(orders):
            forwards, inputs, weights = (int(count) for count in done[:, stage])
            if inputs < num_micro_batches and ready[1, stage, inputs] <= unit:
                order.append((Op.BACKWARD_INPUT, 0, inputs))
                done[1, stage] += 1
                if stage > 0:
                    ready[1, stage - 1, inputs] = unit + 1
            elif (
                forwards < num_micro_batches
                and ready[0, stage, forwards] <= unit
                and forwards - weights < most
            ):
                order.append((Op.FORWARD, 0, forwards))
                done[0, stage] += 1
                last = stage == num_stages - 1
                ready[int(last), stage + (not last), forwards] = unit + 1
            elif weights < inputs:
                order.append((Op.BACKWARD_WEIGHT, 0, weights))
                done[2, stage] += 1
        unit += 1
    return [np.array(order, dtype=np.int32) for order in orders]


def zbv_order(num_stages: int, num_micro_batches: int, stage: int) -> np.ndarray:
    """Return the order of ZB-V on a stage: chunk 0 on the way down the stages, chunk 1 on the way back.

    Source
    ------
    Qi et al. 2024 (arXiv 2405.15362); torch 2.13 distributed/pipelining/schedules.py ScheduleZBVZeroBubble.
    """
    behind = num_stages - stage
    count = max(2 * num_stages - 1, num_micro_batches)
    rows: list[tuple[int, int]] = []
    rows += [(Op.FORWARD, 0)] * (2 * behind - 1)
    rows += [(Op.FORWARD, 1), (Op.FORWARD, 0)] * stage
    up = [(Op.FORWARD, 1), (Op.BACKWARD_INPUT, 1), (Op.BACKWARD_WEIGHT, 1)]
    down = [(Op.BACKWARD_INPUT, 0), (Op.BACKWARD_WEIGHT, 0)]
    rows += up * behind
    steady = count - (2 * behind - 1 + stage)  # forwards of chunk 0 that are left
    rows += [(Op.FORWARD, 0), *down, *up] * steady
    rows += [*down, *up] * (count - (stage + behind + steady))
    given = [sum(row == (Op.BACKWARD_INPUT, chunk) for row in rows) for chunk in (0, 1)]
    rows += [(Op.BACKWARD_INPUT, 0), (Op.BACKWARD_INPUT, 1)] * (count - given[1])
    given[0] += count - given[1]
    rows += down * (count - given[0])
    rows += [
        (Op.BACKWARD_WEIGHT, chunk)
        for chunk in (1, 0)
        for _ in range(count - sum(row == (Op.BACKWARD_WEIGHT, chunk) for row in rows))
    ]
    return numbered(rows, num_micro_batches)


def numbered(rows: list[tuple[int, int]], num_micro_batches: int) -> np.ndarray:
    """Return (op, chunk, micro-batch) rows of ops that take the micro-batches of their chunk in turn.

    A backward counts as both of its gradients. Micro-batches beyond the last are left out.
    """
    count: dict[tuple[int, int], int] = {}
    found = []
    for op, chunk in rows:
        ops = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if op == Op.BACKWARD else (op,)
        number = count.get((ops[0], chunk), 0)
        for one in ops:
            count[one, chunk] = count.get((one, chunk), 0) + 1
        if number < num_micro_batches:
            found.append((op, chunk, number))
    return np.array(found, dtype=np.int32)
