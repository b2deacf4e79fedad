"""The toy problem, complete: figures of its best plans, of every V, of stale and of sticky states."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from foreshard.control.budgets.queues import drift
from foreshard.control.search.cache import SearchCache
from foreshard.control.search.pipelines import PipelineStates
from foreshard.control.slots import Structure

TOY = json.loads((Path(__file__).parent / "online_toy.json").read_text())
EXPECTED = TOY["expected"]
STEPS = 100_000


def partitions(items):
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for part in partitions(rest):
        yield [(first,), *part]
        for at in range(len(part)):
            yield [*part[:at], (first, *part[at]), *part[at + 1 :]]


def structures(cases, state):
    """Return seconds and dollars of all structures, with the cuts of least bottleneck; their groups."""
    work = TOY["layer_work_per_sample"]
    chain = cases.chain(
        work,
        4,
        boundary=TOY["boundary_bytes_per_sample_fwd_and_bwd"],
        sync=TOY["layer_parameter_bytes"],
        states=TOY["layer_parameter_bytes"],
        memory=TOY["worker_parameter_capacity"],
    )
    now = cases.state(
        state["speed"],
        bandwidth_bytes_per_s=np.full((4, 4), state["bandwidth"]),
        usd_per_h=3600.0 * np.array(state["price"]),
    )
    land = SearchCache().state(
        PipelineStates,
        chain,
        now,
        batch=TOY["global_batch"],
        micro_batch=TOY["micro_batch"],
        max_stages=4,
        apart=frozenset(range(4)),
    )
    times, names = [], []
    for size in range(1, 5):
        for subset in itertools.combinations(range(4), size):
            for part in partitions(list(subset)):
                if all(land.holds(group) for group in part):
                    groups = [land.pipeline(group, land.front_of(group, 0)[-1]) for group in part]
                    times.append(land.layout(Structure(groups=tuple(groups))).fastest.time_s)
                    names.append(part)
    times = np.array(times)
    rent = np.array([sum(state["price"][w] for group in part for w in group) for part in names])
    return times, times * rent, names


def best_mean(chance, time, cost):
    """Return the least mean time of all randomised choices within the budget, and the budget's multiplier."""
    states, count = time.shape
    found = linprog(
        (chance[:, None] * time).ravel(),
        A_ub=[(chance[:, None] * cost).ravel()],
        b_ub=[1.0],
        A_eq=np.kron(np.eye(states), np.ones(count)),
        b_eq=np.ones(states),
    )
    return found.fun, -found.ineqlin.marginals[0]


@pytest.fixture(scope="module")
def toy(cases):
    rng = np.random.default_rng(0)
    chance = np.array([state["probability"] for state in TOY["states"]])
    path = rng.choice(3, size=STEPS, p=chance)
    found = [structures(cases, state) for state in TOY["states"]]
    raw_time, raw_cost = np.array([one[0] for one in found]), np.array([one[1] for one in found])
    seen = np.bincount(path) / STEPS
    fastest = (np.arange(3), raw_time.argmin(1))
    budget = 0.6 * seen @ raw_cost.min(1) + 0.4 * seen @ raw_cost[fastest]
    unit = float(seen @ raw_time.min(1))
    return {
        "path": path,
        "seen": seen,
        "time": raw_time / unit,
        "cost": raw_cost / budget,
        "names": found[0][2],
        "rng": rng,
        "chance": chance,
        "all_names": [one[2] for one in found],
        "raw": (raw_time, raw_cost),
    }


def drive(toy, weights, path, believed):
    """Return mean time, cost less budget and mean backlog over V, many V at a time."""
    weights = np.asarray(weights, float)
    time, cost = toy["time"], toy["cost"]
    backlog = np.zeros(len(weights))
    reflected, total, spent, waited = (np.zeros(len(weights)) for _ in range(4))
    for now, guess in zip(path.tolist(), believed.tolist(), strict=True):
        pick = (weights[:, None] * time[guess] + backlog[:, None] * cost[guess]).argmin(1)
        total += time[now, pick]
        paid = cost[now, pick]
        spent += paid
        backlog, cut = drift(backlog, paid - 1.0)
        reflected += cut
        waited += backlog
    steps = len(path)
    assert np.abs((spent - steps) - (backlog - reflected)).max() / steps < 1e-9
    return total / steps, spent / steps - 1.0, waited / steps / weights


def test_all_structures_and_the_best_mean(toy):
    assert {len(names) for names in toy["all_names"]} == {EXPECTED["structures_per_state"]}
    time, multiplier = best_mean(toy["seen"], toy["time"], toy["cost"])
    assert time == pytest.approx(EXPECTED["T_star"], rel=1e-5)
    assert multiplier == pytest.approx(EXPECTED["lambda_star"], rel=1e-4)
    low, high = toy["cost"].min(), toy["cost"].max()
    assert [low, high] == pytest.approx(EXPECTED["cost_range"], rel=1e-3)
    assert 0.5 * max(1.0, high - 1.0) ** 2 == pytest.approx(EXPECTED["B_c"], rel=1e-3)


def test_best_static_structure(toy):
    assert all(names == toy["names"] for names in toy["all_names"])
    mean_time, mean_cost = toy["seen"] @ toy["time"], toy["seen"] @ toy["cost"]
    assert mean_time[mean_cost <= 1.0].min() == pytest.approx(EXPECTED["best_static_T"], rel=1e-4)


@pytest.fixture(scope="module")
def exact(toy):
    return drive(toy, EXPECTED["exact_state"]["V"], toy["path"], toy["path"])


def test_every_v_with_exact_states(exact):
    table = EXPECTED["exact_state"]
    assert exact[0] == pytest.approx(np.array(table["mean_T"]), rel=1e-3)
    assert exact[1] == pytest.approx(np.array(table["cost_minus_budget"]), rel=1e-2, abs=1e-6)
    assert exact[2] == pytest.approx(np.array(table["mean_queue_over_V"]), rel=1e-3)


def test_time_is_within_the_bound_and_queues_settle_at_the_multiplier(toy, exact):
    best, multiplier = best_mean(toy["seen"], toy["time"], toy["cost"])
    weights = np.array(EXPECTED["exact_state"]["V"])
    bound = 0.5 * max(1.0, toy["cost"].max() - 1.0) ** 2
    assert (exact[0] <= best + bound / weights).all()  # G2
    slack = 1.0 - toy["seen"] @ toy["cost"].min(1)
    spread = np.ptp(toy["time"])
    assert (exact[2] * weights <= (bound + weights * spread) / slack).all()  # G3
    assert exact[2][-2:] == pytest.approx(multiplier, rel=0.02)  # G4
    assert (exact[1] <= 1.05 * weights * multiplier / STEPS + 15.0 / STEPS).all()  # G5


def test_stale_states_keep_the_budget(toy):
    table = EXPECTED["stale_state"]
    late = np.concatenate([[0], toy["path"][:-1]])
    time, excess, _ = drive(toy, table["V"], toy["path"], late)
    assert time == pytest.approx(np.array(table["mean_T"]), rel=1e-3)
    assert excess == pytest.approx(np.array(table["cost_minus_budget"]), rel=1e-2, abs=2e-6)


def sticky_path(toy, steps, stay=0.98):
    rng = np.random.default_rng(0)
    rng.choice(3, size=STEPS, p=toy["chance"])
    leaves = (rng.random(steps) >= stay).tolist()
    path, state = [], 0
    for leave in leaves:
        state = int(rng.choice(3, p=toy["chance"])) if leave else state
        path.append(state)
    return np.array(path)


def test_sticky_states_and_hysteresis(toy):
    table = EXPECTED["markov_hysteresis"]
    path = sticky_path(toy, table["steps"])
    best, _ = best_mean(np.bincount(path) / len(path), toy["time"], toy["cost"])
    assert best == pytest.approx(table["T_star"], rel=1e-4)
    rows = np.array(table["rows_V_threshold_meanT_with_migration_switches_per_1000"])
    got = hysteresis(toy, rows[:, 0], rows[:, 1], path, table["migration_cost"])
    assert got[:, 0] == pytest.approx(rows[:, 2], rel=1e-4)
    assert got[:, 1] == pytest.approx(rows[:, 3], abs=0.1)


def hysteresis(toy, weights, thresholds, path, migration):
    time, cost = toy["time"], toy["cost"]
    backlog, total, switches = (np.zeros(len(weights)) for _ in range(3))
    running = None
    each = np.arange(len(weights))
    late = np.concatenate([path[:1], path[:-1]])
    for now, guess in zip(path.tolist(), late.tolist(), strict=True):
        worth = weights[:, None] * time[guess] + backlog[:, None] * cost[guess]
        pick = worth.argmin(1)
        if running is None:
            running = pick
        else:
            change = worth[each, running] - worth[each, pick] > weights * thresholds * migration
            change &= pick != running
            running = np.where(change, pick, running)
            total += migration * change
            switches += change
        total += time[now, running]
        backlog, _ = drift(backlog, cost[now, running] - 1.0)
    return np.stack([total / len(path), 1000.0 * switches / len(path)], axis=1)
