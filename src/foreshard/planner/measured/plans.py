"""Plans of a user's own model on their own machines, by measured costs.

The measured layers become stage options of the abstract problem, and its solver finds pipelines, cuts and
shares, as for mixed clusters by formulas. The schedule is then executed for what it found, and shares,
micro-batches and cuts are moved while a step gets shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.measured.balancing import balanced
from foreshard.planner.measured.places import Places
from foreshard.planner.measured.prices import StageOption, one_pass_s, priced, work_bound_s
from foreshard.planner.pricing.judged import JudgedPlans
from foreshard.planner.result import PlanResult, Ranked
from foreshard.planner.solver.problem import Arrangement, Problem, StageSpan, step_seconds
from foreshard.planner.solver.solve import Solution, solve
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.memory import least_bytes
from foreshard.predict.step_source import MeasuredSteps
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import check_amount, whole
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import Prediction

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REACH = 2
"""Micro-batches up to this many times the largest that was timed: beyond, the fitted line is a guess."""
_JUDGED = 24
"""Arrangements of each search, and pipelines alone, whose schedule is executed: some milliseconds each."""
_BALANCED = 24
"""Of them, fastest first, those that are balanced: some hundred executions each."""
_SEARCH_FRAC = 0.5
_BALANCE_FRAC = 0.2
"""Of the budget: what searches get together, and what balancing gets at least after a slow search."""
_RULES = (("none",), ("none", "full"))
"""What stages recompute: layers run again only where nothing fits without."""
_TARGET_GAP = 0.005
"""At which a search ends: measured seconds differ by more from step to step."""


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
    predicted: Callable[[Plan], Prediction] | None = None,
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
        Plans to return; the last are equal shares, for how much they lose.
    budget_s : float
    tokens : float, optional
        Of the whole run.
    predicted : callable, optional
        What a plan is predicted to take where `costs` are lines through what it would say at every
        micro-batch. The plans that are returned are ordered by it.

    Raises
    ------
    SpecError
        For devices that were not measured, and amounts out of range.
    """
    started = time.perf_counter()
    check_amount("--tokens", tokens)
    check_amount("--budget-s", budget_s, optional=False)
    whole(top, key="--top", name="top")
    sizes = [m for m in _SIZES if m <= min(global_batch, costs.largest * _REACH)]
    places = Places(cluster)
    degrees = sorted({tp for kind in range(len(places.kinds)) for tp in places.degrees(costs, kind)})
    work_s = work_bound_s(costs, cluster, sizes, global_batch, degrees)
    pass_s = one_pass_s(costs, cluster, max(sizes), degrees)
    bound_s = max(work_s, pass_s)
    for rules in _RULES:
        searched = list(_searched(costs, places, sizes, global_batch, degrees, rules, budget_s))
        if any(solution.arrangement is not None for _, solution in searched):
            break
    solutions = [solution for _, solution in searched]
    if all(solution.arrangement is None for solution in solutions):
        return _infeasible(costs, bound_s, started)
    blank = Plan(
        global_batch=global_batch,
        seq_len=seq_len,
        groups=(),
        precision=precision,
        optimizer=optimizer,
        framework="ddp" if costs.by_formula else "foreshard",
    )
    equal = [
        _equal_shares(blank, len(costs.layers), list(_blocks(costs, places, tp)), max(sizes))
        for tp in (1, *degrees)
        if global_batch >= cluster.num_devices
    ]
    source = MeasuredSteps(costs=costs, cluster=cluster)
    judged = JudgedPlans(source)
    deadline = max(started + budget_s, time.perf_counter() + budget_s * _BALANCE_FRAC)
    found, alone = (
        [
            plan
            for problem, solution in searched
            for arrangement in arrangements(problem, solution)
            if (plan := _plan(blank, problem, arrangement, places)) is not None
        ]
        for arrangements in (_found, _alone)
    )
    starts = judged.ranked([*found, *alone, *equal])[:_BALANCED]
    better = [balanced(plan, judged, sizes, deadline) for plan in starts]
    ranked = judged.ranked([*better, *found, *equal])
    if not ranked:
        return _infeasible(costs, bound_s, started)
    predicted = predicted or partial(source.predict, tokens=tokens)
    shown = _timed([(plan, predicted(plan)) for plan in _shown(ranked, equal, top)])
    return PlanResult(
        plans=shown,
        lower_bound_step_time_s=bound_s,
        evaluated=sum(solution.evaluated for solution in solutions) + len(judged),
        pruned=sum(solution.excluded for solution in solutions),
        wall_s=time.perf_counter() - started,
        space=f"pipelines of {_stage_words(degrees)} a stage, any cuts and shares, "
        f"micro-batches up to {max(sizes)}, 1f1b{', layers recomputed or not' if len(rules) > 1 else ''}",
        ladder={"work": work_s, "one pass": bound_s},
        interrupted=any(solution.interrupted for solution in solutions),
        notes=(
            "The bound is all work at the least seconds a sample, all devices without a pause, or one"
            " micro-batch through all layers and back, whichever is longer",
            *(["Nothing fits without recomputing layers"] if len(rules) > 1 else []),
        ),
    )


def _searched(
    costs: MeasuredCosts,
    places: Places,
    sizes: Sequence[int],
    global_batch: int,
    degrees: Sequence[int],
    rules: Sequence[str],
    budget_s: float,
) -> Iterator[tuple[Problem, Solution]]:
    """Yield a search for each tp: measured costs price stages of one tp above 1."""
    part_s = budget_s * _SEARCH_FRAC / (1 + len(degrees))
    for tp in (1, *degrees):
        problem = priced(costs, places, sizes, global_batch, tp, rules)
        yield problem, solve(problem, budget_s=part_s, target_gap=_TARGET_GAP, filling="full")


def _infeasible(costs: MeasuredCosts, bound_s: float, started: float) -> PlanResult:
    need = least_bytes(costs)
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
        evaluated=0,
        pruned=0,
        wall_s=time.perf_counter() - started,
        infeasible=error,
    )


def _found(problem: Problem, solution: Solution) -> list[Arrangement]:
    """Return the best arrangements of a search."""
    return list(solution.others[:_JUDGED])


def _alone(problem: Problem, solution: Solution) -> list[Arrangement]:
    """Return the best pipelines of a search, each by itself: where to start besides.

    The problem takes a short last micro-batch as a fraction of the others and leaves messages out, so what is
    best by it need not be best when executed; one pipeline alone is the farthest from what it prefers.
    """
    share = (problem.global_batch,)
    alone = [Arrangement(templates=(column,), shares=share) for column in solution.columns]
    return sorted(alone, key=partial(step_seconds, problem))[:_JUDGED]


def _shown(ranked: Sequence[Plan], equal: Sequence[Plan], top: int) -> list[Plan]:
    """Return the first plans; the last gives its place to equal shares if there are none among them."""
    best = list(ranked[:top])
    first_equal = next((plan for plan in ranked if plan in equal), None)
    if first_equal is not None and top > 1 and not any(plan in equal for plan in best):
        best[-1] = first_equal
    return best


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
        stages = tuple(
            _stage(next(free), (part.start, part.stop), _recompute(problem, part)) for part in template
        )
        groups.append(Group(share=share, stages=stages, micro_batch=min(size, share), schedule="1f1b"))
    return replace(blank, groups=tuple(groups))


def _recompute(problem: Problem, part: StageSpan) -> str:
    option = problem.names[part.option]
    assert isinstance(option, StageOption)
    return option.recompute


def _stage(ranks: tuple[int, ...], layers: tuple[int, int], recompute: str = "none") -> Stage:
    return Stage(ranks=ranks, tp=len(ranks), layers=(layers,), zero=0, recompute=recompute)


def _equal_shares(blank: Plan, num_layers: int, blocks: Sequence[tuple[int, ...]], size: int) -> Plan:
    """Return equal shares on all devices: what is tried first by hand, shown for how much it loses."""
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


def _blocks(costs: MeasuredCosts, places: Places, tp: int) -> Iterator[tuple[int, ...]]:
    """Return all devices: in blocks of a tp where they can have it, the others alone."""
    for kind in range(len(places.kinds)):
        together = list(places.blocks(kind, tp)) if tp == 1 or tp in places.degrees(costs, kind) else []
        taken = {rank for block in together for rank in block}
        yield from together
        yield from (block for block in places.blocks(kind, 1) if block[0] not in taken)


def _timed(plans: Sequence[tuple[Plan, Prediction]]) -> tuple[Ranked, ...]:
    """Return plans with their predictions, fastest first."""
    ordered = sorted(plans, key=lambda found: found[1].step_time_s)
    best_s = ordered[0][1].step_time_s
    return tuple(
        Ranked(plan=plan, prediction=prediction, why=_why(prediction.step_time_s, best_s))
        for plan, prediction in ordered
    )


def _why(seconds: float, best_s: float) -> str:
    slower = 100 * (seconds / best_s - 1)
    return "the fastest found" if seconds == best_s else f"{slower:.1f} % slower than the first"
