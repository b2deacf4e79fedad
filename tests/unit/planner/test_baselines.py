"""Published planners: valid on any problem, never below the optimum, and the choice each is known for."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.planner.baselines import BASELINES, adopted, judge
from foreshard.planner.baselines.uniform_degrees import best_chain, even_cuts
from foreshard.planner.request import checked_request
from foreshard.planner.result import PlanResult
from foreshard.planner.solver.problem import Problem, faults, pipeline_rate, step_seconds
from foreshard.planner.solver.solve import solve
from foreshard.spec.checks import check_plan

NAMES = tuple(BASELINES)
SEEDS = range(8)


@lru_cache
def bound_s(seed: int) -> float:
    return solve(random_problem(seed), budget_s=1.0).lower_bound_s


def random_problem(seed: int) -> Problem:
    """Return two or three kinds of device, a few widths and micro-batches, up to eight layers."""
    rng = np.random.default_rng(seed)
    kinds, layers = int(rng.integers(1, 4)), int(rng.integers(2, 7))
    counts = tuple(int(n) for n in rng.integers(1, 5, size=kinds))
    rows = [
        (kind, devices, size, grain)
        for kind in range(kinds)
        for devices, grain in ((1, 1), (2, 1), (2, 2))
        for size in (2, 4)
        if devices <= counts[kind]
    ]
    start, stop = np.triu_indices(layers + 1, k=1)
    types = np.full((layers + 1, layers + 1), -1)
    types[start, stop] = np.arange(len(start))
    speed = rng.uniform(0.5, 3.0, size=kinds)
    weight = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, size=layers))])
    work = weight[stop] - weight[start]
    time_s = [work * s / (speed[k] * d**0.9) + rng.uniform(0.0, 0.1) for k, d, s, _ in rows]
    room = [np.maximum(0, int(rng.integers(2, 6)) * d + 2 - (stop - start)) for _, d, _, _ in rows]
    takes = np.zeros((len(rows), kinds), dtype=int)
    for i, (kind, devices, _, _) in enumerate(rows):
        takes[i, kind] = devices
    return Problem(
        counts=counts,
        global_batch=int(rng.integers(8, 33)),
        max_stages=4,
        types=types,
        takes=takes,
        micro_batch=np.array([row[2] for row in rows]),
        grain=np.array([row[3] for row in rows]),
        time_s=np.array(time_s),
        copies=(1, 2),
        tail_s=np.stack([np.full((len(rows), len(start)), 0.1), np.full((len(rows), len(start)), 0.4)]),
        max_in_flight=np.array(room),
        hop_s=np.full((len(rows), len(rows)), 0.05),
        jitter=0.02,
    )


def plain_problem(
    counts: tuple[int, ...],
    speeds: tuple[float, ...],
    *,
    layers: int,
    batch: int,
    stages: int,
    most: int = 99,
) -> Problem:
    """Return one device a stage, a sample a pass, a second a layer at speed 1, `most` layers a stage."""
    start, stop = np.triu_indices(layers + 1, k=1)
    types = np.full((layers + 1, layers + 1), -1)
    types[start, stop] = stop - start - 1
    length = np.arange(1, layers + 1)
    kinds = len(counts)
    return Problem(
        counts=counts,
        global_batch=batch,
        max_stages=stages,
        types=types,
        takes=np.eye(kinds, dtype=int),
        micro_batch=np.ones(kinds, dtype=int),
        grain=np.ones(kinds, dtype=int),
        time_s=length[None, :] / np.array(speeds)[:, None],
        copies=(1,),
        tail_s=np.zeros((1, kinds, layers)),
        max_in_flight=np.where(length <= most, 9, 0)[None, :].repeat(kinds, 0),
        hop_s=np.zeros((kinds, kinds)),
    )


def test_pipedream_runs_stages_of_the_same_devices_in_their_fastest_options():
    slow = plain_problem((2,), (1.0,), layers=3, batch=4, stages=2, most=2)
    both = replace(
        slow,
        takes=np.ones((2, 1), dtype=int),
        micro_batch=np.full(2, 2),
        grain=np.array([1, 2]),
        time_s=np.stack([np.array([1.5, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])]),
        tail_s=np.zeros((1, 2, 3)),
        max_in_flight=slow.max_in_flight.repeat(2, 0),
        hop_s=np.zeros((2, 2)),
    )
    (template,) = BASELINES["pipedream"].best(both).arrangement.templates
    short = next(part for part in template if part.stop - part.start == 1)
    assert short.option == 1


@pytest.mark.parametrize("name", NAMES)
def test_valid_and_never_below_the_optimum(name):
    found = 0
    for seed in SEEDS:
        problem = random_problem(seed)
        made = BASELINES[name].best(problem).arrangement
        if made is None:
            continue
        found += 1
        assert faults(problem, made) == []
        assert step_seconds(problem, made) >= bound_s(seed) * (1 - 1e-9)
    assert found >= len(SEEDS) // 2


@pytest.mark.parametrize("name", NAMES)
def test_same_again(name):
    problem = random_problem(3)
    assert BASELINES[name].best(problem).arrangement == BASELINES[name].best(problem).arrangement


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
def test_relabelling_kinds_changes_nothing(name):
    for seed in SEEDS:
        problem = random_problem(seed)
        order = np.argsort([-k for k in range(len(problem.counts))])
        other = replace(
            problem, counts=tuple(problem.counts[k] for k in order), takes=problem.takes[:, order]
        )
        one, two = (BASELINES[name].best(p).arrangement for p in (problem, other))
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert step_seconds(problem, one) == pytest.approx(step_seconds(other, two), rel=1e-9)


def test_even_uses_the_fast_alone_when_the_slow_would_hold_it_up():
    problem = plain_problem((2, 2), (4.0, 1.0), layers=4, batch=8, stages=1)
    made = BASELINES["even"].best(problem).arrangement
    assert made.shares == (4, 4)
    assert [t[0].option for t in made.templates] == [0, 0]


def test_even_leaves_nobody_idle_among_equals():
    problem = plain_problem((4,), (1.0,), layers=4, batch=8, stages=1)
    assert BASELINES["even"].best(problem).arrangement.shares == (2, 2, 2, 2)


def test_lb_bsp_shares_by_speed():
    problem = plain_problem((1, 1), (3.0, 1.0), layers=4, batch=8, stages=1)
    made = BASELINES["lb-bsp"].best(problem).arrangement
    assert sorted(made.shares) == [2, 6]
    assert step_seconds(problem, made) == pytest.approx(8.0)


@pytest.mark.parametrize("name", ["amp", "hetpipe", "pipedream"])
def test_uneven_cuts_along_the_order(name):
    problem = plain_problem((1, 1), (3.0, 1.0), layers=8, batch=64, stages=2, most=6)
    made = BASELINES[name].best(problem).arrangement
    assert [len(one) for one in made.templates] == [2]
    held = {part.option: part.stop - part.start for part in made.templates[0]}
    assert held == {0: 6, 1: 2}


def test_pipedream_gives_a_stage_as_many_devices_as_it_needs():
    """Two layers on two devices in one stage, one layer on the third: no equal widths do as well."""
    problem = plain_problem((3,), (1.0,), layers=3, batch=60, stages=2)
    wide = replace(
        problem,
        takes=np.array([[1], [2]]),
        micro_batch=np.array([2, 2]),
        grain=np.array([1, 2]),
        time_s=np.array([[2.0, 4.0, 6.0], [1.0, 2.0, 3.0]]),
        tail_s=np.zeros((1, 2, 3)),
        max_in_flight=np.array([[9, 9, 0], [9, 9, 9]]),
        hop_s=np.zeros((2, 2)),
    )
    made = BASELINES["pipedream"].best(wide).arrangement
    assert pipeline_rate(wide, made.templates[0]).bottleneck_s == pytest.approx(2.0)
    assert sorted((p.option, p.stop - p.start) for p in made.templates[0]) == [(0, 1), (1, 2)]


def test_metis_layers_by_speed():
    problem = plain_problem((1, 1), (3.0, 1.0), layers=8, batch=64, stages=2, most=6)
    made = BASELINES["metis"].best(problem).arrangement
    assert {part.option: part.stop - part.start for part in made.templates[0]} == {0: 6, 1: 2}


def test_metis_moves_layers_where_memory_is_short():
    problem = plain_problem((1, 1), (3.0, 1.0), layers=8, batch=64, stages=2, most=5)
    made = BASELINES["metis"].best(problem).arrangement
    assert {part.option: part.stop - part.start for part in made.templates[0]} == {0: 5, 1: 3}


def test_sailor_mixes_widths_by_kind_at_equal_cuts():
    """A pair of slow devices keeps up with a fast one, so replicas of a stage are of both kinds."""
    problem = plain_problem((1, 2), (2.0, 2.0), layers=4, batch=8, stages=1)
    problem = replace(problem, takes=np.array([[1, 0], [0, 2]]))
    made = BASELINES["sailor"].best(problem).arrangement
    assert sorted(t[0].option for t in made.templates) == [0, 1]
    assert made.shares == (4, 4)


def test_sailor_cuts_evenly():
    problem = plain_problem((1, 1), (3.0, 1.0), layers=8, batch=64, stages=2, most=6)
    made = BASELINES["sailor"].best(problem).arrangement
    assert [part.stop for part in made.templates[0]] == [4, 8]


def test_malleus_balances_layers_and_samples():
    """Two pipelines of a fast and a slow device each: layers three to one, samples equal."""
    problem = plain_problem((2, 2), (3.0, 1.0), layers=8, batch=64, stages=2, most=6)
    made = BASELINES["malleus"].best(problem).arrangement
    assert made.shares == (32, 32)
    for template in made.templates:
        assert {part.option: part.stop - part.start for part in template} == {0: 6, 1: 2}


def test_malleus_gives_a_straggler_less():
    problem = plain_problem((3, 1), (2.0, 1.0), layers=4, batch=28, stages=1)
    made = BASELINES["malleus"].best(problem).arrangement
    shares = {part[0].option: share for part, share in zip(made.templates, made.shares, strict=True)}
    assert shares == {0: 8, 1: 4}


def test_nothing_fits():
    problem = plain_problem((2, 2), (1.0, 1.0), layers=8, batch=8, stages=2, most=1)
    assert all(one.best(problem).arrangement is None for one in BASELINES.values())


def test_chain_agrees_with_every_cut():
    rng = np.random.default_rng(5)
    for _ in range(20):
        costs = [np.triu(rng.uniform(0.5, 2.0, size=(7, 7)), 1) for _ in range(3)]
        costs = [np.where(cost > 0, cost, np.inf) for cost in costs]
        cuts = best_chain(costs, np.inf)
        slowest = max(c[a, b] for c, a, b in zip(costs, cuts[:-1], cuts[1:], strict=True))
        every = [
            max(costs[0][0, a], costs[1][a, b], costs[2][b, 6]) for a in range(1, 6) for b in range(a + 1, 6)
        ]
        assert slowest == min(every)


def test_ends_of_the_chain_are_not_counted():
    problem = plain_problem((1,), (1.0,), layers=8, batch=8, stages=4)
    assert even_cuts(problem, 4) == [0, 2, 4, 6, 8]
    types = problem.types.copy()
    types[0, 1:] += 8
    types[:-1, 8] += 16
    assert even_cuts(replace(problem, types=types), 3) == [0, 3, 5, 8]


@pytest.mark.slow
def test_judged_on_ranks():
    model, cluster = load_model("llama2-7b"), load_cluster("1x8xa100-sxm-80gb+1x8xl40s@100Gb/s")
    rows = judge(model, cluster, global_batch=64, seq_len=2048, bound_s=1e-3)
    assert [row.name for row in rows] == list(NAMES)
    for row in rows:
        assert (row.plan is None) == bool(row.why_none)
        if row.plan is not None:
            check_plan(row.plan, model, cluster)
            assert row.gap_to_bound == pytest.approx(row.step_time_s / 1e-3 - 1)
    times = {row.name: row.step_time_s for row in rows if row.step_time_s}
    assert times.pop("random") > min(times.values())


def test_unknown_name():
    with pytest.raises(SpecError, match="nobody"):
        judge(load_model("llama2-7b"), load_cluster("1x8xa100-sxm-80gb"), ("nobody",), global_batch=8)


ASKED = {"global_batch": 64, "seq_len": 2048, "tokens": 1e9}
TWO_KINDS = "1x8xa100-sxm-80gb+1x8xl40s@100Gb/s"


def searched(plans=(), bound_s=0.1):
    return PlanResult(
        plans=tuple(plans),
        lower_bound_step_time_s=bound_s,
        evaluated=1,
        pruned=0,
        wall_s=1.0,
    )


def test_a_better_plan_of_another_planner_is_taken_in():
    model, cluster = load_model("llama2-7b"), load_cluster(TWO_KINDS)
    request = checked_request(model, cluster, **ASKED)
    judged = judge(model, cluster, ("even", "lb-bsp", "hetpipe"), global_batch=64, seq_len=2048)
    first, *_, last = sorted(judged, key=lambda one: one.step_time_s)
    assert first.step_time_s < last.step_time_s
    slow = adopted(request, searched(), [last])
    assert slow.plans[0].plan == last.plan and "the search found none" in slow.notes[-1]
    fast = adopted(request, slow, judged)
    assert [one.plan for one in fast.plans] == [first.plan, last.plan]
    assert fast.gap == pytest.approx(first.step_time_s / 0.1 - 1.0) and fast.front[0].plan == first.plan
    assert f"that of {first.name}: the search alone came to" in fast.notes[-1]
    assert adopted(request, fast, judged) is fast
    below = adopted(request, searched(bound_s=100.0), judged)
    assert below.lower_bound_step_time_s == pytest.approx(first.step_time_s) and below.gap == 0.0


@pytest.mark.parametrize("limit", [{"max_devices": 7}, {"max_hours": 1e-3}])
def test_what_breaks_a_limit_is_not_taken_in(limit):
    model, cluster = load_model("llama2-7b"), load_cluster(TWO_KINDS)
    judged = judge(model, cluster, ("even",), global_batch=64, seq_len=2048)
    result = searched()
    assert adopted(checked_request(model, cluster, **ASKED, **limit), result, judged) is result
