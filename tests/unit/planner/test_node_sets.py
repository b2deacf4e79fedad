"""What a search of many node groups says of fewer: bounds of the wider set hold for every plan of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.planner.mixed.node_sets import faster_by_s
from foreshard.planner.mixed.search import MixedSearch
from foreshard.planner.pricing.stage_prices import price_stages
from foreshard.planner.request import checked_request
from foreshard.planner.solver.problem import (
    Arrangement,
    Problem,
    StageSpan,
    Template,
    faults,
    spread_factor,
    step_seconds,
)

SLOWER = "1x8xa100-sxm-40gb+2x8xh100-sxm"  # links of 200 Gb/s a device, and of 400


@pytest.fixture(scope="module")
def problems() -> tuple[Problem, Problem]:
    """Both groups, joined by the slow links of one; the other group alone."""
    request = checked_request(load_model("gpt2-xl"), load_cluster(SLOWER), global_batch=64)
    both, alone = (price_stages(request, use, by_domain=True, every=True) for use in ((0, 1), (1,)))
    return both, alone


def drawn(problem: Problem, rng: np.random.Generator) -> Arrangement | None:
    """Return pipelines of options and cuts at random, None where they do not fit."""
    templates: list[Template] = []
    for _ in range(int(rng.integers(1, 4))):
        stages = int(rng.integers(1, 4))
        size = int(rng.choice(problem.micro_batch))
        options = rng.choice(np.flatnonzero(problem.micro_batch == size), stages)
        cuts = [0, *sorted(rng.choice(np.arange(1, problem.num_layers), stages - 1, replace=False))]
        stops = [*cuts[1:], problem.num_layers]
        places = zip(options, cuts, stops, strict=True)
        templates.append(tuple(StageSpan(option=int(o), start=int(a), stop=int(b)) for o, a, b in places))
    first = problem.global_batch // len(templates)
    shares = (problem.global_batch - first * (len(templates) - 1), *[first] * (len(templates) - 1))
    made = Arrangement(templates=tuple(templates), shares=shares)
    return None if faults(problem, made) else made


def test_no_plan_of_fewer_groups_is_faster_by_more_than_is_said(problems):
    both, alone = problems
    faster_s = faster_by_s(alone, both)
    assert 0.0 < faster_s < np.inf
    rng, place, won = np.random.default_rng(7), {name: i for i, name in enumerate(both.names)}, []
    while len(won) < 200:
        made = drawn(alone, rng)
        if made is None:
            continue
        among = Arrangement(
            shares=made.shares,
            templates=tuple(
                tuple(replace(part, option=place[alone.names[part.option]]) for part in template)
                for template in made.templates
            ),
        )
        assert not faults(both, among)
        won.append(step_seconds(both, among) - step_seconds(alone, made))
    assert max(won) <= faster_s * spread_factor(both, sum(both.counts)) * (1 + 1e-9)
    assert max(won) > 0.0


def test_links_of_one_speed_leave_nothing_to_gain(problems):
    both, _ = problems
    assert faster_by_s(both, both) == 0.0


@pytest.mark.parametrize(
    "worse", [{"time_s": 1.001}, {"max_in_flight": 0.5}], ids=["a slower stage", "less room"]
)
def test_nothing_is_said_where_a_stage_is_worse(problems, worse):
    both, alone = problems
    ((name, factor),) = worse.items()
    values = getattr(both, name) * factor
    worse = replace(both, **{name: values.astype(getattr(both, name).dtype)})
    assert faster_by_s(alone, worse) == np.inf


def test_options_that_the_wider_set_lacks_leave_nothing_said(problems):
    both, alone = problems
    assert faster_by_s(alone, replace(both, names=tuple(range(len(both.names))))) == np.inf


def test_a_covered_set_has_the_bound_of_the_wider_one_less_what_it_may_gain():
    request = checked_request(load_model("gpt2-xl"), load_cluster(SLOWER), global_batch=64)
    search = MixedSearch(request)
    search.found.timed = [(5.0, None)]
    for subspace, bound_s in zip(search.by_set, (4.0, 1.0, 3.9), strict=True):
        subspace.floor_s = lambda bound_s=bound_s: bound_s
    search._covered = {1: 0.5, 2: 0.5}
    assert [search._set_bound_s(place) for place in range(3)] == [4.0, 3.5, 3.9]
    search.by_set[0].floor_s = lambda: 7.0  # beyond the best plan nothing was proven
    assert [search._set_bound_s(place) for place in range(3)] == [7.0, 4.5, 4.5]
