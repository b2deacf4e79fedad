"""Bounds on pipelines of unequal stages, against 1F1B and interleaved schedules played op by op.

`FORESHARD_BOUND_LAWS=2000` draws so many problems instead of a few: minutes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.laws.test_least_filling_laws import problem_of
from tests.unit.planner.test_brute_force import every_template, random_problem

from foreshard.graph.pipeline_schedules import stage_order
from foreshard.planner.solver.column_enumeration import ColumnEnumeration, memory_for
from foreshard.planner.solver.least_pricing import LeastPricing
from foreshard.planner.solver.problem import (
    Problem,
    StageSpan,
    Template,
    pipeline_rate,
    tail_seconds,
    takes_of,
)
from foreshard.planner.solver.search_state import SearchState
from foreshard.planner.solver.time_budget import ENDLESS

DRAWN = int(os.environ.get("FORESHARD_BOUND_LAWS", "40"))
TEMPLATES, SHARES = 12, 3
"""Pipelines of a problem, and shares of each, that are played."""


def played(forward_s: np.ndarray, backward_s: np.ndarray, parts: list[float], chunks: int) -> np.ndarray:
    """Return when each stage ends: every stage does its ops in order, as soon as what they need is there.

    `parts` are the micro-batches as parts of a whole one.
    """
    stages, places = len(forward_s), len(forward_s) * chunks
    schedule = "interleaved" if chunks > 1 else "1f1b"
    rows = stage_order(schedule, num_stages=stages, num_micro_batches=len(parts), num_chunks=chunks)
    orders = [row.tolist() for row in rows]
    done: dict[tuple[int, int, int], float] = {}
    free, at = np.zeros(stages), [0] * stages
    while any(at[i] < len(orders[i]) for i in range(stages)):
        for i in range(stages):
            while at[i] < len(orders[i]):
                op, chunk, j = orders[i][at[i]]
                place = chunk * stages + i
                if op == 0:
                    needs = done.get((0, place - 1, j)) if place else 0.0
                else:
                    needs = done.get((1, place + 1, j) if place < places - 1 else (0, place, j))
                if needs is None:
                    break
                op_s = (forward_s if op == 0 else backward_s)[i] * parts[j]
                free[i] = done[op, place, j] = max(free[i], needs) + op_s
                at[i] += 1
    return free


def played_problem(seed: int, *, chunks: int) -> Problem:
    """A problem without messages whose backwards, known or not, are what forwards leave of a stage's time."""
    drawn = random_problem(seed)
    deeper = replace(drawn, hop_s=np.zeros_like(drawn.hop_s), max_stages=5, jitter=0.0, leave_s=None)
    deeper = replace(deeper, leave_tail_s=None, domains=(), global_batch=24)
    rooms = np.where(deeper.max_in_flight > 0, 99, 0)
    scaled = replace(deeper, chunks=chunks, global_batch=24 * chunks, grain=chunks * deeper.grain)
    return replace(scaled, max_in_flight=rooms, backward_s=None)


def cases(seed: int, chunks: int) -> Iterator[tuple[Problem, Template, int, float]]:
    """Yield pipelines with a share, in samples by chunk, and when the last of their tails ends."""
    rng = np.random.default_rng([seed, 3])
    problem = played_problem(seed, chunks=chunks)
    part = rng.uniform(0.02, 0.98, problem.time_s.shape)
    forward = problem.time_s * part
    known = problem.forward_s is not None
    problem = replace(
        problem,
        forward_s=forward if known else None,
        backward_s=problem.time_s - forward if known else None,
    )
    templates = every_template(problem)
    for at in rng.choice(len(templates), min(TEMPLATES, len(templates)), replace=False):
        template = templates[at]
        options = [part.option for part in template]
        types = [int(problem.types[part.start, part.stop]) for part in template]
        forward_s, stages = forward[options, types], len(options)
        backward_s, tails = problem.time_s[options, types] - forward_s, problem.tail_s[0][options, types]
        size, grain = int(problem.micro_batch[options[0]]), int(problem.grain[options].max()) // chunks
        for share in rng.integers(size, 24 + 1, SHARES).tolist():
            whole, short = divmod(-(-share // grain) * grain, size)
            parts = [1.0] * whole + [short / size] * (short > 0)
            if chunks > 1 and stages > 1:
                if len(parts) % stages:
                    continue
                ends = played(forward_s, backward_s, parts, chunks)
            else:
                ends = played(chunks * forward_s, chunks * backward_s, parts, 1)
            yield problem, template, share * chunks, float((ends + tails).max())


@pytest.mark.parametrize("chunks", [1, 2])
def test_no_bound_lies_above_a_schedule_that_was_played(chunks):
    """The least cost, boxes split at random, and the listed pipelines of a time."""
    pytest.importorskip("numba")
    checked, close = 0, []
    for seed in range(DRAWN):
        rng = np.random.default_rng([seed, 4])
        duals, prices, tables = None, None, 0
        for problem, template, share, end_s in cases(seed, chunks):
            rate = pipeline_rate(problem, template, filling="least")
            least_s = rate.seconds(share) + tail_seconds(problem, template, 1, filling="least")
            assert least_s <= end_s * (1 + 1e-9), (seed, template, share)
            close.append(least_s / end_s)
            if prices is None:
                duals = rng.random(len(problem.counts)) * 3.0
                prices = LeastPricing(problem=problem, pipelines=(1, 1), duals=duals, longest_s=np.inf)
                prices.start()
            boxes = list(prices.boxes.values())
            for box in rng.choice(np.array(boxes, dtype=object), min(3, len(boxes)), replace=False):
                prices.parts(box, float(rng.uniform(0.0, 2.0 * share)))
            net = share - float(takes_of(problem, template) @ duals)
            assert box_seconds_of(prices, template, net) <= end_s * (1 + 1e-9), (seed, template, share)
            checked += 1
            if tables < 2:
                tables += 1
                listed = listed_samples(problem, end_s * (1 + 1e-9))
                assert listed[tuple(takes_of(problem, template).tolist())] >= share, (seed, template, share)
    assert checked > 8 * DRAWN
    assert np.median(close) > (0.97 if chunks == 1 else 0.8)


@pytest.mark.parametrize("chunks", [2, 4])
def test_what_waits_for_stages_behind_the_slowest_counts_in_chunks(chunks):
    """Deep pipelines of nearly equal stages, often the first the slowest; the last round short."""
    rng = np.random.default_rng(chunks)
    close = []
    for _ in range(DRAWN):
        stages, size = int(rng.integers(2, 9)), int(rng.choice([1, 4]))
        times = 1.0 - rng.choice([0.02, 0.1, 0.5]) * rng.random(stages)
        times[int(rng.choice([0, rng.integers(stages)]))] = 1.05
        forward_s = times * rng.choice([rng.uniform(0.1, 0.9), 0.25])
        problem = problem_of((chunks * times).tolist(), size)
        shape = problem.time_s.shape
        problem = replace(
            problem,
            time_s=problem.time_s / chunks,
            grain=chunks * problem.grain,
            chunks=chunks,
            forward_s=np.broadcast_to(forward_s[:, None], shape),
            backward_s=np.broadcast_to((times - forward_s)[:, None], shape),
        )
        template = tuple(StageSpan(option=i, start=i, stop=i + 1) for i in range(stages))
        share = int(rng.integers(1, 9)) * stages * size - int(rng.integers(size))
        parts = [1.0] * (share // size) + [share % size / size] * (share % size > 0)
        rate = pipeline_rate(problem, template, filling="least")
        end_s = float(played(forward_s, times - forward_s, parts, chunks).max())
        assert rate.seconds(chunks * share) <= end_s * (1 + 1e-9), (times, forward_s, share, size)
        if times[0] == 1.05 and forward_s[0] <= 0.3 * times[0]:
            close.append(rate.seconds(chunks * share) / end_s)
    assert np.median(close) > 0.98


def box_seconds_of(prices: LeastPricing, template: Template, net_samples: float) -> float:
    """Return the bound of the box of a pipeline; the least of all where quicker stages stand for its own."""
    problem = prices.problem
    options = [part.option for part in template]
    types = [int(problem.types[part.start, part.stop]) for part in template]
    slowest, tail = problem.time_s[options, types].max(), problem.tail_s[0][options, types].max()
    family = next(one for one in problem.families if one.micro_batch == problem.micro_batch[options[0]])
    boxes = [box for box in prices.boxes.values() if box.family == family]
    stages = prices.stages[family]
    if set(zip(options, types, strict=True)) <= set(
        zip(stages.options.tolist(), stages.types.tolist(), strict=True)
    ):
        boxes = [
            box
            for box in boxes
            if box.bottleneck_s[0] * (1 - 1e-12) <= slowest <= box.bottleneck_s[1] * (1 + 1e-12)
            and box.tail_s[0] <= tail <= box.tail_s[1]
        ]
    return min(box.seconds(net_samples) for box in boxes)


def listed_samples(problem: Problem, seconds: float) -> dict[tuple[int, ...], float]:
    """Return by demand the samples that any pipeline is said to process in some seconds."""
    memory = memory_for(problem)
    assert memory is not None
    state = SearchState(problem=problem, budget=ENDLESS, target_gap=0.0)
    columns = ColumnEnumeration(
        pricing=state.pricing((1, 1), np.full(len(problem.counts), 1e-3)),
        seconds=seconds,
        pipeline_dual=0.0,
        num_pipelines=1,
        memory=memory,
        budget=ENDLESS,
    )
    assert columns.list_negative()
    table = columns.table()
    return dict(zip(map(tuple, memory.demands(table.codes).tolist()), table.samples, strict=True))
