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

from foreshard.graph.pipeline import pipeline_durations, pipeline_shape, program_of
from foreshard.graph.pipeline_schedules import stage_order
from foreshard.planner.mixed.interleaving import loosest, scaled
from foreshard.planner.solver.column_enumeration import ColumnEnumeration, memory_for
from foreshard.planner.solver.least_pricing import LeastPricing, box_seconds
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
from foreshard.sim import critical_path

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


def played_with_messages(
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    send_s: np.ndarray,
    parts: np.ndarray,
    chunks: int,
    beside: bool,
) -> float:
    """Return when the last op ends, lowered as the graph engine does: both ways share a stage's port.

    Times are of a chunk; the last of `send_s` joins the ends.
    """
    stages = len(forward_s)
    shape = pipeline_shape(
        "interleaved",
        num_stages=stages,
        num_micro_batches=len(parts),
        num_chunks=chunks,
        overlap_p2p=beside,
    )
    backward_port = shape.resource >= 2 * stages
    shape = replace(shape, resource=shape.resource - stages * backward_port)
    ops = np.ones((1, chunks, 1)) * parts
    seconds = pipeline_durations(
        shape,
        forward_s=forward_s[:, None, None] * ops,
        backward_s=backward_s[:, None, None] * ops,
        send_forward_s=send_s,
        send_backward_s=send_s,
    )
    return critical_path.run(program_of(shape, seconds)).makespan_s


def problem_with_messages(
    forward_s: np.ndarray, backward_s: np.ndarray, send_s: np.ndarray, size: int, chunks: int, beside: bool
) -> Problem:
    """A problem of one pipeline, times of all chunks: messages before a stage in `hop_s`, others in its time.

    In the mean of the chunks each end lacks a part of the message that joins them.
    """
    stages = len(forward_s)
    after_s = chunks * send_s
    after_s[-1] -= send_s[-1]
    work_s, port_s = forward_s + backward_s, after_s + np.roll(after_s, 1)
    hop_s = np.zeros((stages, stages))
    hop_s[np.arange(stages - 1), np.arange(1, stages)] = 0.0 if beside else after_s[:-1]
    own_s = np.maximum(work_s, port_s) if beside else work_s + after_s
    own_s[0] += 0.0 if beside else after_s[-1]
    problem = problem_of(own_s.tolist(), size)
    own = problem.types[np.arange(stages), np.arange(stages) + 1]
    is_own = np.zeros(problem.time_s.shape, dtype=bool)
    is_own[np.arange(stages), own] = True
    known = np.ones_like(problem.time_s)
    return replace(
        problem,
        time_s=np.where(is_own, problem.time_s, np.inf),
        max_in_flight=np.where(is_own, problem.max_in_flight, 0),
        shortest=np.zeros_like(problem.time_s),
        hop_s=hop_s,
        forward_s=forward_s[:, None] * known,
        backward_s=backward_s[:, None] * known,
    )


@pytest.mark.parametrize("beside", [False, True])
def test_no_bound_on_chunks_lies_above_a_schedule_that_was_played_with_messages(beside):
    """Passes take longer than forward and backward; one message is held where two are in the steady state.

    `loosest` holds for either number of chunks, though each has messages of its own: stages work in the
    same order however long that takes, so the sums of its bound are no longer with the least times of both.
    """
    pytest.importorskip("numba")
    rng, close, tightest = np.random.default_rng(beside), [], 0.0
    for _ in range(2 * DRAWN):
        stages, size = int(rng.integers(2, 8)), int(rng.choice([1, 4]))
        times = 1.0 - rng.choice([0.02, 0.1, 0.5]) * rng.random(stages)
        times[int(rng.choice([0, rng.integers(stages)]))] = 1.05
        forward_s = times * rng.choice([rng.uniform(0.1, 0.9), 0.25])
        backward_s = times - forward_s
        base_s = rng.choice([0.01, 0.1, 0.3]) * rng.random()
        base_s = base_s * (np.ones(stages) if rng.random() < 0.5 else rng.random(stages))
        share = int(rng.integers(1, 5)) * stages * size - int(rng.integers(size))
        whole, short = divmod(share, size)
        parts = np.array([1.0] * whole + [short / size] * (short > 0))
        template = tuple(StageSpan(option=i, start=i, stop=i + 1) for i in range(stages))
        problems, ends = {}, {}
        for chunks in (2, 4):
            send_s = base_s * rng.choice([1.0, rng.uniform(0.5, 1.5)])
            parts_s = forward_s, backward_s, send_s
            problems[chunks] = problem_with_messages(*parts_s, size, chunks, beside)
            chunk_s = forward_s / chunks, backward_s / chunks, send_s
            ends[chunks] = played_with_messages(*chunk_s, parts, chunks, beside)
            problem = scaled(problems[chunks], chunks)
            least_s = pipeline_rate(problem, template, filling="least").seconds(chunks * share)
            drawn = times, forward_s, send_s, share, size, chunks
            assert least_s <= ends[chunks] * (1 + 1e-9), drawn
            by_box_s = own_box_seconds(problem, template, chunks * share)
            assert by_box_s <= ends[chunks] * (1 + 1e-9), drawn
            assert by_box_s == pytest.approx(least_s, rel=0.2)
            close.append(least_s / ends[chunks])
        loose = pipeline_rate(loosest(problems), template, filling="least").seconds(4 * share)
        tightest = max(tightest, loose / min(ends.values()))
        assert loose <= min(ends.values()) * (1 + 1e-9), (times, forward_s, base_s, share, size)
    assert np.median(close) > (0.85 if beside else 0.9)
    assert tightest > 0.98


def own_box_seconds(problem: Problem, template: Template, samples: int) -> float:
    """Return the bound of a box that holds one pipeline alone, by the two sums of its stages."""
    before_s = problem.hop_s.max(0)[:, None]  # boxes are of problems with messages in their times
    flat = replace(problem, time_s=problem.time_s + before_s, hop_s=np.zeros_like(problem.hop_s))
    prices = LeastPricing(problem=flat, pipelines=(1, 1), duals=np.ones(1), longest_s=np.inf)
    prices.start()
    (box, *_), size = prices.boxes.values(), flat.micro_batch[0]
    stages = prices.stages_with(box.family)
    order = [stages.options.tolist().index(part.option) for part in template]
    slowest_s = stages.times_s.max()
    limits = slowest_s, slowest_s
    seconds = box_seconds(flat, stages, limits, 0.0, by_longest_tail=False, spares=True)[:, order]
    times_s, hidden_s = stages.times_s[order], stages.hidden_s[order]
    at = int(np.flatnonzero(times_s >= slowest_s * (1 - 1e-12))[-1])
    behind_s = max(0.0, (times_s[at + 1 :] - hidden_s[at]).sum())
    lost_s = seconds[0, : at + 1].sum() + behind_s + seconds[2, 0]
    own, rate = prices._least_of(box.family, box.path), size / slowest_s
    own_s = own.lost(rate, limits, 0.0, flat.chunks) / rate
    assert lost_s <= own_s + 1e-9 * abs(own_s)  # of equal slowest stages the box takes the longest backward
    return float(own_s + slowest_s * (samples / size - 1.0))


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
