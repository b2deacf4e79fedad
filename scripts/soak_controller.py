"""Random scenarios for the controller: its excess over budgets and its time against the guarantee.

    python scripts/soak_controller.py [--scenarios 500] [--steps 1000] [--seed 0]

Each scenario draws ranks, speeds that stay, swap or are independent in every step, a truth above the model,
prices, links and one to three budgets of any kind that a fixed plan keeps in every window, by a fifth or just
so. What is played is a run, or the beginning of one 80 times as long. In every step the plan must be whole,
the books must close and no budget may be exceeded by more than `MOST_EXCESS`, as counted beside the
controller. Runs of `LONG` steps or more may take `MOST_TIME` of the mean step of the best fixed plan that
keeps every budget in every window: of all subsets of ranks, with even shares and with shares by stated and by
mean speeds. What was played so far is printed every few scenarios.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from foreshard.control.controller import Controller
from foreshard.control.experts import WINDOW
from foreshard.control.orders import shares_of, structure_of
from foreshard.control.search.pricing import evaluate
from foreshard.control.search.subsets import data_parallel, even_shares
from foreshard.control.slots import KINDS, Budget, Chain, Choice, State, Structure
from foreshard.spec.online import StepMeasured
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import parse_plan

MOST_EXCESS = 2.0 * WINDOW
"""Budgets of a step, see docs/controller.md."""
MOST_TIME = 1.05
"""Of the best fixed plan's time, in runs of LONG steps or more."""
LONG = 100 * WINDOW
BATCH, LAYERS = 48, 4
LONGER = 80
"""How many times as long as what is played a run is that has only begun: V is then at its largest."""
PATHS = ("stays", "swaps", "independent")
SAY_EVERY = 10
"""Scenarios between two lines that say how far the search is: some ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomScenario:
    """A cluster, how fast it is in every step, and budgets that a fixed plan keeps."""

    chain: Chain
    stated: State
    speeds: np.ndarray
    factor: float
    budgets: tuple[Budget, ...]
    kind: str
    horizon: int
    _known: dict[tuple[Structure, tuple[int, ...], bytes], Choice] = field(default_factory=dict)

    def real(self, structure: Structure, shares: tuple[int, ...], step: int) -> Choice:
        """Return what a plan takes and costs in a step, before the factor."""
        speed = self.speeds[step]
        key = structure, shares, speed.tobytes()
        if key not in self._known:
            self._known[key] = evaluate(self.chain, at(self.stated, speed), structure, shares, micro_batch=1)
        return self._known[key]


def at(stated: State, speed: np.ndarray) -> State:
    """Return the cluster at other speeds."""
    return State(
        speed=speed,
        available=stated.available,
        bandwidth_bytes_per_s=stated.bandwidth_bytes_per_s,
        latency_s=stated.latency_s,
        usd_per_h=stated.usd_per_h,
        busy_w=stated.busy_w,
        idle_w=stated.idle_w,
        usd_per_byte=stated.usd_per_byte,
        kg_per_j=stated.kg_per_j,
    )


def drawn(seed: int, steps: int) -> RandomScenario:
    """Return a scenario."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 6))
    links = np.triu(rng.choice([10.0, 2.0, 0.5], size=(ranks, ranks)), 1)
    paid = np.triu(rng.choice([0.0, 0.01], size=(ranks, ranks)), 1)
    nominal = rng.choice([1.0, 0.5, 0.25], ranks) if rng.random() < 0.5 else np.ones(ranks)
    stated = State(
        speed=nominal,
        available=np.ones(ranks, bool),
        bandwidth_bytes_per_s=links + links.T + 10.0 * np.eye(ranks),
        latency_s=np.zeros((ranks, ranks)),
        usd_per_h=rng.choice([900.0, 1800.0, 7200.0], ranks),
        busy_w=rng.choice([300.0, 700.0], ranks),
        idle_w=np.full(ranks, 100.0),
        usd_per_byte=paid + paid.T,
        kg_per_j=rng.choice([1e-8, 1e-7], ranks),
    )
    chain = Chain(
        layer_s=np.full((ranks, LAYERS), 0.1),
        boundary_bytes=np.full(LAYERS - 1, 0.1),
        sync_bytes=np.full(LAYERS, 0.05),
        state_bytes=np.full(LAYERS, 1.0),
        saved_bytes=np.full(LAYERS, 0.01),
        memory_bytes=np.full(ranks, 50.0),
    )
    kind = PATHS[int(rng.integers(len(PATHS)))]
    slow, stay = rng.choice([0.125, 0.25, 0.5]), 0.99 if kind == "stays" else 0.5
    if kind == "swaps":
        half = rng.random(ranks) < 0.5
        turn = np.arange(steps)[:, None] // int(rng.integers(1, 4)) % 2 == 0
        speeds = np.where(turn == half, 1.0, slow) * nominal
    else:
        flips = np.cumsum(rng.random((steps, ranks)) >= stay, axis=0) % 2
        speeds = np.where(flips == 0, 1.0, slow) * nominal
    scenario = RandomScenario(
        chain=chain,
        stated=stated,
        speeds=speeds,
        factor=float(rng.choice([1.0, 1.5])),
        budgets=(),
        kind=kind,
        horizon=steps,
    )
    scenario = replace(scenario, budgets=kept_budgets(scenario, rng))
    return replace(scenario, horizon=steps * int(rng.choice([1, LONGER])))


def kept_budgets(scenario: RandomScenario, rng: np.random.Generator) -> tuple[Budget, ...]:
    """Return budgets that some fixed plan keeps in every window of the path, by a fifth or just so."""
    plans = list(fixed_plans(scenario))
    structure, shares = plans[int(rng.integers(len(plans)))]
    spare, budgets = float(rng.choice([0.0, 0.2])), []
    for i, kind in enumerate(rng.choice(KINDS, size=int(rng.integers(1, 4)), replace=False)):
        worker = int(rng.choice(structure.workers)) if kind == "duty" else None
        per = str(rng.choice(["step", "hour", "second"]))
        budget = Budget(name=f"{i}", kind=str(kind), limit=1.0, per=per, worker=worker)
        limit = most_spent(scenario, (budget,), structure, shares) / (1.0 - spare)
        if limit > 0.0:
            budgets.append(replace(budget, limit=limit))
    return tuple(budgets)


def fixed_plans(scenario: RandomScenario) -> Iterator[tuple[Structure, tuple[int, ...]]]:
    """Yield all subsets of the ranks with even shares and with shares by stated and by mean speeds."""
    chain = scenario.chain
    mean = 1.0 / np.mean(1.0 / scenario.speeds, axis=0)
    for size in range(1, chain.num_workers + 1):
        for some in itertools.combinations(range(chain.num_workers), size):
            found = [even_shares(size, BATCH)]
            for speed in (scenario.stated.speed[list(some)], mean[list(some)]):
                shares = np.floor(BATCH * speed / speed.sum()).astype(int)
                shares[int(speed.argmax())] += BATCH - shares.sum()
                found.append(shares)
            for shares in dict.fromkeys(tuple(shares.tolist()) for shares in found):
                if min(shares) > 0:
                    yield data_parallel(some, chain), shares


def most_spent(
    scenario: RandomScenario, budgets: tuple[Budget, ...], structure: Structure, shares: tuple[int, ...]
) -> float:
    """Return the largest part of a budget that a fixed plan spends in a window of the path."""
    _, place = np.unique(scenario.speeds, axis=0, return_index=True)
    _, where = np.unique(scenario.speeds, axis=0, return_inverse=True)
    found = [scenario.real(structure, shares, int(step)) for step in place]
    window, worst = np.ones(min(WINDOW, len(scenario.speeds))), 0.0
    for budget in budgets:
        spent = np.array([scenario.factor * choice.costs[budget.key] for choice in found])[where.ravel()]
        took = np.array([scenario.factor * choice.time_s for choice in found])[where.ravel()]
        allowed = np.array([budget.allowance(float(time_s)) for time_s in took])
        part = np.convolve(spent, window, "valid") / np.convolve(allowed, window, "valid")
        worst = max(worst, float(part.max()))
    return worst


def best_fixed_s(scenario: RandomScenario) -> float:
    """Return the least mean step of a fixed plan that keeps every budget in every window."""
    kinds, count = np.unique(scenario.speeds, axis=0, return_counts=True)
    place = [int(np.flatnonzero((scenario.speeds == kind).all(1))[0]) for kind in kinds]
    best = np.inf
    for structure, shares in fixed_plans(scenario):
        took = np.array([scenario.real(structure, shares, step).time_s for step in place])
        mean_s = scenario.factor * float(took @ count) / count.sum()
        if mean_s < best and most_spent(scenario, scenario.budgets, structure, shares) <= 1.0 + 1e-9:
            best = mean_s
    return best


def first_plan(ranks: int) -> Plan:
    """Return a replica on every rank."""
    groups = [
        {"share": share, "stages": [{"ranks": [rank], "layers": [[0, LAYERS]]}]}
        for rank, share in enumerate(even_shares(ranks, BATCH).tolist())
    ]
    return parse_plan({"global_batch": BATCH, "seq_len": 8, "groups": groups, "defaults": {"micro_batch": 1}})


def played(scenario: RandomScenario) -> tuple[float, float]:
    """Return the mean step of a run, and the largest excess of its first steps, however many.

    The excess is in budgets of their mean step.
    """
    controller = Controller(
        scenario.chain,
        scenario.stated,
        first_plan(scenario.chain.num_workers),
        budgets=scenario.budgets,
        horizon=scenario.horizon,
        max_stages=1,
    )
    spent, allowed, worst = np.zeros(len(scenario.budgets)), np.zeros(len(scenario.budgets)), -np.inf
    total_s = 0.0
    for step, speed in enumerate(scenario.speeds):
        structure = structure_of(controller.plan)
        took = scenario.real(structure, shares_of(controller.plan), step)
        time_s = scenario.factor * took.time_s
        costs = {budget.name: scenario.factor * took.costs[budget.key] for budget in scenario.budgets}
        total_s += time_s
        spent += list(costs.values())
        allowed += [budget.allowance(time_s) for budget in scenario.budgets]
        worst = max(worst, (step + 1) * float((spent / allowed).max() - 1.0))
        seen = {rank: float(speed[rank]) for rank in structure.workers}
        controller.on(StepMeasured(step=step, time_s=time_s, relative_speed=seen, costs=costs))
        controller.check_invariants()
    return total_s / len(scenario.speeds), worst


def searched(scenarios: int, steps: int, seed: int) -> int:
    """Play scenarios, print those that break the guarantee and the count; return how many did."""
    broken, worst, count, since = 0, -np.inf, 0, time.process_time()
    parts: list[float] = []
    for number in range(seed, seed + scenarios):
        scenario = drawn(number, steps)
        if scenario.budgets:
            count += 1
            mean_s, excess = played(scenario)
            part = mean_s / best_fixed_s(scenario)
            worst = max(worst, excess)
            parts.append(part)
            is_slow = steps >= LONG and part > MOST_TIME
            if excess > MOST_EXCESS or is_slow:
                broken += 1
                print(
                    f"seed {number}: {scenario.kind}, excess {excess:.0f}, "
                    f"{part:.3f} of the time of the best fixed plan, {scenario.budgets}",
                    flush=True,
                )
        if (number - seed + 1) % SAY_EVERY == 0 or number == seed + scenarios - 1:
            above = sum(part > MOST_TIME for part in parts)
            print(
                f"seeds {seed} to {number}: {count} scenarios of {steps} steps, {broken} broke a bound, "
                f"worst excess {worst:.0f} of {MOST_EXCESS:.0f} budgets of a step, "
                f"time {np.mean(parts or [0.0]):.3f} "
                f"(worst {max(parts, default=0.0):.3f}, {above} above {MOST_TIME}) of the best fixed plan's, "
                f"{time.process_time() - since:.0f} s of processor time",
                flush=True,
            )
    return broken


def main() -> int:
    """Search; 0 when nothing was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", type=int, default=500)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    return 1 if searched(asked.scenarios, asked.steps, asked.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
