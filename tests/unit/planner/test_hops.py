"""Messages whose cost depends on the option before: times that hold the least of them, and cuts that suit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planner.test_brute_force import best_by_force, every_template, random_problem

from foreshard.planner.solver import solve as solving
from foreshard.planner.solver.hops import least_hops_in_times, recut
from foreshard.planner.solver.problem import pipeline_rate, tail_seconds, template_faults

WITH_HOPS = [seed for seed in range(60) if random_problem(seed).hop_s.any()]


@pytest.mark.parametrize("seed", WITH_HOPS[:12])
def test_pipelines_cost_the_same_with_the_least_messages_in_their_times(seed):
    problem = random_problem(seed)
    other = least_hops_in_times(problem)
    assert np.all(other.hop_s >= 0.0) and other.hop_s.sum() < problem.hop_s.sum()
    for one in every_template(problem):
        assert not template_faults(other, one)
        before, after = pipeline_rate(problem, one), pipeline_rate(other, one)
        assert after.fill_s == pytest.approx(before.fill_s, rel=1e-12, abs=1e-12)
        assert after.bottleneck_s == pytest.approx(before.bottleneck_s, rel=1e-12)
        assert tail_seconds(other, one, 2) == tail_seconds(problem, one, 2)


def test_without_messages_nothing_changes():
    problem = next(one for one in map(random_problem, range(60)) if not one.hop_s.any())
    assert least_hops_in_times(problem) is problem
    assert not list(recut(problem, every_template(problem)))


@pytest.mark.parametrize("seed", WITH_HOPS[:12])
def test_cut_anew_a_pipeline_is_as_fast_as_any_of_its_options(seed):
    problem = random_problem(seed)
    by_options: dict[tuple[int, ...], list] = {}
    for one in every_template(problem):
        by_options.setdefault(tuple(part.option for part in one), []).append(one)
    for options, alike in by_options.items():
        if len(options) < 2:
            continue
        made = list(recut(problem, alike[:1]))
        least = min(pipeline_rate(problem, one).bottleneck_s for one in alike)
        assert min(pipeline_rate(problem, one).bottleneck_s for one in made) <= least * 1.08
        assert all(not template_faults(problem, one) for one in made)


def test_the_general_search_finds_the_cuts_that_messages_ask_for(monkeypatch):
    """Without them this problem ended 5.5 % above its optimum."""
    pytest.importorskip("scipy")
    monkeypatch.setattr(solving, "_FEW_DEVICES", 0)
    problem = random_problem(323)
    solving.solve(problem, budget_s=30.0)  # loads the compiled loops
    solution = solving.solve(problem, budget_s=4.0, target_gap=0.0)
    assert solution.step_time_s == pytest.approx(best_by_force(problem), rel=1e-9)
    assert best_by_force(problem, "least") <= solution.lower_bound_s * 1.03
