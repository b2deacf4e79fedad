"""Policies side by side on the paths of a scenario, beside the bound of one who knows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.search.subsets import COSTS
from foreshard.control.slots import MP_OVER_DP, Budget
from foreshard.errors import SpecError, unknown
from foreshard.simulate.clairvoyant_bound import Bound, bound_of
from foreshard.simulate.dynamics import describe, draw
from foreshard.simulate.environment import Environment
from foreshard.simulate.hindsight import best_subset, violation
from foreshard.simulate.policy_adapter import MOST_STAGES, controller_rule
from foreshard.simulate.reference_policies import BY_SHARES, BankedBudget, Greedy, WholeClusterPlan, on_subset
from foreshard.simulate.slot_loop import Rule, Run, play
from foreshard.simulate.workload import Workload, cluster_of, model_of, workload
from foreshard.spec.cluster import Cluster
from foreshard.spec.scenario import Scenario
from foreshard.spec.shown import Shown

HELD = tuple(f"{name}@budget" for name in BY_SHARES if name != "lb-bsp")
POLICIES = (
    "lyapunov",
    "equal-share",
    "lb-bsp",
    "proportional",
    "metis-like",
    "malleus-like",
    "amp-like",
    "sailor-like",
    "greedy-fastest",
    "greedy-cheapest",
    "greedy-banked",
    "static-best",
    *HELD,
)
"""All policies, ours first. `static-best` is lb-bsp on the best fixed subset of devices: lb-bsp@budget."""
STAGES = "lyapunov-stages"
"""Ours on one pipeline whose stages are devices that split every micro-batch; plays when it is named."""
PIPELINES = "lyapunov-pipelines"
"""Ours on pipelines side by side; plays when it is named, and the bound is then over these."""

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Quantiles 0.975 of Student's distribution for 1 to 15 degrees of freedom; 1.96 beyond."""
_SERIES = 100
"""Points of a series in the object: what a plot shows, and a page stays small."""
KEPT = 0.01
"""Excess over a budget that still counts as keeping it."""
FIXED = "equal-share@budget"
"""Equal shares on the best fixed devices that keep the budgets."""
LEAST_CUT = 0.01
"""Ideal cut below which a part of it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPath:
    """One seed: how every policy fared on its path."""

    seed: int
    budgets: tuple[Budget, ...]
    bound: Bound
    equal: Bound  # of equal shares: the devices that share are chosen knowing the path
    runs: Mapping[str, Run]  # by policy
    path: Mapping[str, float]  # how the path looks, see `dynamics.describe`


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualShareCut:
    """Parts of the mean step time of equal shares that keep the budgets."""

    equal_s: float
    feasible: bool  # false where these do not keep the budgets after all
    # ours, ideal: what a policy and what the bound saves of it
    ours: float
    ideal: float

    @property
    def part(self) -> float | None:
        """Return the part of the ideal cut that is reached; None where there is next to nothing to cut."""
        return self.ours / self.ideal if self.ideal >= LEAST_CUT else None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evaluation(Shown):
    """All rounds of a scenario."""

    scenario: Scenario
    cluster: Cluster
    slots: int
    rounds: tuple[EvaluatedPath, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies that took part."""
        return tuple(self.rounds[0].runs)

    @property
    def bounded(self) -> str:
        """Return which plans the bound is over."""
        if PIPELINES in self.policies:
            return "pipelines side by side on all subsets of the devices"
        return "data-parallel plans on all subsets of the devices"

    def times(self, name: str) -> np.ndarray:
        """Return the mean step time of a policy by seed; of 'bound' and 'equal' that of these bounds."""
        if name == "bound":
            return np.array([played.bound.mean_step_time_s for played in self.rounds])
        if name == "equal":
            return np.array([played.equal.mean_step_time_s for played in self.rounds])
        return np.array([played.runs[name].time_s.mean() for played in self.rounds])

    def violations(self, name: str) -> np.ndarray:
        """Return the largest excess over a budget by seed, at least 0."""
        return np.array([max(0.0, violation(played.runs[name], played.budgets)) for played in self.rounds])

    def cut(self, name: str, of: str = "equal") -> EqualShareCut:
        """Return by how much a policy is faster than equal shares at the same budgets.

        Those are the bound of equal shares, or a policy.
        """
        equal = self.times(of)
        kept = all(played.equal.feasible for played in self.rounds)
        if of != "equal":
            kept = bool((self.violations(of) <= KEPT).all())
        return EqualShareCut(
            equal_s=float(equal.mean()),
            feasible=kept,
            ours=float((1.0 - self.times(name) / equal).mean()),
            ideal=float((1.0 - self.times("bound") / equal).mean()),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the object of ``simulate --json``."""
        bound = self.times("bound")
        return {
            "schema_version": 1,
            "scenario": self.scenario.name,
            "slots": self.slots,
            "batches": self.scenario.batches,
            "seeds": [played.seed for played in self.rounds],
            "policies": {name: self._policy(name) for name in self.policies},
            "bound": {
                "mean_step_time_s": float(bound.mean()),
                "ci95_s": half_width(bound),
                "feasible": all(played.bound.feasible for played in self.rounds),
                "least_excess": max(played.bound.least_excess for played in self.rounds),
                "states": [played.bound.num_states for played in self.rounds],
                "multipliers": [list(played.bound.multipliers) for played in self.rounds],
                "plans": self.bounded,
            },
            "equal_share_in_budget": self._equal(),
            "path": [dict(played.path) for played in self.rounds],
        }

    def _equal(self) -> dict[str, object]:
        found: dict[str, object] = {
            "mean_step_time_s": float(self.times("equal").mean()),
            "ci95_s": half_width(self.times("equal")),
            "feasible": all(played.equal.feasible for played in self.rounds),
        }
        if "lyapunov" in self.policies:
            cut = self.cut("lyapunov")
            found |= {"cut": cut.ours, "ideal_cut": cut.ideal, "part_of_ideal": cut.part}
        if {"lyapunov", FIXED} <= set(self.policies):
            cut = self.cut("lyapunov", FIXED)
            found["fixed"] = {
                "mean_step_time_s": cut.equal_s,
                "kept": cut.feasible,
                "cut": cut.ours,
                "ideal_cut": cut.ideal,
                "part_of_ideal": cut.part,
            }
        return found

    def _policy(self, name: str) -> dict[str, object]:
        runs = [played.runs[name] for played in self.rounds]
        times, over = self.times(name), self.violations(name)
        means = {kind: float(np.mean([run.costs[kind].mean() for run in runs])) for kind in COSTS}
        limits = {
            budget.name: float(np.mean([played.budgets[i].limit for played in self.rounds]))
            for i, budget in enumerate(self.rounds[0].budgets)
        }
        gap = times / self.times("bound") - 1.0
        return {
            "mean_step_time_s": float(times.mean()),
            "ci95_s": half_width(times),
            "mean_cost": means,
            "budget": limits,
            "violation": float(over.mean()),
            "violation_max": float(over.max()),
            "over_bound": float(gap.mean()),
            "over_bound_max": float(gap.max()),
            "reconfigurations": _number([run.reconfigurations for run in runs]),
            "forced": _number([run.forced for run in runs]),
            "reshares": _number([run.reshares for run in runs]),
            "change_share": float(np.mean([run.change_s.sum() / run.time_s.sum() for run in runs])),
            "steps": self.slots * self.scenario.batches,
            "series": _series(runs[0]),
        }


def half_width(values: np.ndarray) -> float | None:
    """Return half the width of the 95 % confidence interval of a mean; None for one value."""
    count = len(values)
    if count < 2:
        return None
    quantile = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    return float(quantile * values.std(ddof=1) / math.sqrt(count))


def _number(values: Sequence[int]) -> float | int:
    return values[0] if len(values) == 1 else float(np.mean(values))


def _series(run: Run) -> dict[str, list[float]]:
    """Return means over equal stretches of the run."""
    parts = np.array_split(np.arange(len(run.time_s)), min(_SERIES, len(run.time_s)))
    rows = {"step_time_s": run.time_s, "usd": run.costs["usd"], "devices": run.used * 1.0}
    return {name: [float(f"{values[part].mean():.6g}") for part in parts] for name, values in rows.items()}


def evaluate_policies(
    scenario: Scenario,
    *,
    policies: Sequence[str] | None = None,
    slots: int | None = None,
    seeds: int = 1,
) -> Evaluation:
    """Return how policies fare on the paths of a scenario.

    Parameters
    ----------
    scenario : Scenario
    policies : sequence of str, optional
        Of `POLICIES`, which play by default, `STAGES` and `PIPELINES`.
    slots : int, optional
        The scenario's by default.
    seeds : int
        Paths, with the scenario's seed and the ones after it.

    Raises
    ------
    SpecError
        For an unknown policy, or a scenario that cannot be played.
    """
    names = POLICIES if policies is None else tuple(dict.fromkeys(policies))
    for name in names:
        _known(name, None, "--policy")
    for table in scenario.budget:
        if table.of:
            _known(table.of, scenario.file, "budget.of")
    cluster = cluster_of(scenario)
    work = workload(scenario, model_of(scenario), cluster)
    length = scenario.slots if slots is None else slots
    rounds = tuple(_round(scenario, cluster, work, names, length, scenario.seed + i) for i in range(seeds))
    return Evaluation(scenario=scenario, cluster=cluster, slots=length, rounds=rounds)


def _known(name: str, file: str | None, key: str) -> None:
    known = (*POLICIES, STAGES, PIPELINES)
    if name not in known:
        rule, otherwise = "Policies are", "Use one of them"
        raise unknown("policy", name, known, key=key, file=file, rule=rule, otherwise=otherwise)


def _round(
    scenario: Scenario, cluster: Cluster, work: Workload, names: Sequence[str], slots: int, seed: int
) -> EvaluatedPath:
    environment, budgets, spent = environment_of(scenario, cluster, work, slots=slots, seed=seed)
    return EvaluatedPath(
        seed=seed,
        budgets=budgets,
        bound=bound_of(environment, budgets, max_stages=MOST_STAGES if PIPELINES in names else 1),
        equal=bound_of(environment, budgets, equal=True),
        runs={
            name: spent[name]
            if name in spent
            else run_of(_rule(name, environment, budgets, scenario), environment, scenario)
            for name in names
        },
        path=describe(environment.path),
    )


def run_of(rule: Rule, environment: Environment, scenario: Scenario) -> Run:
    """Return how a policy fares on the path of its environment."""
    return play(rule, environment, sees_now=scenario.sees_now, batches=scenario.batches)


def environment_of(
    scenario: Scenario, cluster: Cluster, work: Workload, *, slots: int, seed: int
) -> tuple[Environment, tuple[Budget, ...], Mapping[str, Run]]:
    """Return a path, the budgets in numbers, and the runs of the policies that they are a part of."""
    path = draw(scenario, cluster, slots=slots, seed=seed)
    environment = Environment(work=work, path=path, pause_s=scenario.pause, apart=apart_of(scenario, work))
    spenders = {table.of for table in scenario.budget if table.of}
    for name in spenders:
        if name not in _FREE:
            raise SpecError(
                f"{name} needs budgets itself",
                file=scenario.file,
                key="budget.of",
                value=name,
                rule=f"Budgets are parts of what one of these spends: {', '.join(_FREE)}",
            )
    spent = {
        name: run_of(_rule(name, environment, (), scenario), environment, scenario)
        for name in sorted(spenders)
    }
    return environment, tuple(_budget(scenario, i, spent) for i in range(len(scenario.budget))), spent


def apart_of(scenario: Scenario, work: Workload) -> frozenset[int]:
    """Return the ranks that budgets count one by one."""
    found = set()
    for index, table in enumerate(scenario.budget):
        if table.rank is not None:
            if table.rank >= work.num_devices:
                raise SpecError(
                    f"rank {table.rank} of {work.num_devices}",
                    file=scenario.file,
                    key=f"budget[{index}].rank",
                    value=table.rank,
                    rule="Duty is of a device of the cluster",
                )
            found.add(table.rank)
        if table.kind == "carbon_kg" and not scenario.carbon_g_per_kwh:
            raise SpecError(
                "no carbon",
                file=scenario.file,
                key="carbon_g_per_kwh",
                value=scenario.carbon_g_per_kwh,
                rule=f"Budget {table.name} counts it",
                fix="State carbon_g_per_kwh",
            )
    return frozenset(found)


def _budget(scenario: Scenario, index: int, spent: Mapping[str, Run]) -> Budget:
    """Return a budget with its limit in numbers."""
    table = scenario.budget[index]
    budget = Budget(name=table.name, kind=table.kind, limit=1.0, per=table.per, worker=table.rank)
    limit = table.limit
    if table.of is not None:
        run = spent[table.of]
        mean = float(run.costs[budget.key].mean()) / budget.allowance(float(run.time_s.mean()))
        limit = (table.share or 1.0) * mean
        if limit == 0.0:
            raise SpecError(
                f"{table.of} spends nothing of budget {table.name}",
                file=scenario.file,
                key=f"budget[{index}].of",
                value=table.of,
                rule="A budget is above 0",
                fix="State its limit, or name a policy that spends some",
            )
    assert limit is not None
    return replace(budget, limit=limit)


_FREE: Mapping[str, Callable[[Environment], Rule]] = {
    **{name: (lambda environment, made=made: made(environment, None)) for name, made in BY_SHARES.items()},  # type: ignore[misc]
    "amp-like": WholeClusterPlan,
    "greedy-fastest": Greedy,
}


def _rule(name: str, environment: Environment, budgets: Sequence[Budget], scenario: Scenario) -> Rule:
    """Return a policy, ready for the first slot."""
    if name in _FREE:
        return _FREE[name](environment)
    if name == "lyapunov":
        return controller_rule(environment, budgets, scenario)
    if name == STAGES:
        return controller_rule(environment, budgets, scenario, reading=MP_OVER_DP)
    if name == PIPELINES:
        return controller_rule(environment, budgets, scenario, max_stages=MOST_STAGES)
    if name == "sailor-like":
        return WholeClusterPlan(environment, budgets)
    if name == "greedy-cheapest":
        return Greedy(environment, budgets or [Budget(name="usd", kind="usd", limit=1.0)])
    if name == "greedy-banked":
        return BankedBudget(environment, budgets)
    base = "lb-bsp" if name == "static-best" else name.removesuffix("@budget")
    kept = best_subset(environment, base, budgets, sees_now=scenario.sees_now, batches=scenario.batches)
    return BY_SHARES[base](environment, on_subset(environment, kept))
