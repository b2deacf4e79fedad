"""Times excluded by whole numbers of pipelines, against every pipeline and every set of small problems."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from tests.unit.planner.test_brute_force import best_by_force, every_template, random_problem

from foreshard.planner.solver import bound_raising
from foreshard.planner.solver import solve as solving
from foreshard.planner.solver.bound_raising import BoundRaiser, longest_step_s
from foreshard.planner.solver.column_enumeration import ColumnEnumeration, memory_for
from foreshard.planner.solver.integer_combination import combine
from foreshard.planner.solver.least_pricing import LeastPricing
from foreshard.planner.solver.problem import Arrangement, pipeline_rate, tail_seconds, takes_of
from foreshard.planner.solver.search_state import SearchState
from foreshard.planner.solver.solve import ProblemSearch
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget

LOOSE = 1.02
"""Times that the best by the least cost may exceed the bound: paths count one tail of a pipeline."""


@pytest.mark.parametrize("seed", range(40))
def test_best_sets_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    rows, kinds = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    takes = rng.integers(0, 4, (rows, kinds))
    takes[takes.sum(1) == 0, 0] = 1
    samples = rng.integers(1, 20, rows).astype(float)
    counts = tuple(int(n) for n in rng.integers(2, 8, kinds))
    pipelines = (int(rng.integers(1, 3)), int(rng.integers(2, 5)))
    sums = {}
    for number in range(pipelines[0], pipelines[1] + 1):
        for one in combinations_with_replacement(range(rows), number):
            if np.all(takes[list(one)].sum(0) <= counts):
                sums[one] = samples[list(one)].sum()
    # Worth so low that nothing is left out.
    found = combine(takes, samples, np.full(rows, -1e6), counts, pipelines)
    assert found.proven
    assert bool(found.sets) == bool(sums)
    if sums:
        assert found.samples[0] == max(sums.values())
        assert all(sums[one] == total for one, total in zip(found.sets, found.samples, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_no_option_takes_more_devices_than_there_are(seed):
    """The loops that list pipelines number demands; one beyond the devices would have a number of another."""
    problem = random_problem(seed)
    fewer = replace(problem, counts=tuple(max(1, count // 2) for count in problem.counts))
    for family in fewer.families:
        options = fewer.options_of(family)[0]
        assert np.all(fewer.takes[options] <= fewer.counts)
        fitting = [
            option
            for option in problem.options_of(family)[0]
            if np.all(problem.takes[option] <= fewer.counts)
        ]
        assert fitting == options.tolist()


@pytest.mark.parametrize("seed", range(30))
def test_the_enumeration_holds_every_pipeline_of_a_plan(seed):
    problem = random_problem(seed)
    pytest.importorskip("numba")
    memory = memory_for(problem)
    templates = every_template(problem)
    if not templates:
        return
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 4))
    seconds = float(rng.uniform(1.0, 3.0)) * min(
        pipeline_rate(problem, one).seconds(1) + tail_seconds(problem, one, number) for one in templates
    )
    duals = rng.random(len(problem.counts)) * problem.global_batch / sum(problem.counts)
    dual = (problem.global_batch - duals @ np.array(problem.counts)) / number
    state = SearchState(problem=problem, budget=ENDLESS, target_gap=0.0)
    columns = ColumnEnumeration(
        pricing=state.pricing((number, number), duals),
        seconds=seconds,
        pipeline_dual=dual,
        num_pipelines=number,
        memory=memory,
        budget=ENDLESS,
    )
    assert columns.list_negative() and columns.list_all()
    table = columns.table()
    listed = dict(zip(map(tuple, memory.demands(table.codes).tolist()), table.samples, strict=True))
    for one in templates:
        takes = takes_of(problem, one)
        left_s = seconds - tail_seconds(problem, one, number, filling="least")
        samples = pipeline_rate(problem, one, filling="least").samples(left_s)
        samples = min(samples, problem.global_batch)
        cost = dual + takes @ duals - samples
        if samples > 0 and cost <= columns.allowance - 1e-6:
            assert listed[tuple(takes.tolist())] >= samples
    for at, row, samples, code in zip(table.at, table.row, table.samples, table.codes, strict=True):
        template = columns.template(int(at), int(row))
        assert takes_of(problem, template).tolist() == memory.demands(np.array([code]))[0].tolist()
        left_s = seconds - tail_seconds(problem, template, number, filling="least")
        real = pipeline_rate(problem, template, filling="least").samples(left_s)
        assert samples >= min(real, problem.global_batch)


@pytest.mark.parametrize("seed", range(12))
def test_search_by_whole_numbers_ends_at_the_optimum(seed, monkeypatch):
    pytest.importorskip("scipy")
    pytest.importorskip("numba")
    monkeypatch.setattr(solving, "_FEW_DEVICES", 0)
    drawn = random_problem(seed)
    problem = replace(drawn, hop_s=np.zeros_like(drawn.hop_s), jitter=0.0)
    best, least = best_by_force(problem), best_by_force(problem, "least")
    if np.isfinite(best):
        solution = solving.solve(problem, budget_s=60.0, target_gap=1e-3)
        assert best * (1 - 1e-9) <= solution.step_time_s <= best * (1 + 1e-3)
        assert least / LOOSE <= solution.lower_bound_s <= least * (1 + 1e-9)


def test_a_search_without_any_plan_ends(monkeypatch):
    """Times are excluded up to one that would be enough for any pipeline alone, not up to infinity."""
    pytest.importorskip("scipy")
    monkeypatch.setattr(solving, "_FEW_DEVICES", 0)
    ended = 0
    for seed in range(60):
        problem = random_problem(seed)
        best = best_by_force(problem)
        if np.isfinite(best):
            assert best <= longest_step_s(problem) * 1.01
            continue
        solution = solving.solve(problem, budget_s=1.0, target_gap=0.0)
        assert solution.arrangement is None
        ended += 1
    assert ended >= 3


def test_a_proof_far_below_the_best_plan_takes_growing_steps(monkeypatch):
    """Of 1 % each, they took 110 attempts to where pipelines end what can be proven."""
    best_s, most_s, tried = 4.0, 3.0, []

    def excluded(state, pipelines, seconds, memory, budget):
        tried.append(seconds)
        return seconds <= most_s

    monkeypatch.setattr(bound_raising, "_is_excluded", excluded)
    best = Arrangement(templates=(), shares=())
    state = SearchState(problem=random_problem(3), budget=ENDLESS, target_gap=0.0, best=best, best_s=best_s)
    raiser, bound_s, stuck = BoundRaiser(state=state, memory=memory_for(state.problem)), 1.0, False
    while not stuck:
        bound_s, stuck = raiser.attempt((1, 1), bound_s)
    assert most_s / (1.0 + 1e-2) <= bound_s <= most_s
    assert tried[0] == pytest.approx(1.01) and max(tried) < best_s
    assert len(tried) < 30


@pytest.mark.parametrize("seed", range(12))
def test_first_boxes_of_a_proof_are_rough_and_prove_what_exact_ones_do(seed):
    """Devices alone say no more than filling does, and only what holds the bound down is searched exactly."""
    pytest.importorskip("numba")
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    duals = rng.random(len(problem.counts)) * problem.global_batch / sum(problem.counts)
    net = 0.5 * problem.global_batch
    how = {"known_s": np.inf, "aim_s": np.inf, "tolerance": 1e-5}

    def started() -> LeastPricing:
        pricing = LeastPricing(problem=problem, pipelines=(1, 1), duals=duals, longest_s=np.inf)
        pricing.start()
        assert all(box.is_rough for box in pricing.boxes.values())
        return pricing

    exact, lazy = started(), started()
    for box in list(exact.boxes.values()):
        for made in exact.parts(box, net):
            assert not made.is_rough
            assert box.seconds(net) <= made.seconds(net) * (1 + 1e-9)
    exactly_s, lazily_s = exact.earliest(net, **how)[0], lazy.earliest(net, **how)[0]
    assert lazily_s == pytest.approx(exactly_s, rel=1e-3)
    assert lazy.solved <= exact.solved


def test_a_bound_counts_as_filled_once_the_range_that_holds_it_down_does(monkeypatch):
    """The first bounds of a proof are without filling."""
    pytest.importorskip("numba")
    monkeypatch.setattr(solving, "_FEW_DEVICES", 0)
    search = ProblemSearch(random_problem(3), target_gap=1e-6, filling="least")
    seen = []
    for _ in range(12):
        if search.is_open:
            search.advance(TimeBudget.of(60.0))
            seen.append(search.is_filled)
    assert not seen[0] and seen[-1]
    lowest = min(search.ranges.values(), key=lambda interval: interval.bound_s)
    assert lowest.is_filled


@pytest.mark.parametrize("filling", ["least", "full"])
def test_the_first_bound_of_a_proof_is_a_coarse_one_and_no_half_repeats_it(filling, monkeypatch):
    """Pricing for a proof takes long; a search for plans learns more pipelines from a finer one."""
    pytest.importorskip("numba")
    monkeypatch.setattr(solving, "_FEW_DEVICES", 0)
    asked = []

    def bounded(state, key, floor_s, tolerance, *, closely=True, fills=True):
        asked.append((key, tolerance, fills))
        return floor_s

    monkeypatch.setattr(solving, "fractional_bound", bounded)
    monkeypatch.setattr(solving, "memory_for", lambda problem: None)  # no step but these
    search = ProblemSearch(random_problem(3), target_gap=1e-6, filling=filling)
    while search.is_open and len(asked) < 40:
        search.advance(TimeBudget.of(60.0))
    filled = [(key, tolerance) for key, tolerance, fills in asked if fills]
    assert len(set(filled)) == len(filled)
    coarse = [key for key, tolerance in filled if tolerance == solving._COARSE]
    starts = {key for key, _, fills in asked if not fills}
    assert set(coarse) == starts and (filling == "full") == (not starts)
    for key in {key for key, _ in filled}:
        own = [tolerance for known, tolerance in filled if known == key]
        assert own == sorted(own, reverse=True)
