"""Plans of a user's own model on own machines, by measured costs.

The measured layers become stage options of the abstract problem; its solver finds groups, cuts and shares;
the exact schedule judges them, and shares, micro-batches and cuts are moved while a step gets shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.measured.moves import ScheduleTimer
from foreshard.planner.measured.places import Places, kinds_of
from foreshard.planner.measured.prices import priced, work_bound_s
from foreshard.planner.result import PlanResult, Ranked
from foreshard.planner.solver.problem import Arrangement, Problem
from foreshard.planner.solver.solve import Solution, solve
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.engine import predict_measured
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REACH = 2
"""Micro-batches up to so many times the largest that was timed: beyond, the line is a guess."""
_JUDGED = 24
_REFINED = 8
_SEARCH_PART = 0.5
_JUDGE_PART = 0.2
"""Of the budget, at least: a slow search leaves time to move what it found."""


def plan_measured(
    costs: MeasuredCosts,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int,
    precision: str = "fp32",
    optimizer: str = "adamw",
    top: int = 5,
    budget_s: float = 10.0,
    tokens: float | None = None,
) -> PlanResult:
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
    places = Places(cluster, kinds)
    degrees = sorted({tp for kind in range(len(kinds)) for tp in places.degrees(costs, kind)})
    bound_s = work_bound_s(costs, cluster, sizes, global_batch, degrees)
    searched = []
    for tp in (1, *degrees):  # the exact schedule takes stages of one tp above 1
        problem = priced(costs, cluster, kinds, sizes, global_batch, tp)
        part_s = budget_s * _SEARCH_PART / (1 + len(degrees))
        searched.append((problem, solve(problem, budget_s=part_s, target_gap=0.005)))
    solutions = [solution for _, solution in searched]
    blank = Plan(
        global_batch=global_batch,
        seq_len=seq_len,
        groups=(),
        precision=precision,
        optimizer=optimizer,
        framework="foreshard",
    )
    deadline = max(started + budget_s, time.perf_counter() + budget_s * _JUDGE_PART)
    blocks = {tp: list(_blocks(costs, places, len(kinds), tp)) for tp in (1, *degrees)}
    distinct = list(dict.fromkeys(block for same in blocks.values() for block in same))
    judge = ScheduleTimer(costs, cluster, sizes, distinct, deadline=deadline)
    plain = [
        _plain(blank, len(costs.layers), same, max(sizes))
        for same in blocks.values()
        if global_batch >= cluster.num_devices
    ]
    fits = any(solution.arrangement is not None for solution in solutions)
    ranked = _ranked(judge, _found(blank, searched, places), plain) if fits else []
    if not ranked:
        return _nothing(costs, bound_s, started)
    shown = []
    for seconds, plan in ranked[:top]:
        prediction = predict_measured(costs, cluster, plan, tokens=tokens)
        shown.append(Ranked(plan=plan, prediction=prediction, why=_why(seconds, ranked[0][0])))
    return PlanResult(
        plans=tuple(shown),
        lower_bound_step_time_s=bound_s,
        gap=ranked[0][0] / bound_s - 1,
        binding=shown[0].prediction.bottleneck,
        evaluated=sum(solution.evaluated for solution in solutions) + judge.evaluated,
        pruned=sum(solution.excluded for solution in solutions),
        wall_s=time.perf_counter() - started,
        space=f"pipelines of {_stage_words(degrees)} a stage, any cuts and shares, "
        f"micro-batches up to {max(sizes)}, 1f1b",
        ladder={"work": bound_s},
        interrupted=any(solution.interrupted for solution in solutions),
        notes=("The bound is all work at the least measured seconds a sample, all devices without a pause",),
    )


def _nothing(costs: MeasuredCosts, bound_s: float, started: float) -> PlanResult:
    need = sum(layer.parameter_bytes * 2 + layer.frozen_bytes + layer.state_bytes for layer in costs.layers)
    error = InfeasibleError(
        "no pipeline fits the memory",
        key="memory",
        value=need,
        rule="Parameters, gradients, states and activations fit",
        fix=f"Add devices or memory: the model's states alone take {need / 2**30:.2f} GiB",
    )
    return PlanResult(
        plans=(),
        lower_bound_step_time_s=bound_s,
        gap=0.0,
        binding="memory",
        evaluated=0,
        pruned=0,
        wall_s=time.perf_counter() - started,
        infeasible=error,
    )


def _found(blank: Plan, searched: Sequence[tuple[Problem, Solution]], places: Places) -> Iterator[Plan]:
    """Return the plans of what was searched for."""
    for problem, solution in searched:
        for one in dict.fromkeys((solution.arrangement, *solution.others[:_JUDGED])):
            plan = None if one is None else _plan(blank, problem, one, places)
            if plan is not None:
                yield plan


def _ranked(judge: ScheduleTimer, found: Iterable[Plan], plain: Sequence[Plan]) -> list[tuple[float, Plan]]:
    """Return the best plans refined, the others and the plain ones as they are, by seconds."""
    plans = sorted((*found, *plain), key=judge.seconds)
    plans = [judge.refined(plan) for plan in plans[:_REFINED]] + [*plans[_REFINED:], *plain]
    distinct = {plan.groups: plan for plan in sorted(plans, key=judge.seconds)}.values()
    return [(judge.seconds(plan), plan) for plan in distinct if math.isfinite(judge.seconds(plan))]


def _stage_words(degrees: Sequence[int]) -> str:
    return f"one device or tp {', '.join(map(str, degrees))}" if degrees else "one device"


def _plan(blank: Plan, problem: Problem, arrangement: Arrangement, places: Places) -> Plan | None:
    """Return the plan of an arrangement; None where nodes do not hold its stages."""
    parts = [part for template in arrangement.templates for part in template]
    takes = [problem.takes[part.option] for part in parts]
    ranks = places.given([(int(np.argmax(row)), int(row.max())) for row in takes])
    if ranks is None:
        return None
    free = iter(ranks)
    groups = []
    for template, share in zip(arrangement.templates, arrangement.shares, strict=True):
        size = int(problem.micro_batch[template[0].option])
        stages = tuple(_stage(next(free), (part.start, part.stop)) for part in template)
        groups.append(Group(share=share, stages=stages, micro_batch=min(size, share), schedule="1f1b"))
    return replace(blank, groups=tuple(groups))


def _stage(ranks: tuple[int, ...], layers: tuple[int, int]) -> Stage:
    return Stage(ranks=ranks, tp=len(ranks), layers=(layers,), zero=0)


def _plain(blank: Plan, num_layers: int, blocks: Sequence[tuple[int, ...]], size: int) -> Plan:
    """Return what one would try first: equal shares on all devices, to be shown how much they lose."""
    num_devices = sum(map(len, blocks))
    ends = [sum(map(len, blocks[: place + 1])) for place in range(len(blocks))]
    each, more = divmod(blank.global_batch, num_devices)
    upto = [0, *(end * each + min(end, more) for end in ends)]
    shares = [stop - start for start, stop in pairwise(upto)]
    return replace(
        blank,
        groups=tuple(
            Group(
                share=share,
                micro_batch=min(size, share),
                schedule="1f1b",
                stages=(_stage(ranks, (0, num_layers)),),
            )
            for ranks, share in zip(blocks, shares, strict=True)
        ),
    )


def _blocks(costs: MeasuredCosts, places: Places, num_kinds: int, tp: int) -> Iterator[tuple[int, ...]]:
    """Return all devices: in blocks of a tp where they can have it, the others alone."""
    for kind in range(num_kinds):
        together = list(places.blocks(kind, tp)) if tp == 1 or tp in places.degrees(costs, kind) else []
        taken = {rank for block in together for rank in block}
        yield from together
        yield from (block for block in places.blocks(kind, 1) if block[0] not in taken)


def _why(seconds: float, best_s: float) -> str:
    slower = 100 * (seconds / best_s - 1)
    return "the fastest found" if seconds == best_s else f"{slower:.1f} % slower than the first"
