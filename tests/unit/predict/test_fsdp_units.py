"""Units of FSDP and how many go ahead, against a step played event by event and by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from foreshard import api
from foreshard.advise.fsdp_units import best_of, unit_advice
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.errors import SpecError
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.graph.lowering import lower
from foreshard.predict.graph.prices import group_prices, unit_starts
from foreshard.predict.memory import plan_memory
from foreshard.predict.tasks.collectives import shard_times
from foreshard.sim import critical_path

# Nothing slows computation, so that a step is its order alone.
CONSTANTS = TrainingConstants(fsdp_contention=0.0)
REDUCES_EACH = "hf@4"  # every micro-batch: later releases reduce behind the last one
SLOW, FAST = "2x4xa100-sxm-80gb@50Gb/s", "1x4xh100-sxm"


def case_of(cluster, count, layers=5, **units):
    """Return a run of a few blocks with so many micro-batches."""
    model = api.load_model("llama3-8b")
    model = replace(model, blocks=model.blocks[:layers], vocab=32000)
    cluster = api.load_cluster(cluster)
    plan = api.make_plan(
        model, cluster, zero=3, seq_len=2048, framework=REDUCES_EACH, global_batch=count * cluster.num_devices
    )
    return PlannedRun(
        model=model, cluster=cluster, plan=replace(plan, **units), framework=load_framework(REDUCES_EACH)
    )


def prices_of(case):
    (prices,) = group_prices(case, build_batch([case], CONSTANTS))
    return prices


def makespan_s(prices):
    return critical_path.run(lower([prices], 0.0).program).makespan_s


def played_s(cluster, count, wrap, depth):
    """Seconds of the step as devices play it: one stream computes, one moves, first come first served.

    Of unit prices only those of single blocks are taken; seconds of a unit are sums, its collectives are
    priced anew.
    """
    blocks = prices_of(case_of(cluster, count)).units[0][0]
    own = prices_of(case_of(cluster, count, wrap=wrap, prefetch=depth))
    machine, size = own.machines[0], len(blocks.params)
    cuts = (
        [0, size] if wrap == "model" else [0, *range(1, size - 1, wrap), size - 1, size]
    )  # embedding, blocks, head
    spans = [slice(a, b) for a, b in pairwise(cuts)]
    moved = [shard_times(blocks.params[s].sum(), 0.0, machine) for s in spans]
    kept = [wrap == "model" or k == len(spans) - 1 for k in range(len(spans))]  # the head is
    pieces, forward_s, backward_s = [], own.op_s[0, 0, 0, 0], own.op_s[1, 0, 0, 0]
    for _ in range(count):
        for k, s in enumerate(spans):
            seconds = blocks.forward[s].sum() * forward_s + moved[k].copy_weights
            pieces.append((k, seconds, moved[k].gather, 0.0))
        for k, s in reversed(list(enumerate(spans))):
            copies = moved[k].copy_gradients + (0.0 if kept[k] else moved[k].copy_weights)
            seconds = blocks.backward[s].sum() * backward_s + copies
            pieces.append((k, seconds, 0.0 if kept[k] else moved[k].gather, moved[k].scatter))
    alone = depth == 0 or wrap == "model"
    return _played(pieces, 0 if alone else depth, 1 if alone else 2) + float(own.optimizer_s[0])


def _played(pieces, depth, waits):
    leaves = [[] for _ in range(len(pieces) + 1)]  # gathers asked for when so many pieces have ended
    latest = 0
    for i, (unit, _, gather, scatter) in enumerate(pieces):
        if gather > 0.0:
            begin = max(i - depth, 0)
            if depth > 1:
                used = max((j + 1 for j in range(i) if pieces[j][0] == unit), default=0)
                if scatter == 0.0:  # a forward: behind the backward before it
                    used = max(used, max((j + 1 for j in range(i) if pieces[j][3] > 0.0), default=0))
                begin = max(begin, min(used, i - 1))
            latest = max(begin, latest)
            leaves[latest].append(i)
    queue, free_s, done_s, sent_s = deque(), 0.0, {}, {}
    now_s = 0.0
    for i in range(len(pieces) + 1):
        if i and pieces[i - 1][3] > 0.0:
            queue.append(("scatter", i - 1, pieces[i - 1][3]))
        queue.extend(("gather", j, pieces[j][2]) for j in leaves[i])
        while queue:
            what, j, seconds = queue.popleft()
            free_s = max(free_s, now_s) + seconds
            (done_s if what == "gather" else sent_s)[j] = free_s
        if i == len(pieces):
            break
        now_s = max(now_s, done_s.get(i, 0.0), sent_s.get(i - waits, 0.0)) + pieces[i][1]
    return max(now_s, free_s)


@pytest.mark.parametrize(("cluster", "count"), [(SLOW, 3), (FAST, 1)])
def test_every_choice_takes_as_long_as_when_it_is_played(cluster, count):
    for wrap in (1, 2, 3, "model"):
        for depth in range(5):
            made = makespan_s(prices_of(case_of(cluster, count, wrap=wrap, prefetch=depth)))
            assert made == pytest.approx(played_s(cluster, count, wrap, depth), rel=1e-9), (wrap, depth)


def test_nothing_stated_is_one_block_and_one_ahead():
    stated = prices_of(case_of(SLOW, 2, wrap=1, prefetch=1))
    assert makespan_s(stated) == makespan_s(prices_of(case_of(SLOW, 2)))


def test_a_whole_model_hides_nothing_and_is_gathered_once():
    prices = prices_of(case_of(SLOW, 2, wrap="model", prefetch=3))
    (units,) = prices.units[0]
    busy = prices.op_s[:2, 0, 0, 0].sum() + units.copy_weights_s.sum() + units.copy_gradients_s.sum()
    moved = units.gather_s.sum() + units.scatter_s.sum()
    assert len(units.params) == 1 and not units.regather_s.any()
    assert makespan_s(prices) == pytest.approx(2 * (busy + moved) + prices.optimizer_s[0], rel=1e-12)


@pytest.mark.parametrize("wrap", [1, 2])
def test_gathers_further_ahead_never_lengthen_a_step_that_reduces_nothing(wrap):
    """Else a reduction may wait for gathers asked for before it, and computation for the reduction."""
    taken = []
    for depth in range(6):
        prices = prices_of(case_of(SLOW, 2, layers=8, wrap=wrap, prefetch=depth))
        units = [[replace(one, scatter_s=0.0 * one.scatter_s) for one in row] for row in prices.units]
        taken.append(makespan_s(replace(prices, units=units)))
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(taken))
    assert taken[2] < taken[1] < taken[0]


def test_memory_never_falls_with_units_ahead_nor_with_larger_units():
    peaks = np.array(
        [
            [
                plan_memory(case_of(FAST, 2, layers=8, wrap=wrap, prefetch=depth))[0].peak_bytes
                for depth in range(6)
            ]
            for wrap in (1, 2, 4, 8)
        ]
    )
    assert (np.diff(peaks, axis=0) >= 0).all() and (np.diff(peaks, axis=1) >= 0).all()
    assert peaks[0, -1] > peaks[0, 0] and peaks[-1, 0] > peaks[0, 0]


def test_tokens_of_experts_are_counted_before_the_next_unit_is_asked_for():
    model = api.load_model("mixtral-8x7b")
    cluster = api.load_cluster("1x8xh100-sxm")
    plan = api.make_plan(model, cluster, zero=3, seq_len=1024, framework="torchtitan@2024")
    case = PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework("torchtitan@2024"))
    single = prices_of(case).units[0][0]
    pairs = prices_of(replace(case, plan=replace(plan, wrap=2))).units[0][0]
    forward = sum(single.forward_s.values())
    # The second block of a pair counts after the whole of the first one has run.
    assert pairs.counting_s[2] == pytest.approx(forward[1] + single.counting_s[3])
    explicit = prices_of(replace(case, plan=replace(plan, wrap=2, prefetch=1))).units[0][0]
    assert single.counting_s.any() and not explicit.counting_s.any()


def test_a_last_unit_may_be_short():
    is_end = np.array([True, *[False] * 5, True])
    assert unit_starts(is_end, 2).tolist() == [0, 1, 3, 5, 6]
    assert unit_starts(is_end, 0).tolist() == [0]


def request_of(cluster="4x8xh100-sxm@400Gb/s", **choices):
    choices = {"zero": 3, "framework": "torchtitan", "seq_len": 4096} | choices
    return api.request(api.load_model("llama3-8b"), api.load_cluster(cluster), **choices)


def test_advice_is_the_shortest_step_that_fits():
    request = request_of()
    advice = unit_advice(request, prefetch=(1, 2), wrap=(1, 4, "model"))
    assert len(advice.choices) == 5  # a whole model has none ahead, and counts once
    assert advice.default.step_time_s == request.predict().step_time_s
    least_s = min(choice.step_time_s for choice in advice.choices if choice.fits)
    assert advice.best.fits and advice.best.step_time_s <= least_s * (1 + 1e-4)


def test_of_steps_as_short_the_one_of_less_memory_is_best():
    advice = unit_advice(request_of("1x8xh100-sxm"), prefetch=(1, 4), wrap=(1,))
    near, far = advice.choices
    assert near.step_time_s == pytest.approx(far.step_time_s) and near.peak_bytes <= far.peak_bytes
    assert best_of(reversed(advice.choices)) is near


def test_what_does_not_fit_is_never_best():
    request = request_of("1x8xa100-sxm-40gb", seq_len=2048, recompute="full")
    advice = unit_advice(request, prefetch=(1,), wrap=(1, "model"))
    assert [choice.fits for choice in advice.choices] == [True, False]
    assert advice.best is advice.choices[0]
    assert unit_advice(request_of("1x1xrtx-3090"), prefetch=(1,), wrap=(1,)).best is None


@pytest.mark.parametrize(
    ("choices", "cause"),
    [
        ({"framework": "megatron-core", "wrap": 2}, "PyTorch's FSDP"),
        ({"framework": "maxtext", "prefetch": 2}, "PyTorch's FSDP"),
        ({"framework": "composer", "prefetch": 2}, "at most one unit"),
        ({"zero": 1, "framework": "hf", "wrap": 2}, "zero 2 and 3"),
        ({"pp": 2, "wrap": 2}, "pipeline"),
        ({"wrap": 0}, "from 1"),
        ({"wrap": "layer"}, "model"),
        ({"prefetch": -1}, "from 0"),
        ({"prefetch": True}, "from 0"),
    ],
)
def test_units_that_fsdp_does_not_take_are_refused(choices, cause):
    with pytest.raises(SpecError, match=cause):
        request_of(**choices).predict()


def test_closed_form_takes_no_other_units_than_single_blocks():
    with pytest.raises(SpecError, match="block by block"):
        request_of(wrap=2, engine="analytical").predict()
    request_of(prefetch=0, engine="analytical").predict()


def test_a_plan_file_keeps_units(tmp_path):
    from foreshard.spec.plan_file import parse_plan

    plan = request_of(prefetch=2, wrap="model").to_plan()
    assert parse_plan(plan.to_dict()) == plan
