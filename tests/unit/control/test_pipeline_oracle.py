"""Pipelines of a slot and their bound against everything there is: every pair of workers has its own link."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from foreshard.control.budgets.objective import Objective, Weights
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.pipeline_table import PipelineTable, rows_of, weighed
from foreshard.control.search.pipelines import PipelineLayout
from foreshard.control.search.slot_search import reshare, solve_slot
from foreshard.control.slots import KINDS, Budget, Structure, WorkerPipeline
from foreshard.errors import InfeasibleError
from foreshard.simulate import pipeline_bound
from foreshard.simulate.pipeline_bound import pipeline_rows

MICRO_BATCH = 2


def drawn(cases, seed):
    """Return a chain, a state with a link of its own between any two workers, a batch and budgets."""
    rng = np.random.default_rng(seed)
    workers, layers = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    chain, state = cases.random_case(rng, workers, layers=layers, tight=bool(rng.integers(2)))

    def between(values):
        upper = np.triu(rng.choice(values, (workers, workers)), 1)
        return upper + upper.T

    state = replace(
        state,
        bandwidth_bytes_per_s=between([0.5, 5.0, 50.0]) + 1e3 * np.eye(workers),
        latency_s=between([0.0, 0.01, 0.1]),
        usd_per_byte=between([0.0, 0.02, 0.1]) * rng.integers(2),
        busy_w=rng.choice([300.0, 700.0], workers),
        kg_per_j=rng.choice([1e-8, 1e-7], workers),
    )
    kinds = rng.choice(KINDS, int(rng.integers(1, 4)), replace=False)
    budgets = tuple(
        Budget(name=kind, kind=kind, limit=1.0, worker=0 if kind == "duty" else None)
        for kind in map(str, kinds)
    )
    return rng, chain, state, MICRO_BATCH * int(rng.choice([3, 8, 24])), budgets


def structures(workers, layers):
    """Yield all pipelines side by side, in all orders and cuts."""

    def pipelines(cell):
        for order in itertools.permutations(cell):
            for inner in itertools.combinations(range(1, layers), len(cell) - 1):
                yield WorkerPipeline(workers=order, cuts=(0, *inner, layers))

    def parts(rest):
        if not rest:
            yield []
            return
        for others in itertools.chain.from_iterable(
            itertools.combinations(rest[1:], size) for size in range(len(rest))
        ):
            for part in parts([one for one in rest[1:] if one not in others]):
                yield [(rest[0], *others), *part]

    for size in range(1, workers + 1):
        for subset in itertools.combinations(range(workers), size):
            for part in parts(list(subset)):
                for groups in itertools.product(*map(list, map(pipelines, part))):
                    yield Structure(groups=groups)


def weights_of(rng, budgets, choice):
    """Return weights with which costs count as much as seconds, or more or less, or not at all."""
    parts = rng.choice([0.0, 0.3, 1.0, 3.0, 20.0], len(budgets))
    spent = [choice.costs[one.key] for one in budgets]
    return {
        one.name: part * choice.time_s / cost if cost > 0.0 else 0.0
        for one, part, cost in zip(budgets, parts, spent, strict=True)
    }


@pytest.mark.parametrize("first", range(10, 30, 4))
def test_choice_is_the_best_of_all_and_the_bound_is_below_it(cases, first, monkeypatch):
    for seed in range(first, first + 4):
        rng, chain, state, batch, budgets = drawn(cases, seed)
        asked = {"batch": batch, "micro_batch": MICRO_BATCH}
        everything = list(structures(chain.num_workers, chain.num_layers))
        free = Objective(time=1.0, costs={}, budgets=budgets)
        runs = [reshare(chain, state, one, free, **asked) for one in everything]
        fits = [at for at, one in enumerate(runs) if math.isfinite(one.time_s)]
        if not fits:
            with pytest.raises(InfeasibleError):
                solve_slot(chain, state, time_weight=1.0, **asked)
            continue
        fastest = min((runs[at] for at in fits), key=free.of)
        objective = replace(free, costs=weights_of(rng, budgets, fastest))
        for now in (free, objective):
            best = min(now.of(reshare(chain, state, everything[at], now, **asked)) for at in fits)
            choice = solve_slot(
                chain, state, time_weight=1.0, cost_weights=now.costs, budgets=budgets, **asked
            )
            assert best * (1.0 - 1e-9) <= now.of(choice) <= best * 1.01, (seed, now.costs, choice)
            for most in (1000, 0):
                monkeypatch.setattr(pipeline_bound, "_MOST_SETS", most)
                time_s, costs = pipeline_rows(
                    chain, state, budgets, **asked, max_stages=4, cache=SearchCache()
                )
                assert now.of_rows(time_s, costs).min() <= best * (1.0 + 1e-9), (seed, now.costs, most)


def test_rows_of_a_table_weigh_what_their_pipelines_do(cases):
    for seed in range(30):
        _, chain, state, batch, budgets = drawn(cases, seed)
        if chain.num_workers < 4:
            continue
        asked = {"batch": batch, "micro_batch": MICRO_BATCH}
        # Shares at which all end together are the best only where samples weigh nothing.
        weights = replace(
            Weights.of(state, 1.0, {one.name: 0.1 for one in budgets}, budgets), busy=np.zeros(4)
        )
        weights = replace(weights, sent=np.zeros(4))
        table, other = (
            PipelineTable.of(chain, state, *rows_of(cell, [], chain.num_layers), **asked)
            for cell in ((0, 2), (1, 3))
        )
        if not len(table.fill_s) or not len(other.fill_s):
            continue
        beside = other.rows(slice(0, 1))
        worth = weighed(chain, state, table, [beside], weights, **asked)
        for row, each in enumerate(worth):
            groups = (table.rows(slice(row, row + 1)).pipeline(), beside.pipeline())
            layout = PipelineLayout.of(chain, state, Structure(groups=groups), **asked)
            assert each == pytest.approx(layout.objective(weights)[0], rel=1e-9)
