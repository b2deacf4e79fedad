"""Where adapting data and model together pays: the controller beside fixed plans, LB-BSP and greedy.

    python bench/bench_gains.py --rows gains.jsonl --picture docs/gains_map.svg

Simulated. A map over factor of the straggler, heterogeneity, network and budget, and regimes in which cuts
or groups carry the gain, with these switched off one by one. Four workers at two sites, a chain of eight to
twelve layers, 64 samples a step; a straggler moves from worker to worker. All policies meet the same paths,
see the step before, and pay for changes; they start from the best fixed plan. What was played is kept in
`--rows` and not played again.

The strongest fixed rival is the best of all plans that stay (every subset, partition, order, cut; shares by
a linear program), chosen knowing the path. Who spends more than 1 % above the budget is no rival.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from charts import heat_map
from fixed_plans import FixedPlan, Hindsight

from foreshard.control import orders
from foreshard.control.controller import Controller
from foreshard.control.policies import GreedyReplanning, replicas_by_speed
from foreshard.control.search import slot_search
from foreshard.control.search.pipelines import PipelineStates
from foreshard.control.slots import DP_OVER_MP, Budget, Chain, Choice, State, Structure
from foreshard.simulate.dynamics import Path
from foreshard.simulate.environment import Environment
from foreshard.simulate.evaluation import KEPT, half_width
from foreshard.simulate.hindsight import violation
from foreshard.simulate.policy_adapter import PolicyAdapter
from foreshard.simulate.reference_policies import SpeedShare, on_subset
from foreshard.simulate.slot_loop import Rule, Run, play
from foreshard.simulate.workload import Workload
from foreshard.spec.plan import Group, Plan, Stage

WORKERS, BATCH, MICRO, MAX_STAGES = 4, 64, 1, 4
SITE = (0, 0, 1, 1)
BETWEEN_FACTOR = 20.0
"""Rate of links inside a site over that between sites."""
STEP_S = 1.0
"""Step of replicas on all workers at stated speeds, gradients free: the unit of time."""
MESSAGE_PART = 0.25
"""Bytes between two layers of all samples of a step, over those of all gradients."""
STATE_PART = 4.0
"""Bytes of a layer's state over those of its gradients: values, gradients, two moments."""
PAUSE_S = 0.5
BUDGET = "usd_per_h"


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A cluster, a model and how they change.

    Attributes
    ----------
    slow : tuple of float
        By worker, how many times as long its work takes as that of the fastest.
    factor, stay : float
        One worker at a time is `factor` times slower; it stays the one with chance `stay`.
    sync : float
        Seconds of the sum of gradients over replicas at both sites, in units of STEP_S.
    fades, link_stay : float
        The link between sites is at times so many times slower.
    layers : tuple of float
        Work of each layer.
    gradients : tuple of float
        Gradient bytes of each layer; as the work by default.
    memory : float or None
        Part of the model's state that a worker holds.
    budget : float or None
        Part of the rent of all workers.
    price : float
        Rent is speed to this power.
    """

    name: str
    slow: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    factor: float = 1.0
    stay: float = 0.98
    sync: float = 0.02
    fades: float = 1.0
    link_stay: float = 0.98
    layers: tuple[float, ...] = (1.0,) * 8
    gradients: tuple[float, ...] | None = None
    memory: float | None = None
    budget: float | None = None
    price: float = 1.0

    def workload(self) -> Workload:
        """Return the job on the workers at stated speeds."""
        slow, work = np.array(self.slow), np.array(self.layers) / sum(self.layers)
        size = np.array(self.gradients or self.layers)
        size = size / size.sum()
        whole_s = slow * STEP_S * float((1.0 / slow).sum()) / BATCH
        far = 2.0 * (WORKERS - 1) / WORKERS / max(self.sync * STEP_S, 1e-9)
        site = np.array(SITE)
        rate = np.where(site[:, None] == site[None, :], BETWEEN_FACTOR * far, far)
        memory = np.inf if self.memory is None else self.memory * STATE_PART
        chain = Chain(
            layer_s=whole_s[:, None] * work[None, :],
            boundary_bytes=np.full(len(work) - 1, 2.0 * MESSAGE_PART / BATCH),
            sync_bytes=size,
            state_bytes=STATE_PART * size,
            saved_bytes=np.zeros(len(work)),
            memory_bytes=np.full(WORKERS, memory * (1.0 + 1e-9)),
        )
        state = State(
            speed=np.ones(WORKERS),
            available=np.ones(WORKERS, dtype=bool),
            bandwidth_bytes_per_s=np.where(np.eye(WORKERS, dtype=bool), np.inf, rate),
            latency_s=np.zeros((WORKERS, WORKERS)),
            usd_per_h=slow**-self.price,
            busy_w=np.zeros(WORKERS),
            idle_w=np.zeros(WORKERS),
            usd_per_byte=np.zeros((WORKERS, WORKERS)),
            kg_per_j=np.zeros(WORKERS),
        )
        link_of = np.where(site[:, None] == site[None, :], -1, 0)
        return Workload(chain=chain, state=state, link_of=link_of, batch=BATCH, micro_batch=MICRO)

    def path(self, steps: int, seed: int) -> Path:
        """Return who is slow and how fast the link between sites is, step by step."""
        who, is_slow = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        speed, link = np.ones((steps, WORKERS)), np.ones((steps, 1))
        straggler, faded = int(who.integers(WORKERS)), False
        for t in range(steps):
            if t and who.random() > self.stay:
                straggler = int((straggler + 1 + who.integers(WORKERS - 1)) % WORKERS)
            if t and is_slow.random() > self.link_stay:
                faded = not faded
            speed[t, straggler] = 1.0 / self.factor
            link[t] = 1.0 / self.fades if faded else 1.0
        rows, condition = np.unique(np.concatenate([speed, link], axis=1), axis=0, return_inverse=True)
        ones = np.ones((len(rows), WORKERS))
        return Path(
            condition=np.ravel(condition),
            pattern=np.zeros(steps, dtype=int),
            speed=rows[:, :WORKERS],
            price=ones,
            link=rows[:, WORKERS:],
            available=np.ones((1, WORKERS), dtype=bool),
            carbon=ones,
        )

    def budgets(self) -> tuple[Budget, ...]:
        """Return the budget in dollars per hour, if there is one."""
        limit = self.usd_per_h
        return () if limit is None else (Budget(name=BUDGET, kind="usd", per="hour", limit=limit),)

    @property
    def usd_per_h(self) -> float | None:
        """Return the budget; None without one."""
        rent = sum(one**-self.price for one in self.slow)
        return None if self.budget is None else self.budget * rent


class FixedGroups(PipelineStates):
    """Pipelines of the running cells only: order and cuts are searched, groups are not."""

    cells: tuple[tuple[int, ...], ...] = ()

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.everything, self.visits = [type(self).cells], 10**9


@contextlib.contextmanager
def groups_fixed(structure: Structure) -> Iterator[None]:
    """Search no other groups than those of a structure."""
    kinds: Any = slot_search._STATES_OF
    before = kinds[DP_OVER_MP]
    cells = tuple(sorted(tuple(sorted(group.workers)) for group in structure.groups))
    kinds[DP_OVER_MP] = type("FixedGroups", (FixedGroups,), {"cells": cells})
    try:
        yield
    finally:
        kinds[DP_OVER_MP] = before


def plan_of(structure: Structure, shares: Sequence[int], layers: int) -> Plan:
    """Return the plan that a run starts with."""
    whole = Group(share=BATCH, micro_batch=MICRO, stages=(Stage(ranks=(0,), layers=((0, layers),)),))
    empty = Plan(global_batch=BATCH, seq_len=1, groups=(whole,))
    choice = Choice(structure=structure, shares=tuple(shares), time_s=0.0, costs={})
    return orders.plan_of(empty, choice, micro_batch=MICRO)


@dataclass
class Stay:
    """A plan that stays."""

    structure: Structure
    shares: tuple[int, ...]

    def decide(self, seen: object) -> tuple[Structure, tuple[int, ...]]:
        """Return it."""
        return self.structure, self.shares

    def learn(self, happened: object) -> None:
        """Forget it."""


@dataclass
class Match:
    """A regime on one path: everything that plays there."""

    regime: Regime
    steps: int
    seed: int

    def __post_init__(self) -> None:
        """Work out what is best in hindsight."""
        work, path = self.regime.workload(), self.regime.path(self.steps, self.seed)
        self.environment = Environment(work=work, path=path, pause_s=PAUSE_S)
        states = [self.environment.state(c, 0) for c in range(len(path.speed))]
        parts = np.bincount(path.condition, minlength=len(states)).astype(float)
        asked = {"batch": BATCH, "micro_batch": MICRO}
        limit = self.regime.usd_per_h
        self.budgets = self.regime.budgets()
        known = Hindsight(work.chain, states, parts, max_stages=MAX_STAGES, **asked)
        found = known.fixed(limit)
        if found is None:
            raise SystemExit(f"{self.regime.name}: no fixed plan keeps the budget")
        self.fixed: FixedPlan = found
        self.bound_s = known.clairvoyant_s(limit)
        self.first = plan_of(found.structure, found.whole_shares(BATCH), work.chain.num_layers)

    def play(self, rule: Rule) -> Run:
        """Return how a rule fares."""
        return play(rule, self.environment, sees_now=False)

    def controller(self, **asked: Any) -> Run:
        """Return how the controller fares; options are its own."""
        work = self.environment.work
        options = {"pause_s": PAUSE_S, "max_stages": MAX_STAGES} | asked
        plan = options.pop("plan", self.first)
        policy = Controller(work.chain, work.state, plan, budgets=self.budgets, horizon=self.steps, **options)
        return self.play(PolicyAdapter(self.environment, policy, plan, self.budgets))

    def lb_bsp(self) -> Run | None:
        """Return LB-BSP on the subset that is fastest within the budget on this path; None without one."""
        best: Run | None = None
        holds = self.environment.holds
        for code in range(1, 2**WORKERS):
            subset = [worker for worker in range(WORKERS) if code >> worker & 1]
            if not holds[subset].all():
                continue
            run = self.play(SpeedShare(self.environment, on_subset(self.environment, subset)))
            if violation(run, self.budgets) <= KEPT and (
                best is None or run.time_s.mean() < best.time_s.mean()
            ):
                best = run
        return best

    def greedy(self, budgets: Sequence[Budget]) -> Run:
        """Return the fastest plan of what was last seen, within what may be rented at once."""
        work = self.environment.work
        policy = GreedyReplanning(work.chain, work.state, self.first, budgets=budgets, max_stages=MAX_STAGES)
        return self.play(PolicyAdapter(self.environment, policy, self.first, budgets))

    def everyone(self) -> Run | None:
        """Return LB-BSP on all workers, whatever it spends."""
        if not self.environment.holds.all():
            return None
        return self.play(SpeedShare(self.environment))

    def replicas(self) -> Plan | None:
        """Return replicas on the devices of the best fixed plan, None where they do not hold the model."""
        work = self.environment.work
        workers = sorted(self.fixed.structure.workers)
        if not self.environment.holds[workers].all():
            return None
        structure, shares = replicas_by_speed(work.chain, workers, work.chain.before_s[:, -1], BATCH)
        return plan_of(structure, shares, work.chain.num_layers)

    def rivals(self) -> dict[str, Run | None]:
        """Return all rivals, those that break the budget too."""
        found = {
            "lb-bsp@budget": self.lb_bsp(),
            "greedy@budget": self.greedy(self.budgets),
            "fixed": self.play(Stay(self.fixed.structure, self.fixed.whole_shares(BATCH))),
        }
        if self.budgets:
            found |= {"lb-bsp": self.everyone(), "greedy": self.greedy(())}
        return found

    def ablations(self) -> dict[str, Run | None]:
        """Return the controller with parts of what it may change switched off."""
        plan = self.replicas()
        found = {
            "shares only": self.controller(pause_s=1e9),
            "no pipelines": None if plan is None else self.controller(max_stages=1, plan=plan),
        }
        with groups_fixed(self.fixed.structure):
            found["groups fixed"] = self.controller()
        return found


Row = Mapping[str, Any]
Gain = tuple[float, float | None] | None
"""A part with half the width of its 95 % interval, None of one path; None where there is no rival."""
OURS, FIXED, LB_BSP, GREEDY = "lyapunov", "fixed", "lb-bsp@budget", "greedy@budget"
RIVALS = {
    FIXED: "the best fixed plan",
    LB_BSP: "LB-BSP on the best devices",
    GREEDY: "greedy within the budget",
}
PARTS = ("shares only", "no pipelines", "groups fixed", OURS)


def played(regime: Regime, steps: int, seed: int) -> dict[str, Any]:
    """Return one path as a row: seconds and excess by policy, the bound, the best fixed plan."""
    match = Match(regime, steps, seed)
    runs = {OURS: match.controller(), **match.rivals()}
    if regime.name != MAP:
        runs |= match.ablations()
    told = {name: None if run is None else _told(run, match.budgets) for name, run in runs.items()}
    return {
        "regime": asdict(regime),
        "steps": steps,
        "seed": seed,
        "policies": told,
        "fixed_bound_s": match.fixed.time_s,
        "fixed_plan": [(group.workers, group.cuts) for group in match.fixed.structure.groups],
        "bound_s": match.bound_s,
    }


def _told(run: Run, budgets: Sequence[Budget]) -> dict[str, float]:
    return {
        "step_s": float(run.time_s.mean()),
        "over_budget": violation(run, budgets) if budgets else 0.0,
        "changes": run.reconfigurations,
    }


MAP = "map"
SPREAD = {1.0: (1.0, 1.0, 1.0, 1.0), 2.0: (1.0, 2.0, 1.0, 2.0), 4.0: (1.0, 4.0, 1.0, 4.0)}
"""By heterogeneity: at each site a fast worker and a slow one."""
FACTORS, NETWORKS, BUDGETS = (1.0, 2.0, 4.0, 8.0), {0.02: "fast network", 0.5: "slow network"}, (None, 0.6)


def map_regimes() -> list[Regime]:
    """Return the cells of the map."""
    return [
        Regime(name=MAP, factor=factor, slow=slow, sync=sync, budget=budget)
        for budget in BUDGETS
        for sync in NETWORKS
        for slow in SPREAD.values()
        for factor in FACTORS
    ]


def special_regimes() -> list[Regime]:
    """Return the regimes in which cuts or groups may carry the gain."""
    heavy_end, big_ends = (1.0,) * 10 + (4.0,), (6.0, *(1.0,) * 9, 6.0)
    return [
        Regime(name="memory for 5 of 12 layers", factor=4.0, layers=(1.0,) * 12, memory=5 / 12),
        Regime(name="memory for 5 of 8 layers", factor=4.0, memory=5 / 8),
        Regime(name="the same, budget 0.8", factor=4.0, memory=5 / 8, slow=SPREAD[2.0], budget=0.8),
        Regime(name="heavy head, memory for 0.6", layers=heavy_end, factor=4.0, memory=0.6),
        Regime(
            name="large embeddings, slow link", gradients=big_ends, layers=(1.0,) * 11, sync=1.0, factor=4.0
        ),
        Regime(name="slow link", sync=1.0, factor=4.0),
        Regime(name="slow link that fades", sync=0.1, fades=8.0, factor=3.0),
        Regime(name="link that fades, no straggler", sync=0.1, fades=8.0),
    ]


def gain(rows: Sequence[Row], rival: str, ours: str = OURS) -> Gain:
    """Return by what part a policy is faster than a rival, and half the width of its 95 % interval.

    None where on some path the rival cannot run or is above the budget, or the policy is.
    """
    parts = []
    for row in rows:
        pair = [row["policies"].get(name) for name in (ours, rival)]
        if any(one is None or one["over_budget"] > KEPT for one in pair):
            return None
        parts.append(1.0 - pair[0]["step_s"] / pair[1]["step_s"])
    return float(np.mean(parts)), half_width(np.array(parts))


def percent(found: Gain) -> str:
    """Return a gain in words."""
    if found is None:
        return "-"
    return f"{100 * found[0]:+.1f}" + ("" if found[1] is None else f" ± {100 * found[1]:.1f}")


def seconds(rows: Sequence[Row], name: str) -> str:
    """Return the mean step of a policy; what it is above the budget stands in brackets."""
    told = [row["policies"].get(name) for row in rows]
    if any(one is None for one in told):
        return "cannot run"
    over = max(one["over_budget"] for one in told)
    mean = f"{np.mean([one['step_s'] for one in told]):.3f}"
    return f"({mean}, {over:+.0%})" if over > KEPT else mean


def map_table(rows: Sequence[Row]) -> str:
    """Return the map as a table: gains in per cent by rival."""
    lines = [
        "| budget | network | heterogeneity | factor | lyapunov, s | bound, s | "
        + " | ".join(f"over {name}" for name in RIVALS.values())
        + " | without the budget: LB-BSP, greedy |",
        "|" + "---|" * 9,
    ]
    for regime in map_regimes():
        own = [row for row in rows if row["regime"] == _plain(regime)]
        if not own:
            continue
        bound = np.mean([row["bound_s"] for row in own])
        cells = [
            "none" if regime.budget is None else f"{regime.budget:g}",
            NETWORKS[regime.sync],
            f"{max(regime.slow):g}",
            f"{regime.factor:g}",
            seconds(own, OURS),
            f"{bound:.3f}",
            *(percent(gain(own, rival)) for rival in RIVALS),
            "" if regime.budget is None else f"{seconds(own, 'lb-bsp')}, {seconds(own, 'greedy')}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parts_table(rows: Sequence[Row]) -> str:
    """Return the regimes with the parts of the controller switched off."""
    names = (FIXED, LB_BSP, GREEDY, *PARTS)
    lines = [
        "| regime | " + " | ".join((*names, "bound")) + " | gain over fixed, % | over greedy, % |",
        "|" + "---|" * (len(names) + 4),
    ]
    for regime in special_regimes():
        own = [row for row in rows if row["regime"] == _plain(regime)]
        if own:
            bound = f"{np.mean([row['bound_s'] for row in own]):.3f}"
            cells = [regime.name, *(seconds(own, name) for name in names), bound]
            cells += [percent(gain(own, rival)) for rival in (FIXED, GREEDY)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(rows: Sequence[Row]) -> str:
    """Return the map as SVG: one grid for every rival, network and budget."""
    grids = []
    for rival, words in RIVALS.items():
        for budget in BUDGETS:
            for sync, network in NETWORKS.items():
                cells = []
                for slow in SPREAD.values():
                    regimes = [
                        Regime(name=MAP, factor=factor, slow=slow, sync=sync, budget=budget)
                        for factor in FACTORS
                    ]
                    own = [[row for row in rows if row["regime"] == _plain(one)] for one in regimes]
                    cells.append([gain(some, rival) if some else None for some in own])
                kept = "no budget" if budget is None else f"budget {budget:g} of all rent"
                grids.append((f"{network}, {kept}", f"over {words}", cells))
    return heat_map(
        grids,
        columns=4,
        across=("straggler's factor", [f"{factor:g}" for factor in FACTORS]),
        down=("heterogeneity", [f"{spread:g}" for spread in SPREAD]),
    )


def _plain(regime: Regime) -> Any:
    """Return a regime as it is read from a file."""
    return json.loads(json.dumps(asdict(regime)))


def main() -> None:
    """Play what is not yet played; print the tables, draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="regimes whose name holds this")
    parser.add_argument("--rows", help="file that keeps what was played, a line a path")
    parser.add_argument("--picture", help="file of the map as SVG")
    args = parser.parse_args()
    kept = FilePath(args.rows) if args.rows else None
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    rows = [row for row in rows if row["steps"] == args.steps]
    done = {json.dumps([row["regime"], row["seed"]]) for row in rows}
    for seed in range(args.seeds):
        for regime in (*special_regimes(), *map_regimes()):
            if args.only not in regime.name or json.dumps([_plain(regime), seed]) in done:
                continue
            rows.append(json.loads(json.dumps(played(regime, args.steps, seed))))
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    rows = [row for row in rows if row["seed"] < args.seeds]
    print(parts_table(rows), map_table(rows), sep="\n\n")
    if args.picture:
        FilePath(args.picture).write_text(picture(rows))


if __name__ == "__main__":
    main()
