"""The least that a pipeline takes by its problem, against 1F1B played op by op on random unequal stages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foreshard.planner.solver.problem import Problem, StageSpan, pipeline_rate


def played(forward_s, backward_s, shares) -> float:
    """Return the end of 1F1B: every stage does its ops in order, as soon as what they need is there."""
    stages, count = len(forward_s), len(shares)
    orders = []
    for i in range(stages):
        ahead = min(stages - 1 - i, count)
        order = [("F", j) for j in range(ahead)]
        for j in range(count - ahead):
            order += [("F", ahead + j), ("B", j)]
        orders.append(order + [("B", j) for j in range(count - ahead, count)])
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[i] < len(orders[i]) for i in range(stages)):
        for i in range(stages):
            while at[i] < len(orders[i]):
                op, j = orders[i][at[i]]
                if op == "F":
                    needs = done.get(("F", i - 1, j)) if i else 0.0
                else:
                    needs = done.get(("B", i + 1, j) if i < stages - 1 else ("F", i, j))
                if needs is None:
                    break
                op_s = forward_s[i] if op == "F" else backward_s[i]
                free[i] = done[op, i, j] = max(free[i], needs) + op_s * shares[j]
                at[i] += 1
    return max(free)


def problem_of(times: list[float], micro_batch: int) -> Problem:
    """Return a problem whose one pipeline has a layer and an option for each stage."""
    size = len(times)
    types = np.full((size + 1, size + 1), -1)
    types[np.triu_indices(size + 1, k=1)] = np.arange(size * (size + 1) // 2)
    shape = size, int(types.max()) + 1
    return Problem(
        counts=(size,),
        global_batch=1000,
        max_stages=size,
        types=types,
        takes=np.ones((size, 1), dtype=int),
        micro_batch=np.full(size, micro_batch),
        grain=np.ones(size, dtype=int),
        time_s=np.repeat(np.array(times)[:, None], shape[1], axis=1),
        copies=(1,),
        tail_s=np.zeros((1, *shape)),
        max_in_flight=np.full(shape, 99),
        hop_s=np.zeros((size, size)),
    )


@pytest.mark.parametrize("block", range(4))
def test_no_pipeline_takes_less_than_the_least(block):
    """Backwards of any part of a stage's time, as slow messages make them; a short last micro-batch."""
    rng = random.Random(block)
    ratios, full = [], []
    for _ in range(400):
        stages, micro_batch = rng.randint(1, 8), rng.choice([1, 2, 4, 8])
        spread = rng.choice([0.05, 0.3, 1.0])
        times = [1.0 - spread * rng.random() for _ in range(stages)]
        share = rng.randint(micro_batch, 20 * micro_batch)
        shares = [1.0] * (share // micro_batch) + [share % micro_batch / micro_batch] * bool(
            share % micro_batch
        )
        backward = rng.uniform(0.02, 0.98)
        problem = problem_of(times, micro_batch)
        template = tuple(StageSpan(option=i, start=i, stop=i + 1) for i in range(stages))
        rate = pipeline_rate(problem, template, filling="least")
        end_s = played([(1.0 - backward) * t for t in times], [backward * t for t in times], shares)
        assert rate.seconds(share) <= end_s * (1 + 1e-12), (times, share, micro_batch, backward)
        assert rate.samples(rate.seconds(share) * (1 + 1e-12)) >= share
        ratios.append(rate.seconds(share) / end_s)
        full.append(pipeline_rate(problem, template).seconds(share) / end_s)
    assert np.median(ratios) > 0.98
    assert max(full) > 1.01  # filling in full is no bound
