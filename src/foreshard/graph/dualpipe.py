"""Orders of work of DualPipe: micro-batches enter a pipeline at both ends, forwards beside backwards.

`dualpipev` folds the pipeline over half of the ranks: chunk 0 on the way down, chunk 1 on the way back.
`dualpipe` keeps a second copy of the weights: chunk 0 of a stage is its own part of the model, for the first
half of the micro-batches; chunk 1 is the part of the stage as far from the other end, for the second half.

Source
------
DeepSeek-V3 report (arXiv 2412.19437) section 3.2.1; github.com/deepseek-ai/DualPipe bb214e8 dualpipe.py,
dualpipev.py; torch 2.13 distributed/pipelining/schedules.py ScheduleDualPipeV.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from foreshard.graph.zero_bubble import Op, numbered


def dualpipev_order(num_stages: int, num_micro_batches: int, stage: int) -> np.ndarray:
    """Return the order of DualPipeV on a stage."""
    behind = num_stages - stage - 1
    rows: list[tuple[int, int]] = []
    waiting: deque[int] = deque()  # chunks whose weight gradients are to come

    def add(*ops: tuple[int, int]) -> None:
        rows.extend(ops)
        waiting.extend(chunk for op, chunk in ops if op == Op.BACKWARD_INPUT)

    def weigh() -> None:
        if waiting:
            rows.append((Op.BACKWARD_WEIGHT, waiting.popleft()))

    add(*[(Op.FORWARD, 0)] * (2 * behind))
    add(*[(Op.FORWARD, 0), (Op.FORWARD, 1)] * (stage + 1))
    for _ in range(behind):
        add((Op.BACKWARD_INPUT, 1))
        weigh()
        add((Op.FORWARD, 1))
    both = [(Op.FORWARD, 0), (Op.BACKWARD, 1), (Op.FORWARD, 1), (Op.BACKWARD, 0)]
    add(*both * (num_micro_batches - 2 * num_stages + stage + 1))
    add(*[(Op.BACKWARD, 1), (Op.FORWARD, 1), (Op.BACKWARD, 0)] * behind)
    # Of the rest the second half leaves weight gradients for later.
    half, odd = (stage + 1) // 2, stage % 2
    for i in range(stage + 1):
        for chunk in (1, 0):
            is_split = i > half or (i == half and (odd == 1 or chunk == 0))
            add((Op.BACKWARD_INPUT if is_split else Op.BACKWARD, chunk))
    for _ in range(behind):
        weigh()
        add((Op.BACKWARD_INPUT, 0))
    while waiting:
        weigh()
    return numbered(rows, num_micro_batches)


def dualpipe_order(num_stages: int, num_micro_batches: int, stage: int) -> np.ndarray:
    """Return the order of DualPipe on a stage: DualPipeV on half of the stages, from the nearer end."""
    half = num_micro_batches // 2
    is_behind = stage >= num_stages // 2
    order = dualpipev_order(num_stages // 2, half, num_stages - 1 - stage if is_behind else stage)
    order[:, 1] = order[:, 1] ^ is_behind
    order[:, 2] += half * order[:, 1]
    return order
