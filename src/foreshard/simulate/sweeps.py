"""A scenario again with one thing changed at a time: how uneven, how fast it changes, how V weighs time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreshard.errors import SpecError
from foreshard.simulate.clairvoyant_bound import bound_of
from foreshard.simulate.evaluation import Evaluation, environment_of, evaluate_policies, run_of
from foreshard.simulate.hindsight import violation
from foreshard.simulate.policy_adapter import controller_rule
from foreshard.simulate.workload import cluster_of, model_of, workload
from foreshard.spec.scenario import Scenario, StochasticProcess

FACTORS = (1.0, 1.5, 2.0, 3.0, 3.9, 6.0, 8.0)
"""By which the one straggler is slower; 3.9 is that of PAPER_FACTOR."""
POWERS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Of all factors of a scenario: none of its unevenness, its own in the middle, its square."""
RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""How many times as fast everything changes."""
WEIGHTS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""V, up to the most that a run takes by itself."""
PAPER_CUT, PAPER_FACTOR = 0.6859, 3.91
"""Largest cut of batch time that Ling et al. (IEEE TPDS 36(2), 2025) report, and the straggler among four
equal workers that alone would give it: 1 - 4 / (3 s + 1)."""
_LONGEST = 2000
"""Slots of a sweep: each of its runs takes seconds."""
_COMPARED = ("lyapunov", "static-best")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """Figures of a report, from runs of the first seed over at most 2000 slots."""

    # by 'factor' (of the one straggler) or 'power' (of all factors): cut against equal shares
    uneven: Sequence[dict[str, float]]
    # by 'rate', how many times as fast everything changes: time over the bound
    rates: Sequence[dict[str, float]]
    front: Sequence[dict[str, float]]  # by 'weight' V: time over the bound, excess over the budget
    slots: int


def sweeps(scenario: Scenario, slots: int) -> Sweeps:
    """Return the figures of a scenario."""
    length = min(slots, _LONGEST)
    return Sweeps(
        uneven=uneven(scenario, length),
        rates=rates(scenario, length),
        front=front(scenario, length),
        slots=length,
    )


def uneven(scenario: Scenario, slots: int) -> list[dict[str, float]]:
    """Return the cut against equal shares as the devices become more uneven.

    'ours' and 'ideal' keep the budgets, equal shares do not; 'free' is balanced shares without budgets.
    """
    rows = []
    straggling = any(process.how == "one-at-a-time" for process in scenario.process)
    for value in FACTORS if straggling else POWERS:
        changed = replace(
            scenario, process=tuple(_uneven(process, value, straggling) for process in scenario.process)
        )
        found = _tried(changed, ("lyapunov", "equal-share", "greedy-fastest"), slots)
        if found is None:
            continue
        equal = float(found.times("equal-share")[0])
        row = {"factor" if straggling else "power": value, "equal_share_s": equal}
        for name, policy in (("ours", "lyapunov"), ("ideal", "bound"), ("free", "greedy-fastest")):
            row[name] = 1.0 - float(found.times(policy)[0]) / equal
        if straggling:
            count = found.cluster.num_devices
            row["formula"] = 1.0 - count / ((count - 1) * value + 1.0)
        rows.append(row)
    return rows


def _tried(scenario: Scenario, policies: Sequence[str], slots: int) -> Evaluation | None:
    """Return an evaluation; None where the changed scenario cannot be played."""
    try:
        return evaluate_policies(scenario, policies=policies, slots=slots)
    except SpecError:
        return None


def _uneven(process: StochasticProcess, value: float, straggling: bool) -> StochasticProcess:
    if straggling:
        return replace(process, factor=value) if process.how == "one-at-a-time" else process
    return replace(
        process,
        factor=None if process.factor is None else process.factor**value,
        factors=tuple(factor**value for factor in process.factors),
        swing=None if process.swing is None else process.swing**value,
    )


def rates(scenario: Scenario, slots: int) -> list[dict[str, float]]:
    """Return the time over the bound as everything changes faster."""
    rows = []
    for rate in RATES:
        quick = tuple(
            process
            if process.stay is None
            else replace(process, stay=max(0.0, 1.0 - rate * (1.0 - process.stay)))
            for process in scenario.process
        )
        found = _tried(replace(scenario, process=quick, slot=rate * scenario.slot), _COMPARED, slots)
        if found is None:
            continue
        row = {"rate": rate, "changes_per_1000": found.rounds[0].path["changes_per_1000"]}
        bound = float(found.times("bound")[0])
        for name in _COMPARED:
            row[name] = float(found.times(name)[0]) / bound - 1.0
        row["violation"] = float(found.violations("lyapunov")[0])
        row["reconfigurations"] = 1000.0 * found.rounds[0].runs["lyapunov"].reconfigurations / slots
        rows.append(row)
    return rows


def front(scenario: Scenario, slots: int) -> list[dict[str, float]]:
    """Return time and excess over the budget as V grows."""
    cluster = cluster_of(scenario)
    work = workload(scenario, model_of(scenario), cluster)
    environment, budgets, _ = environment_of(scenario, cluster, work, slots=slots, seed=scenario.seed)
    bound_s = bound_of(environment, budgets).mean_step_time_s
    rows = []
    for weight in WEIGHTS:
        rule = controller_rule(environment, budgets, scenario, weight=weight)
        run = run_of(rule, environment, scenario)
        rows.append(
            {
                "weight": weight,
                "over_bound": float(run.time_s.mean()) / bound_s - 1.0,
                "excess": violation(run, budgets) if budgets else 0.0,
                "reconfigurations": 1000.0 * run.reconfigurations / slots,
            }
        )
    return rows
