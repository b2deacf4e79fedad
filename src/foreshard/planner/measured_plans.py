"""Plans of a user's own model on own machines, by measured costs.

The measured layers become stage options of the abstract problem; its solver finds groups, cuts and shares;
the exact schedule judges them, and shares, micro-batches and cuts are moved while a step gets shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.measured_prices import kinds_of, priced, work_bound_s
from foreshard.planner.problem import Arrangement, Problem
from foreshard.planner.result import PlanResult, Ranked
from foreshard.planner.solve import solve
from foreshard.predict.measured import predict_measured, step_seconds
from foreshard.predict.measured_costs import MeasuredCosts
from foreshard.predict.measured_memory import measured_memory
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REACH = 2
"""Micro-batches up to so many times the largest that was timed: beyond, the line is a guess."""
_JUDGED = 24
_REFINED = 3
_SEARCH_PART = 0.5
_JUDGE_PART = 0.2
"""Of the budget, at least: a slow search leaves time to move what it found."""
_WORTH_BALANCING = 1.5
"""A plan with a device moved is balanced first if it takes no more than so many times as long."""


def plan_measured(
    costs: MeasuredCosts, cluster: Cluster, *, global_batch: int, seq_len: int, precision: str = "fp32",
    optimizer: str = "adamw", top: int = 5, budget_s: float = 10.0, tokens: float | None = None,
) -> PlanResult:  # fmt: skip
    """Return the best plans found and a bound that no plan beats.

    Parameters
    ----------
    costs : MeasuredCosts
    cluster : Cluster
    global_batch, seq_len : int
    precision, optimizer : str
        As the plan shall say; the costs are of what was measured.
    top : int
    budget_s : float
    tokens : float, optional
        Of the whole run.

    Raises
    ------
    SpecError
        For devices that were not measured.
    """
    started = time.perf_counter()
    kinds = kinds_of(cluster)
    sizes = [m for m in _SIZES if m <= min(global_batch, costs.largest * _REACH)]
    bound_s = work_bound_s(costs, cluster, sizes, global_batch)
    problem = priced(costs, cluster, kinds, sizes, global_batch)
    solution = solve(problem, budget_s=budget_s * _SEARCH_PART, target_gap=0.005)
    if solution.arrangement is None:
        return _nothing(costs, bound_s, started)
    blank = Plan(
        global_batch=global_batch, seq_len=seq_len, groups=(), precision=precision, optimizer=optimizer,
        framework="foreshard",
    )  # fmt: skip
    deadline = max(started + budget_s, time.perf_counter() + budget_s * _JUDGE_PART)
    judge = _Judge(costs, cluster, sizes, deadline=deadline)
    arrangements = dict.fromkeys((solution.arrangement, *solution.others[:_JUDGED]))
    plans = [_plan(blank, problem, one, kinds) for one in arrangements]
    plans = sorted((*plans, *_plain(blank, costs, cluster.num_devices, max(sizes))), key=judge.seconds)
    plans = [judge.refined(plan) for plan in plans[:_REFINED]] + plans[_REFINED:]
    distinct = {plan.groups: plan for plan in sorted(plans, key=judge.seconds)}.values()
    ranked = [(judge.seconds(plan), plan) for plan in distinct if math.isfinite(judge.seconds(plan))]
    if not ranked:
        return _nothing(costs, bound_s, started)
    shown = []
    for seconds, plan in ranked[:top]:
        prediction = predict_measured(costs, cluster, plan, tokens=tokens)
        shown.append(Ranked(plan=plan, prediction=prediction, why=_why(seconds, ranked[0][0])))
    return PlanResult(
        plans=tuple(shown), lower_bound_step_time_s=bound_s, gap=ranked[0][0] / bound_s - 1,
        binding=shown[0].prediction.bottleneck, evaluated=solution.evaluated + judge.evaluated,
        pruned=solution.excluded, wall_s=time.perf_counter() - started,
        space=f"pipelines of one device a stage, any cuts and shares, micro-batches up to {max(sizes)}, 1f1b",
        ladder={"work": bound_s}, interrupted=solution.interrupted,
        notes=("bound: all work at the least measured seconds a sample, on all devices without a pause",),
    )  # fmt: skip


def _nothing(costs: MeasuredCosts, bound_s: float, started: float) -> PlanResult:
    need = sum(layer.parameter_bytes * 2 + layer.frozen_bytes + layer.state_bytes for layer in costs.layers)
    error = InfeasibleError(
        "no pipeline fits the memory", key="memory", value=need,
        rule="parameters, gradients, states and activations fit",
        fix=f"Add devices or memory: the model's states alone take {need / 2**30:.2f} GiB",
    )  # fmt: skip
    return PlanResult(
        plans=(), lower_bound_step_time_s=bound_s, gap=0.0, binding="memory", evaluated=0, pruned=0,
        wall_s=time.perf_counter() - started, infeasible=error,
    )  # fmt: skip


def _plan(blank: Plan, problem: Problem, arrangement: Arrangement, kinds: Sequence[Sequence[int]]) -> Plan:
    free: list[Iterator[int]] = [iter(ranks) for ranks in kinds]
    groups = []
    for template, share in zip(arrangement.templates, arrangement.shares, strict=True):
        size = int(problem.micro_batch[template[0].option])
        stages = tuple(
            Stage(ranks=(next(free[int(np.argmax(problem.takes[part.option]))]),), zero=0,
                  layers=((part.start, part.stop),))
            for part in template
        )  # fmt: skip
        groups.append(Group(share=share, stages=stages, micro_batch=min(size, share), schedule="1f1b"))
    return replace(blank, groups=tuple(groups))


def _plain(blank: Plan, costs: MeasuredCosts, num_devices: int, size: int) -> Iterator[Plan]:
    """Return what one would try first: equal shares on all devices, to be shown how much they lose."""
    if blank.global_batch < num_devices:
        return
    each, more = divmod(blank.global_batch, num_devices)
    shares = [each + (rank < more) for rank in range(num_devices)]
    yield replace(blank, groups=tuple(
        Group(share=share, micro_batch=min(size, share), schedule="1f1b",
              stages=(Stage(ranks=(rank,), layers=((0, len(costs.layers)),), zero=0),))
        for rank, share in enumerate(shares)
    ))  # fmt: skip


class _Judge:
    """Times plans by the exact schedule, and moves one thing at a time while a step gets shorter."""

    def __init__(self, costs: MeasuredCosts, cluster: Cluster, sizes: Sequence[int], deadline: float):
        self._costs, self._cluster, self._sizes, self._deadline = costs, cluster, sizes, deadline
        self._seen: dict[tuple[Group, ...], float] = {}

    @property
    def evaluated(self) -> int:
        """Plans timed."""
        return len(self._seen)

    def seconds(self, plan: Plan) -> float:
        """Return the step's time, inf where it does not fit."""
        if plan.groups not in self._seen:
            fits = measured_memory(self._costs, self._cluster, plan).fits
            self._seen[plan.groups] = step_seconds(self._costs, self._cluster, plan) if fits else math.inf
        return self._seen[plan.groups]

    def refined(self, plan: Plan) -> Plan:
        """Return a plan that no move of samples, micro-batch, layer or device makes faster."""
        plan = self._balanced(plan)
        improved = True
        while improved and time.perf_counter() < self._deadline:
            improved = False
            for made in (*_without_group(plan), *_joined(plan)):
                if self.seconds(made) < self.seconds(plan) * _WORTH_BALANCING:
                    better = self._balanced(made)
                    if self.seconds(better) < self.seconds(plan) * (1 - 1e-9):
                        plan, improved = better, True
                        break
        return plan

    def _balanced(self, plan: Plan) -> Plan:
        grain = max(1, plan.global_batch // 32)
        while grain and time.perf_counter() < self._deadline:
            better = self._first_better(plan, grain)
            plan, grain = (better, grain) if better is not None else (plan, grain // 2)
        return plan

    def _first_better(self, plan: Plan, grain: int) -> Plan | None:
        for moved in (*_shares(plan, grain), *_batches(plan, self._sizes), *_cuts(plan)):
            if time.perf_counter() > self._deadline:
                return None
            if self.seconds(moved) < self.seconds(plan) * (1 - 1e-9):
                return moved
        return None


def _without_group(plan: Plan) -> Iterator[Plan]:
    """Return the plans in which one group is idle and another does its samples."""
    for gone, group in enumerate(plan.groups):
        for heir in range(len(plan.groups)):
            if heir != gone:
                groups = list(plan.groups)
                groups[heir] = _with_share(groups[heir], groups[heir].share + group.share)
                del groups[gone]
                yield replace(plan, groups=tuple(groups))


def _joined(plan: Plan) -> Iterator[Plan]:
    """Return the plans in which the device of a group of one stage becomes a stage of another group."""
    for gone, group in enumerate(plan.groups):
        if len(group.stages) > 1:
            continue
        for heir, other in enumerate(plan.groups):
            if heir == gone:
                continue
            for stages in _lengthened(other, group.stages[0].ranks):
                groups = list(plan.groups)
                groups[heir] = _with_share(replace(other, stages=stages), other.share + group.share)
                del groups[gone]
                yield replace(plan, groups=tuple(groups))


def _lengthened(group: Group, ranks: tuple[int, ...]) -> Iterator[tuple[Stage, ...]]:
    """Return the stages of a group with one more at either end, which takes 1, 2, 4, ... layers."""
    first, last = group.stages[0], group.stages[-1]
    (start, stop), (begin, end) = first.layers[0], last.layers[0]
    count = 1
    while count < max(stop - start, end - begin):
        if count < stop - start:
            new = replace(first, ranks=ranks, layers=((start, start + count),))
            yield (new, replace(first, layers=((start + count, stop),)), *group.stages[1:])
        if count < end - begin:
            new = replace(last, ranks=ranks, layers=((end - count, end),))
            yield (*group.stages[:-1], replace(last, layers=((begin, end - count),)), new)
        count *= 2


def _shares(plan: Plan, count: int) -> Iterator[Plan]:
    for source, one in enumerate(plan.groups):
        if one.share <= count:
            continue
        for target, other in enumerate(plan.groups):
            if target != source:
                groups = list(plan.groups)
                groups[source] = _with_share(one, one.share - count)
                groups[target] = _with_share(other, other.share + count)
                yield replace(plan, groups=tuple(groups))


def _batches(plan: Plan, sizes: Sequence[int]) -> Iterator[Plan]:
    for g, group in enumerate(plan.groups):
        for size in sizes:
            if size <= group.share and size != group.micro_batch:
                yield _with_group(plan, g, replace(group, micro_batch=size))


def _cuts(plan: Plan) -> Iterator[Plan]:
    for g, group in enumerate(plan.groups):
        for s in range(len(group.stages) - 1):
            (lo, cut), (_, hi) = group.stages[s].layers[0], group.stages[s + 1].layers[0]
            for new in (cut - 1, cut + 1):
                if lo < new < hi:
                    stages = list(group.stages)
                    stages[s] = replace(stages[s], layers=((lo, new),))
                    stages[s + 1] = replace(stages[s + 1], layers=((new, hi),))
                    yield _with_group(plan, g, replace(group, stages=tuple(stages)))


def _with_group(plan: Plan, place: int, group: Group) -> Plan:
    return replace(plan, groups=(*plan.groups[:place], group, *plan.groups[place + 1 :]))


def _with_share(group: Group, share: int) -> Group:
    return replace(group, share=share, micro_batch=min(group.micro_batch, share))


def _why(seconds: float, best_s: float) -> str:
    slower = 100 * (seconds / best_s - 1)
    return "the fastest found" if seconds == best_s else f"{slower:.1f} % slower than the first"
