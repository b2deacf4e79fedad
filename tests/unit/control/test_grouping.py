"""The choice of a slot against all structures, orders and cuts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from foreshard.control.grouping import change_s, reshare, solve_slot, worth_of
from foreshard.control.landscape import Memo, Weights
from foreshard.control.shares import whole_shares
from foreshard.control.slots import Budget, Pipeline, Structure, evaluate, pace_of, runs
from foreshard.errors import InfeasibleError

RENT = (Budget(name="money", kind="usd", limit=1.0),)
ENERGY = (Budget(name="energy", kind="joule", limit=1.0),)


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
            yield Pipeline(workers=order, cuts=(0, *inner, layers))


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
                    busy = np.array([
                        sum(
                            weights.busy[w] * (made.before_s[w, stop] - made.before_s[w, first]) / now.speed[w]
                            for w, (first, stop) in zip(g.workers, itertools.pairwise(g.cuts), strict=True)
                        ) for g in groups
                    ])  # fmt: skip
                    active = time_weight + weights.active[list(one.workers)].sum()
                    split = whole_shares(
                        pace.start_s, pace.rate_s, batch, micro_batch, time_weight=active,
                        sample_weight=busy if busy.any() else None,
                    )  # fmt: skip
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
        gaps.append(worth_of(choice, 1.0, weight, budgets) / best - 1.0)
    assert min(gaps) > -1e-9
    assert sum(gap < 1e-9 for gap in gaps) >= 0.95 * len(gaps) or max(gaps) < 0.002, gaps
