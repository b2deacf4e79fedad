"""The choice of a slot against all structures, orders and cuts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from foreshard.control.budgets.objective import Objective, Weights
from foreshard.control.moves import move
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.pricing import evaluate, pace_of, runs
from foreshard.control.search.shares import whole_shares
from foreshard.control.search.slot_search import reshare, solve_slot
from foreshard.control.slots import Budget, Structure, WorkerPipeline
from foreshard.errors import InfeasibleError

RENT = (Budget(name="money", kind="usd", limit=1.0),)
ENERGY = (Budget(name="energy", kind="joule", limit=1.0),)


def worth_of(choice, cost_weights, budgets):
    return Objective(time=1.0, costs=cost_weights, budgets=budgets).of(choice)


def partitions(items):
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for part in partitions(rest):
        yield [[first], *part]
        for at in range(len(part)):
            yield [*part[:at], [first, *part[at]], *part[at + 1 :]]


def pipelines(group, layers):
    for order in itertools.permutations(group):
        for inner in itertools.combinations(range(1, layers), len(group) - 1):
            yield WorkerPipeline(workers=order, cuts=(0, *inner, layers))


def least(made, now, batch, micro_batch, time_weight, cost_weights, budgets):
    """Return the worth of the best of everything there is."""
    weights = Weights.of(now, time_weight, cost_weights, budgets)
    best = math.inf
    for size in range(1, made.num_workers + 1):
        for subset in itertools.combinations(range(made.num_workers), size):
            for part in partitions(list(subset)):
                for groups in itertools.product(*(list(pipelines(g, made.num_layers)) for g in part)):
                    one = Structure(groups=groups)
                    pace = pace_of(made, now, one, micro_batch=micro_batch)
                    busy = np.array(
                        [
                            sum(
                                weights.busy[w]
                                * (made.before_s[w, stop] - made.before_s[w, first])
                                / now.speed[w]
                                for w, (first, stop) in zip(
                                    g.workers, itertools.pairwise(g.cuts), strict=True
                                )
                            )
                            for g in groups
                        ]
                    )
                    active = time_weight + weights.active[list(one.workers)].sum()
                    split = whole_shares(
                        pace.start_s,
                        pace.rate_s,
                        batch,
                        micro_batch,
                        time_weight=active,
                        sample_weight=busy if busy.any() else None,
                    )
                    if split.worth >= best or (split.shares == 0).any():
                        continue
                    if runs(made, now, one, split.shares, micro_batch=micro_batch):
                        best = split.worth
    return best


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("budgets", [RENT, ENERGY], ids=["rent", "energy"])
def test_choice_is_the_best_of_all_for_four_workers(cases, tight, budgets):
    rng = np.random.default_rng(1)
    gaps = []
    for _ in range(5):
        made, now = cases.random_case(rng, 4, layers=4, tight=tight)
        weight = {budgets[0].name: float(rng.choice([0.0, 0.01, 0.3]))}
        asked = {"batch": 24, "micro_batch": 3}
        best = least(made, now, 24, 3, 1.0, weight, budgets)
        if math.isinf(best):
            with pytest.raises(InfeasibleError):
                solve_slot(made, now, **asked, time_weight=1.0, cost_weights=weight, budgets=budgets)
            continue
        choice = solve_slot(made, now, **asked, time_weight=1.0, cost_weights=weight, budgets=budgets)
        gaps.append(worth_of(choice, weight, budgets) / best - 1.0)
    assert min(gaps) > -1e-9
    assert sum(gap < 1e-9 for gap in gaps) >= 0.95 * len(gaps) or max(gaps) < 0.002, gaps


def test_tentative_search_finds_nearly_always_what_enumeration_finds(cases, monkeypatch):
    rng = np.random.default_rng(7)
    gaps = []
    for at in range(24):
        made, now = cases.random_case(rng, int(rng.integers(3, 7)), kinds=3, layers=6, tight=at % 2 == 0)
        weight = {"money": float(rng.choice([0.0, 0.05, 0.3]))}
        asked = {"batch": 48, "micro_batch": 2, "time_weight": 1.0, "cost_weights": weight, "budgets": RENT}
        worth = []
        for limit in (10_000, 0):
            monkeypatch.setattr("foreshard.control.search.pipelines.EXHAUSTIVE", limit)
            try:
                worth.append(worth_of(solve_slot(made, now, **asked), weight, RENT))
            except InfeasibleError:
                worth.append(math.inf)
        if math.isfinite(worth[0]):
            gaps.append(worth[1] / worth[0] - 1.0)
    assert len(gaps) > 15 and min(gaps) >= -0.01
    assert np.mean(np.array(gaps) < 1e-6) >= 0.95 and max(gaps) < 0.1, sorted(gaps)[-5:]


def test_a_walk_over_many_slots_gets_no_worse_and_uses_what_it_knows(cases):
    rng = np.random.default_rng(8)
    made, now = cases.random_case(rng, 10, kinds=6, layers=6)
    cache, start, worths = SearchCache(), None, []
    for _ in range(12):
        start = solve_slot(
            made,
            now,
            batch=64,
            micro_batch=2,
            time_weight=1.0,
            cost_weights={"money": 0.1},
            budgets=RENT,
            running=start,
            cache=cache,
            max_stages=4,
            most_looks=5 if start else 20,
        )
        worths.append(worth_of(start, {"money": 0.1}, RENT))
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(worths))
    full = solve_slot(
        made,
        now,
        batch=64,
        micro_batch=2,
        time_weight=1.0,
        cost_weights={"money": 0.1},
        budgets=RENT,
        max_stages=4,
    )
    assert worths[-1] <= 1.05 * worth_of(full, {"money": 0.1}, RENT)


def test_weights_decide_between_the_fastest_and_the_cheapest(cases):
    made = cases.chain(np.ones(4) * 0.1, 4)
    now = cases.state([1.0] * 4, usd_per_h=np.array([1000.0, 9000.0, 9000.0, 9000.0]))
    asked = {"batch": 64, "micro_batch": 2, "budgets": RENT}
    fast = solve_slot(made, now, **asked, time_weight=1.0)
    assert fast.shares == (16, 16, 16, 16)
    cheap = solve_slot(made, now, **asked, time_weight=0.0, cost_weights={"money": 1.0})
    assert cheap.structure.workers == (0,) and cheap.shares == (64,)


def test_duty_is_weighed_for_its_worker_only(cases):
    made = cases.chain(np.ones(4) * 0.1, 3)
    budgets = (Budget(name="rest", kind="duty", limit=0.2, per="second", worker=1),)
    asked = {"batch": 60, "micro_batch": 1, "time_weight": 1.0, "budgets": budgets}
    free = solve_slot(made, cases.state([1.0] * 3), **asked)
    assert free.costs["duty:1"] == pytest.approx(8.0)
    spared = solve_slot(made, cases.state([1.0] * 3), **asked, cost_weights={"rest": 10.0})
    assert spared.costs["duty:1"] == 0.0 and 1 not in spared.structure.workers


def test_change_is_what_each_worker_lacks_over_its_fastest_link(cases):
    made, now = cases.chain(np.ones(4), 3, states=[1.0, 2.0, 4.0, 8.0]), cases.state([1.0] * 3)
    old = Structure(groups=(WorkerPipeline(workers=(0, 1), cuts=(0, 2, 4)),))
    new = Structure(
        groups=(WorkerPipeline(workers=(0, 1), cuts=(0, 3, 4)), WorkerPipeline(workers=(2,), cuts=(0, 4)))
    )
    assert move(made, now, old, new).time_s == pytest.approx(15.0 / 10.0)
    assert move(made, now, old, old).time_s == 0.0


def test_reshare_keeps_every_group(cases):
    made = cases.chain(np.ones(4) * 0.1, 2)
    structure = Structure(groups=tuple(WorkerPipeline(workers=(w,), cuts=(0, 4)) for w in (0, 1)))
    choice = reshare(
        made, cases.state([1.0, 1e-3]), structure, Objective(time=1.0, costs={}), batch=64, micro_batch=2
    )
    assert choice.shares == (62, 2)
    assert evaluate(made, cases.state([1.0, 1e-3]), structure, (62, 2), micro_batch=2).time_s == choice.time_s


def test_a_model_that_fits_nowhere_is_refused(cases):
    made = cases.chain(np.ones(2), 2, states=10.0, memory=5.0)
    with pytest.raises(InfeasibleError, match="no pipeline of 2 workers"):
        solve_slot(made, cases.state([1.0, 1.0]), batch=8, micro_batch=1, time_weight=1.0)
