"""Plans for devices of several kinds: pipelines of their own cuts and degrees, with shares to match."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from foreshard.errors import InfeasibleError
from foreshard.planner.baselines.grid import Best
from foreshard.planner.baselines.ordered import amp, hetpipe
from foreshard.planner.baselines.pipedream import pipedream
from foreshard.planner.interleaving import interleaved_bound, interleaved_plans
from foreshard.planner.judge import engine_seconds, engine_shares, predicted, short_bytes
from foreshard.planner.loading import HASTE, is_hasty
from foreshard.planner.mapping import plan_of
from foreshard.planner.mixed_infeasible import nothing_fits
from foreshard.planner.nearby import work_bound
from foreshard.planner.node_sets import faster_by_s, node_sets
from foreshard.planner.problem import Part, Problem, Template, faults, spread_factor, step_seconds
from foreshard.planner.ranking import front_of, ranked
from foreshard.planner.request import Request
from foreshard.planner.result import PlanResult
from foreshard.planner.solve import Solution, solve
from foreshard.planner.stage_options import MOST_JOINED
from foreshard.planner.stage_prices import price_stages, without
from foreshard.predict.batch import domain_block
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

SPACE = (
    "pipelines beside each other, each of at most 16 stages cut anywhere; stages of devices of one node "
    "group, inside a link domain or of whole ones, with tp within a node, up to 8 inner data-parallel "
    "ranks, 1, 2 or 4 samples a rank, sequences whole or one split over a power of two of ranks (cp) that "
    "leaves each 8192 tokens or more, experts whole on each rank or cut over the most that "
    "divide both, three recompute rules; on at most "
    f"{MOST_JOINED} devices also stages of ranks of two node groups, 1, 2 or 4 samples a rank of the slower "
    "and as many times more a rank of the faster as keep it no longer busy; any shares of at least a "
    "micro-batch; 1f1b; "
    "every stage has memory for one micro-batch for each stage after it; stages of the same layers in "
    "different pipelines "
    "lie in different link domains (side by side in one they are inner data-parallel ranks of one pipeline), "
    "differ at most by a factor of two in inner data-parallel ranks and in ranks that hold the same experts, "
    "which all of them cut, over ranks that follow each other, or none, and no gradient collective has more "
    "members in a link domain than its stage's tp leaves room for"
)
INTERLEAVED = (
    "or plans whose pipelines of several stages are all interleaved with 2, or all with 4, chunks of layers "
    "on each device"
)
"""Of the space where an interleaved plan is chosen and proven."""
_JUDGED = 24
_LEAST_S = 0.5
_HASTE_S = 0.2  # before its deadline a search ends at a proven gap, or by Ctrl-C
_SEARCHING = 0.88
_FIRST = 0.5
_ALONE = 0.6
_APART = 0.5
_LATER = 0.2
_PLAIN = 0.5
_INTERLEAVED = 0.4
_SLACK = 2.0
_NEAR = 1.55
_JUDGING = 0.05
_AIM = 0.003
_CLOSED = 0.005
_PROVEN = 0.01
"""Gap up to which the bound speaks of interleaved plans too."""
_GAP = 0.15
"""Gap above which plans are looked for again at less hopeful prices."""
_ROOMIER = 4
"""Times that plans are looked for with more memory left free, where none fits."""
_QUICK = (hetpipe, amp)
"""Planners that find a plan in tenths of a second."""
_LITTLE = 0.001
"""Part of a step by which fewer node groups may be faster and still be no search of their own at first."""


NamedTemplate = tuple[tuple[Hashable, int, int], ...]
"""A pipeline by the names of its options: (name, start, stop) of each stage."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """Plans judged so far, bounds of the sets of node groups, and what the search has covered."""

    judged: list[tuple[float, Plan]] = field(default_factory=list)
    short_bytes: float = np.inf
    bounds: list[float] = field(default_factory=list)
    ladder: dict[str, float] = field(default_factory=dict)
    evaluated: int = 0
    pruned: int = 0
    interleaved_s: float = 0.0
    interrupted: bool = False
    stopped: bool = False
    columns: dict[NamedTemplate, None] = field(default_factory=dict)
    searched: dict[int, tuple[Problem, Solution]] = field(default_factory=dict)
    problems: dict[tuple[int, ...], Problem] = field(default_factory=dict)
    spoken_for: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Sets that a wider one speaks for: its number, and by how many seconds they may be faster."""

    @property
    def proven(self) -> list[float]:
        """Return the bounds of all sets so far, also by those that speak for them."""
        found = list(self.bounds)
        for i, (wider, faster_s) in self.spoken_for.items():
            if max(i, wider) < len(found):
                found[i] = max(found[i], min(found[wider], self.best_s) - faster_s)
        return found

    def problem(self, request: Request, use: tuple[int, ...]) -> Problem:
        """Return the problem of some node groups, priced once."""
        if use not in self.problems:
            self.problems[use] = price_stages(request, use, by_domain=True, every=True)
        return self.problems[use]

    def work_s(self, request: Request, use: tuple[int, ...]) -> float:
        """Return a step time that no plan on some node groups beats, from work alone.

        Among more node groups the stages of these take no longer: one problem speaks for all its sets.
        """
        wider = next((one for one in self.problems if set(use) <= set(one)), use)
        problem = self.problem(request, wider)
        counts = tuple(n if g in use else 0 for g, n in enumerate(problem.counts))
        own = np.all(problem.takes <= np.array(counts), axis=1)
        rooms = np.where(own[:, None], problem.max_in_flight, 0)
        return work_bound(capped(replace(problem, counts=counts, max_in_flight=rooms), request.max_devices))

    @property
    def best_s(self) -> float:
        """Return the least step time so far, by the analytical engine."""
        return min((seconds for seconds, _ in self.judged), default=np.inf)

    def take(self, request: Request, plan: Plan) -> list[float]:
        """Keep a plan that fits and return its step time; of others, what the best is short of."""
        short = short_bytes(request, plan)
        if short:
            self.short_bytes = min(self.short_bytes, short)
            return []
        seconds = engine_seconds(request, [plan])[0]
        self.judged.append((seconds, plan))
        return [seconds]

    def note(self, solution: Solution, deadline: float) -> None:
        """Count what was priced; what ended before its time was ended by the user."""
        self.evaluated += solution.evaluated
        self.stopped |= solution.interrupted and time.perf_counter() < deadline - _HASTE_S


def search_mixed(request: Request) -> PlanResult:
    """Return the best plans on devices of several kinds, with a bound on every plan of the space.

    Every set of node groups is a problem of its own, since gradients join over the slowest link in use; sets
    that cannot beat the best plan by computation alone are left out.
    """
    started = time.perf_counter()
    deadline = started + _SEARCHING * request.budget_s
    found, notes = _Found(), _notes(request)
    sets = node_sets(request)
    price = request.objectives[0] != "time" or request.limits.max_usd is not None
    hasty = is_hasty(max(request.budget_s, request.overall_s))
    if hasty:
        _until_stopped(found, _offer_published, request, sets[0], found, deadline, some=_QUICK)
        hasty = found.interrupted = bool(found.judged)
        notes += [HASTE] if hasty else []
    if price and not hasty:
        _until_stopped(found, _search_one_domain, request, sets, found)
    rivals = 0 if hasty else _rivals(request, sets, found, every=price)
    for i, use in enumerate(sets):
        now = time.perf_counter()
        # The first set has most devices; each later one as long as the others leave it.
        share = (
            min(max(1.0 - _LATER * rivals, _FIRST), _ALONE) if i == 0 else min(_SLACK / (len(sets) - i), 1.0)
        )
        if found.stopped or hasty:
            found.bounds.append(found.work_s(request, use))
            continue
        _until_stopped(found, _search_set, request, sets, found, now + share * (deadline - now), every=price)
        if len(found.bounds) == i:
            found.bounds.append(found.work_s(request, use))
    _until_stopped(found, _search_roomier, request, sets[0], found)
    if not (price or hasty):
        now = time.perf_counter()
        share = 1.0 if _is_closed(found) else _APART
        _until_stopped(found, _search_apart, request, sets[0], found, now + share * (deadline - now))
        _until_stopped(found, _search_again, found, request, deadline)
    if not hasty:
        _until_stopped(found, _search_interleaved, request, sets, found, started, deadline)
    above = found.best_s / max(min(found.proven), 1e-12) - 1.0
    if not found.judged or (not hasty and (price or above > _GAP)):
        _until_stopped(found, _offer_published, request, sets[0], found, deadline)
        _until_stopped(found, _search_apart, request, sets[0], found, deadline)
    predictions = _predictions(request, found, deadline)
    plans, error = ranked(predictions, request.objectives, request.limits, request.top)
    if not plans:
        return PlanResult(
            plans=(), lower_bound_step_time_s=0.0, gap=0.0, binding="memory", evaluated=found.evaluated,
            pruned=found.pruned, wall_s=time.perf_counter() - started, space=SPACE,
            interrupted=found.interrupted, stopped=found.stopped, infeasible=_none(request, found, sets),
            notes=tuple(notes),
        )  # fmt: skip
    bound = _bound(request, found, sets, notes)
    best_s = plans[0].prediction.step_time_s
    space = SPACE
    if any(group.num_chunks > 1 for group in plans[0].plan.groups):
        space, bound = _beside(request, found, bound, best_s, notes)
    return PlanResult(
        plans=plans,
        lower_bound_step_time_s=min(bound, best_s),
        gap=max(0.0, best_s / bound - 1.0) if bound > 0 else np.inf,
        binding=plans[0].prediction.bottleneck,
        evaluated=found.evaluated + len(found.judged),
        pruned=found.pruned,
        wall_s=time.perf_counter() - started,
        space=space,
        ladder={name: float(value) for name, value in found.ladder.items()} | {"configuration": float(bound)},
        interrupted=found.interrupted,
        stopped=found.stopped,
        infeasible=error,
        notes=tuple(notes),
        front=front_of(predictions, request.limits),
    )


def _until_stopped(found: _Found, search: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Run a part of the search; once there is a plan, Ctrl-C ends it and all parts that follow."""
    if found.stopped and found.judged:
        return
    try:
        search(*arguments, **options)
    except KeyboardInterrupt:
        if not found.judged:
            raise
        found.stopped = found.interrupted = True


def _none(request: Request, found: _Found, sets: Sequence[tuple[int, ...]]) -> InfeasibleError:
    """Return why there is no plan: nothing fits, or nothing was found though something may fit."""
    if not np.isfinite(min(found.proven, default=np.inf)):
        return nothing_fits(request, sets)
    return InfeasibleError(
        "no plan was found; one may exist, or lie outside the space that is searched",
        key="--budget-s", value=request.budget_s, rule=f"Searched were {SPACE}",
        fix="Allow more seconds, or try degrees of your own with foreshard predict",
    )  # fmt: skip


def _notes(request: Request) -> list[str]:
    """Return what is left out before any search, and why."""
    nodes, notes = request.cluster.nodes, []
    unable = [g.device.name for g in nodes if not g.device.supports(request.precision)]
    if unable:
        names = ", ".join(dict.fromkeys(unable))
        notes.append(f"{names}: no {request.precision} in hardware, left idle; --dtype fp16 may use them")
    vendors = sorted({g.device.vendor for g in nodes if g.device.supports(request.precision)})
    if len(vendors) > 1:
        notes.append(f"no collective joins devices of {' and '.join(vendors)}: each vendor was planned alone")
    return notes


def _rivals(request: Request, sets: Sequence[tuple[int, ...]], found: _Found, *, every: bool) -> int:
    """Return how many other sets of node groups come near the first by work alone, and will need a search."""
    found.problem(request, sets[0])
    near = _NEAR * found.work_s(request, sets[0])
    return sum(
        found.work_s(request, use) < near and (every or not _is_spoken_for(request, sets, found, i))
        for i, use in enumerate(sets)
        if i and set(use) <= set(sets[0])
    )


def _is_spoken_for(request: Request, sets: Sequence[tuple[int, ...]], found: _Found, i: int) -> bool:
    """Return whether the search of all node groups says nearly all of a set of fewer.

    What it says enters the bound in any case, unless computation alone says as much.
    """
    work = found.work_s(request, sets[0])
    limit = found.best_s if np.isfinite(found.best_s) else _NEAR * work
    if not set(sets[i]) <= set(sets[0]) or request.max_devices is not None:
        return False
    if i not in found.spoken_for and found.work_s(request, sets[i]) < found.best_s:
        whole = found.problem(request, sets[0])
        faster_s = faster_by_s(found.problem(request, sets[i]), whole)
        found.spoken_for[i] = 0, faster_s * spread_factor(whole, sum(whole.counts))
    return i in found.spoken_for and found.spoken_for[i][1] <= _LITTLE * limit


def _search_set(
    request: Request, sets: Sequence[tuple[int, ...]], found: _Found, deadline: float, *, every: bool
) -> None:
    """Search the plans of the next set of node groups, unless less than that says they cannot be better.

    With `every`, the fastest plan matters no more than others: each set is searched for its own best.
    """
    best, i = np.inf if every else found.best_s, len(found.bounds)
    use = sets[i]
    simple, left = found.work_s(request, use), deadline - time.perf_counter()
    if i and not every and _is_spoken_for(request, sets, found, i):
        found.bounds.append(simple)
        return
    if simple >= best or (left <= 0.0 and found.judged):
        found.bounds.append(simple)
        found.pruned += simple >= best
        found.interrupted |= simple < best
        return
    problem = capped(found.problem(request, use), request.max_devices)
    before = _search_plain(request, problem, found, best, left, every=every)
    if found.stopped and found.judged:
        found.interrupted = True
        return
    solution = solve(
        problem, budget_s=max(deadline - time.perf_counter(), 0.05), target_gap=_AIM,
        beat_s=best if every else found.best_s, columns=before.columns if before else _known(problem, found),
        start=before.arrangement if before else None,
    )  # fmt: skip
    found.columns.update(_named(problem, solution))
    found.note(solution, deadline)
    found.pruned += solution.excluded
    found.interrupted |= solution.interrupted
    # Fewer devices than the set has can be chosen in other ways than the one searched.
    fewer = request.max_devices is not None and sum(problem.counts) >= request.max_devices
    bound = work_bound(problem) if fewer else solution.lower_bound_s
    if not fewer:
        found.searched[len(found.bounds)] = problem, solution
    found.bounds.append(bound)
    found.ladder = found.ladder or dict(solution.ladder)
    late = deadline + _JUDGING * request.budget_s
    _judge(found, request, problem, solution, late, None if every else found.best_s)


def _search_plain(
    request: Request, problem: Problem, found: _Found, best_s: float, left_s: float, *, every: bool
) -> Solution | None:
    """Search without cut experts, split sequences and joint stages, which take more than short searches have.

    None where there are no such stages; else options have the same numbers, for the plain ones come first.
    """
    alone = without(problem, lambda kind: not kind.is_plain)
    if alone is problem:
        return None
    deadline = time.perf_counter() + max(_PLAIN * left_s, 0.05)
    solution = solve(
        alone, budget_s=max(_PLAIN * left_s, 0.05), target_gap=_AIM, beat_s=best_s,
        columns=_known(alone, found),
    )  # fmt: skip
    found.note(solution, deadline)
    late = deadline + _JUDGING * request.budget_s
    _judge(found, request, alone, solution, late, None if every else found.best_s)
    return solution


def _search_one_domain(request: Request, sets: Sequence[tuple[int, ...]], found: _Found) -> None:
    """Look for plans inside one link domain of each kind, which are often the cheapest, whatever the time."""
    for use in sets:
        if len(use) == 1:
            most = min(
                domain_block(request.cluster.nodes[use[0]]),
                request.max_devices or request.cluster.num_devices,
            )
            problem = capped(price_stages(request, use, by_domain=True, every=True), most)
            solution = solve(problem, budget_s=_LEAST_S, target_gap=_AIM)
            _judge(found, request, problem, solution, time.perf_counter() + _LEAST_S)


def _lowest(found: _Found) -> int:
    """Return the set that holds the bound down: the one to search for it to rise."""
    low = int(np.argmin(found.proven))
    return found.spoken_for.get(low, (low, 0.0))[0]


def _is_closed(found: _Found) -> bool:
    """Return whether no bound can rise by much: the arrangement of the lowest is known to be as good."""
    low = _lowest(found)
    return low in found.searched and found.searched[low][1].gap < _CLOSED


def _search_again(found: _Found, request: Request, deadline: float) -> None:
    """Spend the time that is left on the set that holds the bound down, from where its search stood."""
    while found.judged and not found.stopped and deadline - time.perf_counter() > _LEAST_S:
        low = _lowest(found)
        if found.best_s <= found.bounds[low] * (1.0 + _AIM) or low not in found.searched:
            return
        problem, before = found.searched.pop(low)
        solution = solve(
            problem, budget_s=deadline - time.perf_counter(), target_gap=_AIM, beat_s=found.best_s,
            start=before.arrangement, columns=before.columns, bounds=before.bounds,
        )  # fmt: skip
        found.note(solution, deadline)
        found.bounds[low] = max(found.bounds[low], solution.lower_bound_s)
        late = deadline + _JUDGING * request.budget_s
        _judge(found, request, problem, solution, late, found.best_s)


def _search_interleaved(
    request: Request, sets: Sequence[tuple[int, ...]], found: _Found, started: float, deadline: float
) -> None:
    """Look for interleaved plans and for their bound, in the part of the budget that is for them."""

    def priced(use: tuple[int, ...], chunks: int, stages: int | None = None) -> Problem:
        problem = price_stages(request, use, by_domain=True, every=True, chunks=chunks, stages=stages)
        return capped(problem, request.max_devices)

    now = time.perf_counter()
    if deadline - now < _LEAST_S:
        return
    known = sorted(found.judged, key=lambda one: one[0])
    until = min(deadline, now + max(now - started, _INTERLEAVED * request.budget_s))
    made = interleaved_plans(request, known, partial(priced, sets[0]), now + _PLAIN * (until - now))
    if made:
        found.interleaved_s = interleaved_bound(request, sets, priced, made[0][0], until)
        found.judged += made


def _named(problem: Problem, solution: Solution) -> dict[NamedTemplate, None]:
    """Return a solution's pipelines by what their stages are, which holds in other problems too."""
    return {
        tuple((problem.names[part.option], part.start, part.stop) for part in template): None
        for template in solution.columns
    }


def _known(problem: Problem, found: _Found) -> list[Template]:
    """Return the pipelines found in other sets of node groups that this problem has all options of."""
    index = {name: i for i, name in enumerate(problem.names)}
    return [
        tuple(Part(option=index[name], start=start, stop=stop) for name, start, stop in named)
        for named in found.columns
        if all(name in index for name, _, _ in named)
    ]


def _offer_published(
    request: Request,
    use: tuple[int, ...],
    found: _Found,
    deadline: float,
    *,
    some: Sequence[Callable[..., object]] = (hetpipe, amp, pipedream),
) -> None:
    """Judge what planners with fixed orders of devices find: columns may miss the few pipelines that fit.

    As long as there is no plan at all, they are asked whatever the time.
    """
    if found.judged and time.perf_counter() >= deadline:
        return
    problem = capped(found.problem(request, use), request.max_devices)
    for planner in some:
        if found.judged and time.perf_counter() >= deadline:
            return
        best = Best(problem=problem, slack=0.25)
        planner(problem, best=best)
        for _, arrangement in best.by_number.values():
            plan = plan_of(request, problem, arrangement)
            if plan is not None and not faults(problem, arrangement):
                found.take(request, plan)


def _search_apart(request: Request, use: tuple[int, ...], found: _Found, deadline: float) -> None:
    """Look for plans again with gradient collectives not at their best, which draws the search elsewhere."""
    if time.perf_counter() >= deadline:
        return
    problem = capped(
        without(price_stages(request, use, apart=True, every=True), lambda kind: kind.beside is not None),
        request.max_devices,
    )
    left = deadline - time.perf_counter()
    solution = solve(problem, budget_s=left, target_gap=_AIM, columns=_known(problem, found))
    found.note(solution, deadline)
    late = deadline + _JUDGING * request.budget_s
    _judge(found, request, problem, solution, late, found.best_s)


def _search_roomier(request: Request, use: tuple[int, ...], found: _Found) -> None:
    """Look again, at once, with as much memory left free as plans so far are short of, until one fits.

    The problem knows the buffers of no more than two stages and two pipelines; a real plan may need more.
    """
    reserve = 0.0
    for _ in range(_ROOMIER):
        if found.judged or not np.isfinite(found.short_bytes):
            return
        reserve += 1.5 * found.short_bytes
        found.short_bytes = np.inf
        priced = price_stages(request, use, reserve_bytes=reserve, by_domain=True, every=True)
        problem = capped(priced, request.max_devices)
        left = max(_LEAST_S, 0.1 * request.budget_s)
        solution = solve(problem, budget_s=left, target_gap=0.05, columns=_known(problem, found))
        found.evaluated += solution.evaluated
        found.columns.update(_named(problem, solution))
        _judge(found, request, problem, solution, time.perf_counter() + left)


def capped(problem: Problem, max_devices: int | None) -> Problem:
    """Return the problem on at most so many devices, those that do most work first."""
    if max_devices is None or sum(problem.counts) <= max_devices:
        return problem
    usable = np.where(problem.max_in_flight > 0, problem.time_s, np.inf)
    work = usable * problem.takes.sum(1)[:, None] / problem.micro_batch[:, None]
    middle = int(problem.types[1, 2])
    pace = [work[problem.takes[:, k] > 0, middle].min(initial=np.inf) for k in range(len(problem.counts))]
    counts, left = [0] * len(problem.counts), max_devices
    for kind in np.argsort(pace, kind="stable"):
        counts[kind] = min(left, problem.counts[kind])
        left -= counts[kind]
    return replace(problem, counts=tuple(counts))


def _judge(
    found: _Found,
    request: Request,
    problem: Problem,
    solution: Solution,
    deadline: float,
    beat_s: float | None = None,
) -> None:
    """Judge plans of the arrangements, as they are and with shares balanced anew, by their step times.

    Late, the best arrangement alone. With a time to beat, those that cannot beat it, or the best here, are
    left out: no plan is faster by the engine than its arrangement is by the problem.
    """
    made: list[float] = []
    seen: list[Plan] = []
    for arrangement in solution.others[:_JUDGED]:
        least = step_seconds(problem, arrangement)
        if beat_s is not None and made and least >= min(beat_s, *made):
            continue
        for near in (False, True):
            if made and time.perf_counter() > deadline:
                return
            plan = plan_of(request, problem, arrangement, replicas_near=near)
            if plan is None or plan in seen:
                continue
            seen.append(plan)
            made += found.take(request, plan)
            again = engine_shares(request, problem, arrangement, plan)
            other = None if again is None else plan_of(request, problem, again, replicas_near=near)
            if other is not None:
                made += found.take(request, other)


def _beside(
    request: Request, found: _Found, bound: float, best_s: float, notes: list[str]
) -> tuple[str, float]:
    """Return space and bound where the chosen plan is interleaved: with such plans if that says enough."""
    whole = bound if request.engine != "analytical" else min(bound, found.interleaved_s)
    if request.engine != "analytical" or best_s <= whole * (1.0 + _PROVEN):
        return f"{SPACE}; {INTERLEAVED}", whole
    notes.append(
        f"the chosen plan is interleaved and beside the bound, which speaks of 1f1b: none of that takes less "
        f"than {bound:.3g} s; none interleaved throughout, with 2 or 4 chunks, less than "
        f"{found.interleaved_s:.3g} s"
    )
    return SPACE, bound


def _predictions(request: Request, found: _Found, deadline: float) -> list[Prediction]:
    """Return the predictions of the best plans that fit, the best on each number of devices among them.

    Late, the fastest alone; where time is not to be small, as many as are shown, of least device-seconds.
    """
    order = sorted(found.judged, key=lambda one: one[0])
    first: dict[int, tuple[float, Plan]] = {}
    for seconds, plan in order:
        first.setdefault(len(plan.ranks), (seconds * len(plan.ranks), plan))
    frugal = [plan for _, plan in sorted(first.values(), key=lambda one: one[0])]
    fastest, others = [plan for _, plan in order[: request.top]], order[request.top : 4 * request.top]
    by_time = request.objectives[0] == "time"
    wanted = [*fastest, *frugal] if by_time else [*frugal, *fastest]
    wanted += [plan for _, plan in others]
    least = 1 if by_time else request.top
    made: list[Prediction] = []
    seen: list[Plan] = []
    for plan in wanted:
        if plan in seen or (len(made) >= least and time.perf_counter() > deadline):
            continue
        seen.append(plan)
        made.append(predicted(request, plan))
        if len(made) >= 2 * request.top + len(first):
            break
    return made


def _bound(request: Request, found: _Found, sets: Sequence[tuple[int, ...]], notes: list[str]) -> float:
    """Return a step time that no plan of the space beats, by the engine asked for."""
    bound = min(found.proven, default=0.0)
    if request.engine == "analytical":
        return bound
    notes.append(
        f"the bound for engine {request.engine} is that of computation alone, spread over all devices: it "
        "overlaps messages that the analytical engine adds"
    )
    priced = (price_stages(request, use, compute_only=True, every=True) for use in sets)
    return min(work_bound(capped(problem, request.max_devices)) for problem in priced)
