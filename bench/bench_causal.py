"""What is lost to late sight alone: the bound of whoever knows the law of the speeds, but not the next slot.

The clairvoyant bound knows every slot before it begins. A policy does not: the first batch of a slot that
differs from the one before runs on what was known. Here a policy knows more than any in the simulator: the
law, when a slot begins, every speed after its first batch, and changes are free. What it cannot know is who
changes next. The mean over the law of a slot's first batch, at the best shares of every subset of the
devices, takes the place of the first batch in the linear program of the clairvoyant bound; so no causal
policy that keeps the budgets is faster in the mean over paths.

For scenarios in which each device has a chain of its own (`markov` or `co-located` speeds, no more).

Run: python bench/bench_causal.py [--slots 400] [--seeds 5] [SCENARIO.toml ...]
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

from foreshard.control.budgets import dual
from foreshard.control.slots import Budget
from foreshard.errors import SpecError
from foreshard.simulate.clairvoyant_bound import bound_of
from foreshard.simulate.dynamics import CO_LOCATED
from foreshard.simulate.environment import Environment
from foreshard.simulate.evaluation import environment_of, half_width, run_of
from foreshard.simulate.hindsight import violation
from foreshard.simulate.policy_adapter import controller_rule
from foreshard.simulate.workload import cluster_of, model_of, workload
from foreshard.spec.scenario import Scenario, load_scenario

ROOT = Path(__file__).parents[1]
_TIE = 1e-9
"""Relative difference up to which two devices are last together: rounding."""


def subsets_of(devices: int) -> np.ndarray:
    """Return all subsets but the empty one, shape (subsets, devices)."""
    return np.array(list(itertools.product((False, True), repeat=devices)))[1:]


def first_batch_s(
    used: np.ndarray, now_s: np.ndarray, next_s: np.ndarray, chance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for one sample, what no shares are below in the mean, and what balanced shares take.

    Parameters
    ----------
    used : ndarray of bool, shape (subsets, devices)
    now_s : ndarray, shape (devices,)
        Seconds per sample of the slot before.
    next_s, chance : ndarray, shape (devices, levels)
        What each device takes next, independently, and with what chance.

    Returns
    -------
    ndarray, ndarray, shape (subsets,)

    Notes
    -----
    The time is the largest of share times seconds. In every outcome a mixture of the devices' own times is no
    larger; so the least, over devices, of the mean of mixture times seconds is below the mean time of any
    shares. The mixtures here: the device that is last at balanced shares; where several are last together,
    in parts of their speeds; where nothing changes, in such parts that the least is largest.
    """
    rate = used / now_s
    last_s = 1.0 / rate.sum(1)
    time_s = (rate * last_s[:, None])[:, :, None] * next_s
    is_same = np.abs(time_s / last_s[:, None, None] - 1.0) < _TIE
    is_faster = (time_s < last_s[:, None, None]) & ~is_same
    devices = time_s.shape[1]
    when = np.where(used[:, :, None] & ~is_same, chance, 0.0)
    for other in range(devices):
        its = time_s[:, other]
        below = its[:, None, None, :] < time_s[:, :, :, None]
        level = its[:, None, None, :] == time_s[:, :, :, None]
        first = np.arange(devices)[:, None, None] > other
        ends_before = ((below | (level & first)) * chance[other]).sum(3)
        when = when * np.where(np.arange(devices)[:, None] == other, 1.0, ends_before)
    mean = (when * time_s).sum((1, 2))
    weight = (when * next_s).sum(2)
    stays = np.where(used, (chance * is_same).sum(2), 0.0)
    faster = np.where(used, (chance * is_faster).sum(2), 1.0)
    for same in subsets_of(devices):
        chances = np.where(same, stays, faster).prod(1)
        mean += chances * last_s
        is_all = (same == used).all(1)
        weight += np.where(is_all, 0.0, chances)[:, None] * np.where(same, 1.0 / (same / now_s).sum(), 0.0)
    alone = np.where(used, stays, 1.0).prod(1)
    least = np.array(
        [_raised(row[who], now_s[who], left) for row, who, left in zip(weight, used, alone, strict=True)]
    )
    return least, mean


def _raised(weight: np.ndarray, now_s: np.ndarray, chance: float) -> float:
    """Return the largest least of `weight` plus parts of a chance, which sum to one, times seconds."""
    order = np.argsort(weight)
    level = 0.0
    for count in range(1, len(order) + 1):
        who = order[:count]
        level = float((chance + (weight[who] / now_s[who]).sum()) / (1.0 / now_s[who]).sum())
        if count < len(order) and level <= weight[order[count]]:
            break
    return level


def next_speeds(scenario: Scenario, devices: int) -> tuple[np.ndarray, float]:
    """Return the levels that speeds have, and the chance that one stays.

    Raises
    ------
    SpecError
        Where anything else changes.
    """
    if len(scenario.process) == 1 and all(
        budget.kind == "rent_usd" or (budget.kind == "usd" and not scenario.egress_usd_per_gb)
        for budget in scenario.budget
    ):
        process = scenario.process[0]
        is_chain = process.what == "speed" and process.how in ("markov", "co-located")
        if is_chain and not process.together and not process.ranks:
            levels = CO_LOCATED if process.how == "co-located" else process.factors
            return np.array(levels), process.stay or 0.0
    raise SpecError(
        "not one chain of speeds",
        file=scenario.file,
        key="process",
        rule="Each device has a chain of speeds of its own, nothing else changes, and budgets are of rent",
        fix="Name another scenario",
    )


def causal_bound_s(
    scenario: Scenario, environment: Environment, budgets: tuple[Budget, ...]
) -> tuple[float, float]:
    """Return the bound, and what it is with balanced shares in the first batch of every slot."""
    work, path, batches = environment.work, environment.path, scenario.batches
    factors, stay = next_speeds(scenario, work.num_devices)
    used = subsets_of(work.num_devices)
    whole_s = work.chain.before_s[:, -1]
    usd_per_s = used @ work.state.usd_per_h / 3600.0
    first: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    rows, weights = ([], []), []
    for slot in range(1, path.num_slots):
        now, then = int(path.condition[slot - 1]), int(path.condition[slot])
        if now not in first:
            apart = np.abs(path.speed[now][:, None] - factors)
            chance = np.full(apart.shape, (1.0 - stay) / (len(factors) - 1))
            chance[apart == apart.min(1, keepdims=True)] = stay
            found = first_batch_s(used, whole_s / path.speed[now], whole_s[:, None] / factors, chance)
            sync_s = np.array([_sync_s(environment, now, row) for row in used])
            first[now] = tuple(work.batch * each + sync_s for each in found)
        known = environment.subsets(then, int(path.pattern[slot]))
        for kept, time_s in zip(rows, first[now], strict=True):
            kept += [
                (time_s, (time_s * usd_per_s)[:, None]),
                (known.time_s, known.column(budgets, floor=True)),
            ]
        weights += [1.0, batches - 1.0]
    least, balanced = (dual.least_excess(kept, weights, budgets)[1].value_s for kept in rows)
    return least, balanced


def _sync_s(environment: Environment, condition: int, used: np.ndarray) -> float:
    """Return the seconds of a batch that are no device's computing, by what the subset takes."""
    subsets = environment.subsets(condition, 0)
    at = subsets.subset(np.flatnonzero(used).tolist())
    assert at is not None
    return float(subsets.time_s[at] - subsets.busy_s[at])


def played(scenario: Scenario, environment: Environment, budgets: tuple[Budget, ...]) -> list[float]:
    """Return both bounds and the controller's mean step in seconds, and its excess over a budget."""
    known_s = bound_of(environment, budgets).mean_step_time_s
    causal_s, balanced_s = causal_bound_s(scenario, environment, budgets)
    run = run_of(controller_rule(environment, budgets, scenario), environment, scenario)
    return [known_s, causal_s, balanced_s, float(run.time_s.mean()), violation(run, budgets)]


def main() -> None:
    """Print a row for each scenario."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    heavy = ROOT / "bench" / "scenarios" / "heavy_tails.toml"
    parser.add_argument("scenarios", nargs="*", type=Path, default=[heavy])
    parser.add_argument("--slots", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    print("| scenario | bound | causal bound | balanced first batch | controller | excess at most |")
    print("|---|---|---|---|---|---|")
    for path in asked.scenarios:
        scenario, found = load_scenario(path), []
        cluster = cluster_of(scenario)
        work = workload(scenario, model_of(scenario), cluster)
        for seed in range(scenario.seed, scenario.seed + asked.seeds):
            environment, budgets, _ = environment_of(scenario, cluster, work, slots=asked.slots, seed=seed)
            found.append(played(scenario, environment, budgets))
        rows = np.array(found)
        cells = [f"{rows[:, 0].mean():.2f} s"]
        for column in (1, 2, 3):
            over = 100.0 * (rows[:, column] / rows[:, 0] - 1.0)
            cells.append(f"{over.mean():+.1f} ± {half_width(over) or 0.0:.1f} %")
        print(f"| {path.stem} |", " | ".join(cells), f"| {100 * rows[:, 4].max():.1f} % |", flush=True)


if __name__ == "__main__":
    main()
