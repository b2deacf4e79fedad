"""One search for every setting that matters, and their results as one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from foreshard.planner.grid.ray_sweep import each_in_tasks, num_at_once
from foreshard.planner.ranking import front_of, score
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import ObjectiveBound, PlanResult, Ranked
from foreshard.planner.settings import Setting
from foreshard.spec.plan import Plan, acting
from foreshard.spec.prediction import Prediction

_ANY = 1e30
"""Seconds that any plan is faster than."""


@dataclass(slots=True, kw_only=True)
class _Searched:
    """Results by setting, and the settings that time left no plan for."""

    results: list[tuple[Setting, PlanResult]] = field(default_factory=list)
    missing: list[Setting] = field(default_factory=list)

    @property
    def open(self) -> list[Setting]:
        """Return the settings that may hold plans nobody has seen."""
        unknown = [setting for setting, result in self.results if _unknown(result)]
        return [*unknown, *self.missing]


def _unknown(result: PlanResult) -> bool:
    """Return whether a result says nothing of the plans it has not seen."""
    return result.interrupted and not result.plans and result.lower_bound_step_time_s <= 0.0


def search_settings(
    request: PlanRequest,
    chosen: Sequence[Setting],
    search: Callable[[PlanRequest], PlanResult],
    *,
    executor: str = "local",
    least_step_s: Callable[[PlanRequest], float] | None = None,
) -> PlanResult:
    """Return the best plans over all settings.

    Parameters
    ----------
    request : PlanRequest
    chosen : sequence of Setting
        The likeliest first; one after the other each gets an even part of the seconds that are left, as tasks
        of Ray as many seconds as the rounds allow.
    search : callable
        What searches under one setting.
    executor : str
        'local', or as :mod:`foreshard.planner.grid.ray_sweep` takes it.
    least_step_s : callable, optional
        What no step under a setting falls below, for those that time left no plan for; without it the bound
        does not speak of them.
    """
    started = time.perf_counter()
    if executor != "local":
        searched = _in_tasks(request, chosen, search, executor)
    elif len(chosen) == 1:
        return _stated(request, search(chosen[0].of(request)), chosen[0])
    else:
        searched = _one_by_one(request, chosen, search, started)
    if len(chosen) == 1:
        return searched.results[0][1]
    return _joined(request, searched, least_step_s, started)


def _one_by_one(
    request: PlanRequest,
    chosen: Sequence[Setting],
    search: Callable[[PlanRequest], PlanResult],
    started: float,
) -> _Searched:
    """Search setting after setting until time or the user ends it."""
    searched = _Searched()
    try:
        for i, setting in enumerate(chosen):
            left_s = started + request.budget_s - time.perf_counter()
            if left_s <= 0.0 and searched.results:
                searched.missing.append(setting)
                continue
            part_s = max(left_s, 1e-3) / (len(chosen) - i)
            asked = replace(
                setting.of(request),
                budget_s=part_s,
                overall_s=request.budget_s,
                beat_s=_beat_s(request, searched, setting.precision),
                known_s=_known_s(request, searched),
            )
            result = _stated(request, search(asked), setting)
            searched.results.append((setting, result))
            if result.stopped:
                searched.missing += chosen[i + 1 :]
                break
    except KeyboardInterrupt:
        if not any(result.plans for _, result in searched.results):
            raise
        searched.missing += chosen[len(searched.results) :]
    return searched


def _beat_s(request: PlanRequest, searched: _Searched, precision: str) -> float:
    """Return the step time from which on no plan is shown any more; finite once a setting was searched.

    The best plan of each precision is named beside the chosen one.
    """
    if not searched.results:
        return math.inf
    if request.objectives[0] != "time" or request.limits:
        return _ANY
    if not any(setting.precision == precision and result.plans for setting, result in searched.results):
        return _ANY
    shown = _distinct(
        request, [ranked_plan.prediction for _, result in searched.results for ranked_plan in result.plans]
    )
    return shown[request.top - 1].step_time_s if len(shown) >= request.top else _ANY


def _known_s(request: PlanRequest, searched: _Searched) -> float:
    """Return the best step so far: the lowest bound of all settings is that of the answer."""
    if request.objectives[0] != "time" or request.limits:
        return math.inf
    plans = [one for _, result in searched.results for one in result.plans]
    return min((one.prediction.step_time_s for one in plans), default=math.inf)


def _in_tasks(
    request: PlanRequest,
    chosen: Sequence[Setting],
    search: Callable[[PlanRequest], PlanResult],
    executor: str,
) -> _Searched:
    """Search every setting in a task of its own; Ctrl-C keeps what has ended."""
    rounds = -(-len(chosen) // num_at_once(executor))
    alone = replace(request, budget_s=request.budget_s / rounds, executor="local")
    done: dict[int, PlanResult] = {}
    try:
        for i, result in each_in_tasks(search, [(setting.of(alone),) for setting in chosen], executor):
            done[i] = _stated(request, result, chosen[i])
    except KeyboardInterrupt:
        if not any(result.plans for result in done.values()):
            raise
    return _Searched(
        results=[(chosen[i], done[i]) for i in sorted(done)],
        missing=[one for i, one in enumerate(chosen) if i not in done],
    )


def _stated(request: PlanRequest, result: PlanResult, setting: Setting) -> PlanResult:
    """Return the result with the switches stated in its plans."""
    if not setting.comm:
        return result
    return replace(
        result,
        plans=tuple(_with_switches(request, ranked_plan, setting) for ranked_plan in result.plans),
        front=tuple(_with_switches(request, ranked_plan, setting) for ranked_plan in result.front),
    )


def _with_switches(request: PlanRequest, one: Ranked, setting: Setting) -> Ranked:
    """Return the plan as its file will say it."""
    comm = acting(one.plan, setting.comm)
    if one.plan.comm == comm:
        return one
    plan = replace(one.plan, comm=comm)
    return replace(one, plan=plan, prediction=replace(one.prediction, plan=plan))


def _joined(
    request: PlanRequest,
    searched: _Searched,
    least_step_s: Callable[[PlanRequest], float] | None,
    started: float,
) -> PlanResult:
    results = [result.bounded() for _, result in searched.results]
    known = [result for result in results if not _unknown(result)]
    everything = _distinct(
        request, [ranked_plan.prediction for result in results for ranked_plan in result.plans]
    )
    plans, error = request.ranked(everything)
    if not plans:
        return _nothing(results, searched, time.perf_counter() - started)
    ours = next(r for r in known if any(one.prediction is plans[0].prediction for one in r.plans))
    ladder = _ladder(request, known, len(plans[0].plan.ranks))
    if least_step_s and searched.open:
        least = min(least_step_s(one.of(request)) for one in _of_each_precision(searched.open))
        ladder = {name: min(value, least) for name, value in ladder.items()}
    return PlanResult(
        plans=plans,
        lower_bound_step_time_s=max(ladder.values(), default=0.0),
        evaluated=sum(result.evaluated for result in results),
        pruned=sum(result.pruned for result in results),
        wall_s=time.perf_counter() - started,
        space=f"{shared_space(ours, known)}; {_words(searched)}",
        ladder=ladder,
        interrupted=bool(searched.missing) or any(result.interrupted for result in results),
        stopped=any(result.stopped for result in results),
        infeasible=error,
        notes=(
            *ours.notes,
            *_other_precisions(request, searched, plans[0]),
            *_notes(searched, known=least_step_s is not None),
        ),
        front=front_of(
            [ranked_plan.prediction for result in results for ranked_plan in result.front], request.limits
        ),
        bound=_bound(results, searched),
        objective=request.objectives[0],
    )


def _bound(results: Sequence[PlanResult], searched: _Searched) -> ObjectiveBound | None:
    """Return what no setting goes below in dollars or joules, None where one is not bounded."""
    bounds = [result.bound for result in results]
    known = [bound for bound in bounds if bound is not None]
    if searched.open or len(known) < len(bounds):
        return None
    return min(known, key=lambda bound: bound.value)


def shared_space(ours: PlanResult, known: Sequence[PlanResult]) -> str:
    """Return the space of the chosen plan, as far as the bounds of the other settings speak of it."""
    shared = [result.space for result in known if ours.space.startswith(result.space)]
    return min(shared, key=len, default=ours.space)


def _nothing(results: Sequence[PlanResult], searched: _Searched, wall_s: float) -> PlanResult:
    """Return that no setting has a plan, with the reason of the first."""
    return replace(
        results[0],
        evaluated=sum(result.evaluated for result in results),
        pruned=sum(result.pruned for result in results),
        wall_s=wall_s,
        interrupted=bool(searched.missing) or any(result.interrupted for result in results),
    )


def _key(plan: Plan) -> object:
    """Return what plans must differ in to be shown beside each other: of equal nodes the degrees."""
    if len(plan.groups) > 1:
        return repr(plan)
    group = plan.groups[0]
    stage = group.stages[0]
    return plan.precision, len(plan.ranks), len(group.stages), stage.tp, stage.cp, stage.ep, stage.etp


def _distinct(request: PlanRequest, predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the best prediction of each kind of plan; of equal ones that of the fewer switches."""
    kept: dict[object, Prediction] = {}
    order = sorted(predictions, key=lambda one: (score(one, request.objectives), sum(one.plan.comm.values())))
    for prediction in order:
        kept.setdefault(_key(prediction.plan), prediction)
    return list(kept.values())


def _ladder(request: PlanRequest, results: Sequence[PlanResult], used: int) -> dict[str, float]:
    """Return what no setting falls below; for other objectives than time, of those on as many devices."""
    if request.objectives[0] != "time":
        results = [result for result in results if result.plans and len(result.plans[0].plan.ranks) == used]
    shown = [result for result in results if result.plans]
    names = [name for name in shown[0].ladder if all(name in result.ladder for result in shown)]
    whole = min(result.lower_bound_step_time_s for result in results)
    return {name: min(whole, *(result.ladder[name] for result in shown)) for name in names} | {
        "settings": whole
    }


def _words(searched: _Searched) -> str:
    """Return which settings the search covers."""
    covered = [setting for setting, result in searched.results if not _unknown(result)]
    precisions = list(dict.fromkeys(setting.precision for setting in covered))
    names = list(dict.fromkeys(name for setting in covered for name in setting.comm))
    both = [n for n in names if len({setting.comm.get(n) for setting in covered}) > 1]
    on = [name for name in names if name not in both]
    words = [f"in {' and '.join(precisions)}"]
    words += [f"{', '.join(on)} on, which never lengthens a step"] if on else []
    words += [f"{', '.join(both)} on and off"] if both else []
    return "; ".join(words)


def _other_precisions(request: PlanRequest, searched: _Searched, best: Ranked) -> Iterator[str]:
    """Yield what the best plan of each precision that was not chosen takes."""
    kept: dict[str, Prediction] = {}
    predictions = [ranked_plan.prediction for _, result in searched.results for ranked_plan in result.plans]
    for one in sorted(predictions, key=lambda one: score(one, request.objectives)):
        kept.setdefault(one.plan.precision, one)
    for name, one in kept.items():
        if name != best.plan.precision:
            more = one.step_time_s / best.prediction.step_time_s - 1.0
            yield f"{best.plan.precision} was chosen; the best plan in {name} takes {more:+.1%} time"


def _of_each_precision(open_: Sequence[Setting]) -> list[Setting]:
    """Return one setting of each precision: what is hidden does not change the computation."""
    return list({one.precision: one for one in open_}.values())


def _notes(searched: _Searched, *, known: bool) -> list[str]:
    if not searched.open:
        return []
    left = "; ".join(map(str, searched.open))
    of_them = "counts their computation alone" if known else "does not speak of them"
    return [f"Time left no plan for {left}: the bound {of_them}"]
