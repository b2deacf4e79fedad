"""Each rule of the controller switched off, on the shipped scenarios and on those of bench/scenarios.

A figure is the mean step time over the bound of one who knows the path, what was spent above a budget (or
below it) priced at the bound's multipliers: no data-parallel policy is below 0 then, whether it keeps the
budgets or not, so that rules that trade time for budget are comparable. In brackets: the excess in per
cent, and reconfigurations of 1000 slots. Speeds of devices and links are seen through noise.

Run: python bench/bench_ablation.py [--slots 500] [--seeds 1] [--noise 0.05] [--rules A,B] [SCENARIO.toml ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foreshard.control.options import ControllerOptions
from foreshard.control.slots import DP_OVER_MP, MP_OVER_DP, Budget
from foreshard.simulate.clairvoyant_bound import Bound, bound_of
from foreshard.simulate.environment import Environment
from foreshard.simulate.evaluation import environment_of, run_of
from foreshard.simulate.hindsight import violation
from foreshard.simulate.policy_adapter import controller_rule
from foreshard.simulate.workload import cluster_of, model_of, workload
from foreshard.spec.online import Command, Event, Policy, StepMeasured
from foreshard.spec.scenario import Scenario, load_scenario

ROOT = Path(__file__).parents[1]
SCENARIOS = (
    *sorted((ROOT / "examples" / "scenarios").glob("*.toml")),
    *sorted((ROOT / "bench" / "scenarios").glob("*.toml")),
)
STAGES = ("memory_bound",)
"""Scenarios that are played with stages of several devices: no other plan uses all of these."""
RULES: dict[str, dict[str, Any]] = {
    "all rules": {},
    "no learned dual": {"learns_dual": False},
    "no dead zone": {"dead_zone": 0.0},
    "no dead zone of shares": {"share_dead_zone": 0.0},
    "no patience": {"patience": 0.0},
    "patience of the whole change": {"patience": 1.0},
    "no grid": {"grid": 0.0},
    "no first sight": {"trusts_first_sight": False},
    "no plans that stay": {"experts": False},
    "no guard": {"guard": False},
    "no foresight": {"foresees": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One run: mean step over the bound, excess priced or not; excess; reconfigurations of 1000 slots."""

    priced: float
    over: float
    excess: float
    changes: float


class Noisy:
    """A policy that sees speeds through lognormal noise, less of it where several steps are reported."""

    def __init__(self, policy: Policy, noise: float):
        self.policy, self._noise, self._rng = policy, noise, np.random.default_rng(1)

    def on(self, event: Event) -> Sequence[Command]:
        """Pass an event on."""
        if isinstance(event, StepMeasured) and self._noise:
            spread = self._noise / max(event.steps, 1) ** 0.5
            event = replace(
                event,
                relative_speed={
                    rank: speed * self._rng.lognormal(0.0, spread)
                    for rank, speed in event.relative_speed.items()
                },
                link_s={
                    pair: (size, s * self._rng.lognormal(0.0, spread))
                    for pair, (size, s) in event.link_s.items()
                },
            )
        return self.policy.on(event)


def played(
    scenario: Scenario,
    environment: Environment,
    budgets: Sequence[Budget],
    bound: Bound,
    noise: float,
    **rule: Any,
) -> Played:
    """Return how the controller fares with some rules."""
    weight = {"weight": rule.pop("weight")} if "weight" in rule else {}
    reading = MP_OVER_DP if Path(scenario.file or "").stem in STAGES else DP_OVER_MP
    adapter = controller_rule(
        environment, budgets, scenario, reading=reading, options=ControllerOptions(**rule), **weight
    )
    adapter.policy = Noisy(adapter.policy, noise)
    run = run_of(adapter, environment, scenario)
    mean_s = float(run.time_s.mean())
    excess = [float(run.costs[budget.key].mean()) - float(budget.allowance(mean_s)) for budget in budgets]
    priced_s = mean_s + float(np.dot(bound.multipliers, excess))
    return Played(
        priced=priced_s / bound.mean_step_time_s - 1.0,
        over=mean_s / bound.mean_step_time_s - 1.0,
        excess=max(violation(run, budgets), 0.0),
        changes=1000.0 * run.reconfigurations / len(run.time_s),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", type=Path, default=SCENARIOS)
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--rules", type=lambda text: text.split(","), default=list(RULES))
    parser.add_argument("--weight", type=float, help="V, instead of the one that follows from the horizon")
    asked = parser.parse_args()
    weight = {} if asked.weight is None else {"weight": asked.weight}
    found: dict[tuple[str, str], list[Played]] = {}
    for path in asked.scenarios:
        for seed in range(asked.seeds):
            scenario = load_scenario(path)
            cluster = cluster_of(scenario)
            work = workload(scenario, model_of(scenario), cluster)
            environment, budgets, _ = environment_of(
                scenario, cluster, work, slots=asked.slots, seed=scenario.seed + seed
            )
            bound = bound_of(environment, budgets)
            for name in asked.rules:
                run = played(scenario, environment, budgets, bound, asked.noise, **RULES[name], **weight)
                found.setdefault((name, path.stem), []).append(run)
    names = [path.stem for path in asked.scenarios]
    print("| rules |", " | ".join(names), "| mean change |")
    print("|---|" + "---|" * (len(names) + 1))
    for name in asked.rules:
        cells, ratios = [], []
        for stem in names:
            runs, base = found[name, stem], found[asked.rules[0], stem]
            priced, was = (1.0 + float(np.mean([run.priced for run in some])) for some in (runs, base))
            ratios.append(priced / was - 1.0)
            excess, changes = max(run.excess for run in runs), float(np.mean([run.changes for run in runs]))
            cells.append(f"{100 * (priced - 1):.1f} ({100 * excess:.1f}, {changes:.0f})")
        print(f"| {name} |", " | ".join(cells), f"| {100 * float(np.mean(ratios)):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
