"""Buckets and algorithms of sums follow the links, where the plan states them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard.comm.fusion.rules import MIB
from foreshard.control.controller import Controller
from foreshard.control.sums import SCHEDULES, _segments, sum_s, with_best_sums
from foreshard.spec.online import LinkSeen, StepMeasured
from foreshard.spec.plan_file import parse_plan

LAYERS = 6


def replicas(ranks, *, samples=4, **more):
    stages = [{"share": samples, "stages": [{"ranks": [r], "layers": [[0, LAYERS]]}]} for r in range(ranks)]
    table = {"global_batch": samples * ranks, "seq_len": 8, "groups": stages, "defaults": {"micro_batch": 2}}
    return parse_plan(table | more)


def world(cases, ranks, *, layer_s, sync, rate, latency_s):
    """Return a chain and a state of equal links."""
    chain = cases.chain(np.full(LAYERS, layer_s), ranks, boundary=1.0, sync=sync, saved=1.0, memory=1e12)
    apart = ~np.eye(ranks, dtype=bool)
    links = {"bandwidth_bytes_per_s": np.where(apart, rate, 1e15), "latency_s": apart * latency_s}
    return chain, cases.state(np.ones(ranks), **links)


def test_a_ring_in_one_bucket_is_the_formula_and_small_buckets_hide_behind_the_backward(cases):
    chain, state = world(cases, 4, layer_s=0.3, sync=MIB, rate=1e8, latency_s=1e-3)
    segments = list(_segments(replicas(4), chain, state))
    assert [owners for owners, _ in segments] == [(0, 1, 2, 3)]
    ring_s = 6 * (1e-3 + LAYERS * MIB / 4 / 1e8)  # Hockney: 2 (m - 1) rounds of a part each
    assert sum_s(segments, state, "ring", None) == pytest.approx(ring_s)
    last_s = 6 * (1e-3 + MIB / 4 / 1e8)  # of the last layer's gradients, when all others are summed
    assert sum_s(segments, state, "ring", MIB) == pytest.approx(last_s)
    late = list(_segments(replicas(4, comm={"grad_overlap": False}), chain, state))
    assert sum_s(late, state, "ring", MIB) == pytest.approx(LAYERS * last_s)


@pytest.mark.parametrize("seed", range(6))
def test_no_candidate_beats_what_is_chosen_by_more_than_is_worth_a_change(cases, seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 9))
    chain, state = world(
        cases,
        ranks,
        layer_s=10 ** rng.uniform(-4, -1),
        sync=float(rng.integers(1, 40)) * MIB / 4,
        rate=10 ** rng.uniform(7, 10),
        latency_s=10 ** rng.uniform(-6, -2),
    )
    plan = replicas(ranks, collectives="ring", buckets=2 * MIB)
    chosen = with_best_sums(plan, chain, state, 1e-9)
    assert replace(chosen, collectives="ring", buckets=2 * MIB) == plan, "nothing else changes"
    segments = list(_segments(plan, chain, state))
    left_s = sum_s(segments, state, chosen.collectives, chosen.buckets)
    for algorithm in SCHEDULES:
        for size in (MIB, 2 * MIB, 8 * MIB, 64 * MIB):
            assert left_s <= sum_s(segments, state, algorithm, size) * (1 + 1e-9) + 1e-10
    assert with_best_sums(plan, chain, state, 1e9) is plan, "too little to be worth it"
    assert with_best_sums(replicas(ranks), chain, state, 1e-9) == replicas(ranks), "not stated, not changed"
    assert with_best_sums(replace(plan, collectives="auto"), chain, state, 1e-9).collectives == "auto"


def test_slow_starts_make_for_a_tree_and_large_buckets_and_slow_links_for_a_ring(cases):
    plan = replicas(8, collectives="ring", buckets=1)
    chain, state = world(cases, 8, layer_s=1e-6, sync=1e3, rate=1e9, latency_s=0.01)
    far = with_best_sums(plan, chain, state, 0.1)
    assert (far.collectives, far.buckets) == ("tree", MIB), "all gradients at once, in fewer rounds"
    chain, state = world(cases, 8, layer_s=1e-6, sync=50 * MIB, rate=1e7, latency_s=1e-6)
    assert with_best_sums(far, chain, state, 1.0).collectives == "ring", "each byte passes a link the least"


def test_the_controller_orders_other_sums_when_measured_links_change(cases):
    chain, state = world(cases, 4, layer_s=0.05, sync=4.0 * MIB, rate=1e10, latency_s=1e-5)
    plan = replicas(4, buckets=24 * MIB)
    for steers in (True, False):
        controller = Controller(chain, state, plan, steers_sums=steers, max_stages=1)
        orders = []
        for step in range(12):
            if step == 4:
                for a in range(4):
                    for b in range(4):
                        if a != b:
                            orders += controller.on(LinkSeen(step=step, source=a, target=b, bytes_per_s=5e7))
            speeds = dict.fromkeys(range(4), 1.0)
            measured = StepMeasured(step=step, time_s=controller.choice.time_s, relative_speed=speeds)
            orders += controller.on(measured)
            controller.check_invariants()
        kinds = [order.kind for order in orders if order.plan is not None]
        assert kinds == (["re-bucket"] if steers else []), [order.reason for order in orders]
        assert (controller.plan.buckets < 24 * MIB) == steers and controller.counts["re-bucket"] == steers
        assert replace(controller.plan, buckets=plan.buckets) == plan
