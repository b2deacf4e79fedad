"""From a running plan to the next, after devices slowed down or vanished.

Prices of the healthy cluster are reused; devices fall into pools of equal pace, and the running pipelines are
where the search starts. What a change has to move counts against it over the time it is expected to last.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreshard.errors import InfeasibleError, SpecError
from foreshard.planner.migration import Migration, migration
from foreshard.planner.nearby import nearby, repaired, work_bound
from foreshard.planner.placing import Ranks, place
from foreshard.planner.pools import Demand, Pool, demand_of, pooled_problem, pools_of
from foreshard.planner.problem import Arrangement, Part, Problem, Template, step_seconds
from foreshard.planner.running import check_running, healthy_problem, kind_of
from foreshard.planner.solve import solve
from foreshard.planner.stage_options import StageKind
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Plan, Stage

_JUDGED = 12
_SOLVE_S = 0.3
"""Seconds below which the search of all arrangements is not begun: its first answer takes about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The next plan and what it is worth.

    Attributes
    ----------
    plan : Plan
    change : str
        'none', 'shares' (nothing moves), 'layers' or 'devices'.
    step_time_s : float
        Of the plan on the devices as they are now, by the prices of the problem.
    running_step_s : float
        Of the running plan left as it is; inf where it lost a device.
    lower_bound_s : float
        No plan of the options looked at takes less.
    migration : Migration
    problem : Problem
        Prices of the healthy cluster, for the next call.
    wall_s : float
    """

    plan: Plan
    change: str
    step_time_s: float
    running_step_s: float
    lower_bound_s: float
    migration: Migration
    problem: Problem
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What runs where, and what is gone."""

    model: Model
    cluster: Cluster
    plan: Plan
    lost: frozenset[int]


def replan(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    *,
    slowdown: Mapping[int, float] | None = None,
    lost: Collection[int] = (),
    problem: Problem | None = None,
    dwell_s: float = 3600.0,
    budget_s: float = 0.1,
    narrow: bool = True,
) -> Replan:
    """Return the next plan after devices slowed down or vanished.

    Parameters
    ----------
    model, cluster
    plan : Plan
        Running: 1f1b, one interval of layers per stage. Stages may cut experts, split sequences, and be on
        ranks of two node groups that take samples by group.
    slowdown : mapping of rank to factor, optional
        How many times as long devices take; those not named are healthy.
    lost : collection of int
    problem : Problem, optional
        :func:`~foreshard.planner.running.healthy_problem` of an earlier call; without it the cluster is
        priced first.
    dwell_s : float
        Seconds until the next change is expected: what is moved is paid back over them.
    budget_s : float
        Seconds, pricing included. Neighbours of the running pipelines take a fraction of 0.1 s; with what is
        left beyond that, all arrangements are searched.
    narrow : bool
        Look only at micro-batches, recompute rules and tensor degrees near those that run now.

    Returns
    -------
    Replan

    Raises
    ------
    SpecError
        For a plan, rank or factor it cannot handle.
    InfeasibleError
        When no pipeline fits the devices that are left.
    """
    started = time.perf_counter()
    slowdown = dict(slowdown or {})
    _check(cluster, plan, slowdown, lost)
    base = problem or healthy_problem(model, cluster, plan)
    use = [g for g, count in enumerate(base.counts) if count]
    pools = pools_of(cluster, use, slowdown, frozenset(lost))
    running = [
        [
            (_option(base, kind_of(cluster, plan, group, stage)), demand_of(stage.ranks, pools))
            for stage in group.stages
        ]
        for group in plan.groups
    ]
    extra = [(o, demand) for group in running for o, demand in group if demand is not None]
    pooled = pooled_problem(base, pools, _offered(base, running, narrow), extra)
    now = _templates(plan, base, pooled, running)
    columns = [one for one in now if isinstance(one, tuple)]
    found = [arrangement for mended in repaired(pooled, now) for arrangement in nearby(pooled, mended, pools)]
    bound = work_bound(pooled)
    left = budget_s - (time.perf_counter() - started)
    if left >= _SOLVE_S or not found:
        first = min(found, key=lambda one: step_seconds(pooled, one), default=None)
        solution = solve(pooled, budget_s=max(left, _SOLVE_S), target_gap=0.02, start=first, columns=columns)
        found += solution.others[:_JUDGED]
        bound = max(bound, solution.lower_bound_s)
    running_s = np.inf
    if len(columns) == len(now):
        as_is = Arrangement(templates=tuple(columns), shares=tuple(group.share for group in plan.groups))
        running_s = step_seconds(pooled, as_is)
        found.append(as_is)
    asked = _Asked(model=model, cluster=cluster, plan=plan, lost=frozenset(lost))
    chosen = _choose(asked, pooled, pools, found, dwell_s)
    if chosen is None:
        raise InfeasibleError(
            f"no pipeline fits the {sum(pool.count for pool in pools)} devices that are left",
            key="lost", value=len(lost), rule="A plan needs memory for every layer of the model",
            fix="Replace some of the lost devices, or plan anew with full recomputation or a smaller batch",
        )  # fmt: skip
    made, step_s, moved = chosen
    return Replan(
        plan=made, change=_change(plan, made), step_time_s=step_s, running_step_s=running_s,
        lower_bound_s=min(bound, step_s), migration=moved, problem=base,
        wall_s=time.perf_counter() - started,
    )  # fmt: skip


def _check(cluster: Cluster, plan: Plan, slowdown: Mapping[int, float], lost: Collection[int]) -> None:
    for rank in (*slowdown, *lost):
        if not 0 <= rank < cluster.num_devices:
            raise SpecError(
                f"rank {rank} of a cluster of {cluster.num_devices}", key="slowdown/lost", value=rank,
                rule=f"Ranks go from 0 to {cluster.num_devices - 1}",
            )  # fmt: skip
    for rank, factor in slowdown.items():
        if not 0.0 < factor < 1e6:
            raise SpecError(
                f"rank {rank} slowed by {factor}", key="slowdown", value=factor,
                rule="A slowdown is a factor above 0", fix="Name a device that stands still in `lost`",
            )  # fmt: skip
    check_running(plan)


def _option(problem: Problem, kind: StageKind) -> int:
    """Return the option of the healthy problem that a running stage is."""
    if kind not in problem.names:
        raise SpecError(
            f"the problem has no option {kind}", key="problem", rule="It is the problem of the running plan",
            fix="Leave `problem` out",
        )  # fmt: skip
    return problem.names.index(kind)


def _offered(
    problem: Problem, running: Sequence[Sequence[tuple[int, Demand | None]]], narrow: bool
) -> list[int]:
    """Return the options to look at: all, or those that micro-batches and rules of the running plan allow.

    All, too, where stages join node groups: others hardly have their micro-batches, and devices are few.
    """
    used: list[StageKind] = [problem.names[o] for group in running for o, _ in group]  # type: ignore[misc]
    if not narrow or any(kind.beside for kind in used):
        return np.flatnonzero(problem.max_in_flight.any(1)).tolist()
    sizes = {kind.samples for kind in used}
    rules = {kind.recompute for kind in used}
    widest = {kind.tp for kind in used}
    widest |= {tp // 2 for tp in widest} | {tp // 4 for tp in widest}
    return [
        o for o, kind in enumerate(problem.names)
        if kind.samples in sizes and kind.recompute in rules and kind.tp in widest  # type: ignore[attr-defined]
    ]  # fmt: skip


def _templates(
    plan: Plan, base: Problem, pooled: Problem, running: Sequence[Sequence[tuple[int, Demand | None]]]
) -> list[Template | list[int | None]]:
    """Return the running pipelines as templates; of broken ones the options of stages, None for lost ones."""
    where = {(name.base, name.demand): o for o, name in enumerate(pooled.names)}  # type: ignore[attr-defined]
    found: list[Template | list[int | None]] = []
    for group, stages in zip(plan.groups, running, strict=True):
        options = [None if demand is None else where[base.names[o], demand] for o, demand in stages]
        if None in options:
            found.append(options)
            continue
        found.append(
            tuple(
                Part(option=option, start=stage.layers[0][0], stop=stage.layers[0][1])
                for stage, option in zip(group.stages, options, strict=True)
                if option is not None
            )
        )
    return found


def _choose(
    asked: _Asked, pooled: Problem, pools: Sequence[Pool], found: Sequence[Arrangement], dwell_s: float
) -> tuple[Plan, float, Migration] | None:
    """Return the arrangement whose step, with what it moves spread over the dwell, is least."""
    best: tuple[Plan, float, Migration] | None = None
    best_s = np.inf
    for arrangement in sorted(dict.fromkeys(found), key=lambda one: step_seconds(pooled, one)):
        step_s = step_seconds(pooled, arrangement)
        if step_s >= best_s:
            break
        ranks = place(asked.plan, pooled, pools, arrangement)
        if ranks is None:
            continue
        made = _plan(asked.plan, pooled, arrangement, ranks)
        moved = migration(asked.model, asked.cluster, asked.plan, made, lost=asked.lost)
        worth = step_s / (1.0 - min(0.999, moved.seconds / dwell_s))
        if worth < best_s:
            best, best_s = (made, step_s, moved), worth
    return best


def _plan(running: Plan, problem: Problem, arrangement: Arrangement, ranks: Ranks) -> Plan:
    groups = []
    for g, (template, share) in enumerate(zip(arrangement.templates, arrangement.shares, strict=True)):
        stages = []
        for s, part in enumerate(template):
            kind: StageKind = problem.names[part.option].base  # type: ignore[attr-defined]
            stages.append(
                Stage(
                    ranks=ranks[g, s], layers=((part.start, part.stop),), tp=kind.tp, cp=kind.cp, ep=kind.ep,
                    rank_shares=kind.rank_shares, zero=kind.zero, recompute=kind.recompute,
                )
            )  # fmt: skip
        size = int(problem.micro_batch[template[0].option])
        groups.append(Group(share=share, stages=tuple(stages), micro_batch=size, sp=running.groups[0].sp))
    return replace(running, groups=tuple(groups))


def _change(old: Plan, new: Plan) -> str:
    """Return the largest thing that differs."""

    def shape(plan: Plan, *, layers: bool) -> set[object]:
        return {
            tuple((s.ranks, s.tp, s.cp, s.ep, s.layers if layers else None) for s in g.stages)
            for g in plan.groups
        }

    if shape(old, layers=False) != shape(new, layers=False):
        return "devices"
    if shape(old, layers=True) != shape(new, layers=True):
        return "layers"
    same = _samples(old) == _samples(new)
    return "none" if same else "shares"


def _samples(plan: Plan) -> dict[tuple[int, ...], list[object]]:
    """Return share and micro-batch of each pipeline, and what ranks take of it where that differs."""
    return {
        g.stages[0].ranks: [
            g.share,
            g.micro_batch,
            *(s.rank_shares for s in g.stages if len(set(s.rank_shares or ())) > 1),
        ]
        for g in plan.groups
    }
