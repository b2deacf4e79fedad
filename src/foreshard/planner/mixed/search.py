"""Plans for devices of several kinds: pipelines of their own cuts and degrees, with shares to match."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np

from foreshard.catalog.offers import offers_of
from foreshard.errors import InfeasibleError
from foreshard.planner.baselines.registry import BASELINES
from foreshard.planner.grid.equal_nodes import search_homogeneous
from foreshard.planner.grid.space import SPACE as EVEN
from foreshard.planner.idle_devices import idle_devices
from foreshard.planner.mixed.best_so_far import MixedFound, is_interleaved
from foreshard.planner.mixed.even_plans import EvenPlans, even_plans_of
from foreshard.planner.mixed.infeasible import nothing_chosen, nothing_fits
from foreshard.planner.mixed.interleaving import (
    chunk_counts,
    depths,
    interleaved,
    loosest,
    plan_in_chunks,
    scaled,
)
from foreshard.planner.mixed.loading import HASTE, is_hasty
from foreshard.planner.mixed.local_search import AT_ONCE, changed_in_chunks, improved, in_a_row
from foreshard.planner.mixed.node_sets import are_apart, are_short_alike, capped, node_sets
from foreshard.planner.mixed.subspaces import (
    ABOVE_WORK,
    AIM,
    Part,
    Subspace,
    holding_down,
    next_subspace,
)
from foreshard.planner.pricing.engine_times import engine_seconds, predicted, resources
from foreshard.planner.pricing.mapping import plan_of
from foreshard.planner.pricing.stage_prices import FEW_COPIES, SharedPrices, joins_alike, price_stages
from foreshard.planner.ranking import SHOWN, family_of, front_of, score
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import PlanResult, WiderSpace
from foreshard.planner.solver.problem import (
    Arrangement,
    Problem,
    faults,
    step_seconds,
    with_joint_tail,
)
from foreshard.planner.solver.time_budget import LEAST_S, TimeBudget
from foreshard.planner.solver.work_bounds import work_bound
from foreshard.predict.placement import domain_block
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

SPACE = (
    "pipelines side by side, each of at most 16 stages cut anywhere; stages of devices of one node group, "
    "inside a link domain or of whole ones (of nodes of 2, 4, 8, ... devices a half, a quarter and so on, "
    "or several by 1, 2, 4 or 8 inner data-parallel ranks), with tp within a node, up to 8 inner "
    "data-parallel ranks, 1, 2 or 4 samples a rank (within 16384 tokens also 8, not interleaved also all "
    "of the batch, and of one stage 3, 6, 12, 16, 24, 32, 48 or 64), sequences whole or one split over a "
    "power of two of ranks (cp) that leaves each 8192 tokens or more, experts whole on each rank or cut "
    "over the most that divide both, three recompute rules; any shares of at least a micro-batch, of one "
    "stage also less, or the whole batch over ranks that take a sample more or less; 1f1b; every stage "
    "has memory for one micro-batch for each stage after it; stages of the same layers in different "
    "pipelines lie in different link domains, if there are several (side by side in one they are inner "
    "data-parallel ranks of one pipeline), differ at most by a factor of two in inner data-parallel ranks "
    "and in ranks that hold the same experts, which all of them cut, over ranks that follow each other, "
    "or none, no gradient collective has more members in a link domain than its stage's tp leaves "
    "room for, and a short last micro-batch takes the same part of a whole one on each stage"
)
INTERLEAVED = (
    "or plans whose pipelines of several stages are all interleaved with 2, or all with 4, chunks of layers "
    "on each device"
)
"""Of the space where an interleaved plan is chosen."""
BESIDE = "or plans whose pipelines lie side by side in any way"
"""Of the space where pipelines of the chosen plan are not `are_apart`."""
SHORT = "or plans with a last micro-batch of any number of samples on stages of any inner data-parallel ranks"
"""Of the space where the chosen plan has stages that are not `are_short_alike`."""
_PROVING = 0.25
"""Part of the search, once there is a plan, that goes to proofs: to what holds the bound down."""
_PROVING_AT_FIRST = 0.5
"""The same as long as that has no bound by pipelines with their filling."""
_PROVING_BESIDE = 0.05
"""The same while a likely part of the space is next in turn that has no plan yet."""
_LEAST_S = 1e-9
"""Seconds left that count as some."""
_GRID = 0.03
"""Part of the time that is left for each of several grids at first."""
_GRIDS_PAID = 0.5
"""The same for all of them together where dollars or joules are made small: fewest are often on one kind."""
_SEARCHING = 0.88
"""Part of the budget for the search; the rest is for predicting the plans that are shown."""
_SHOWING = 0.05
"""Part of the budget that is left for timing the chosen plans by the engine asked for."""
_TIMING = 0.25
"""Part of the budget that is left at most for the engine asked for, however long it takes."""
_EXPLAINING_S = 0.5
"""Seconds to look for what would make idle devices pay, at least."""
_NEAREST = 4
"""1f1b plans that are tried with chunks as they are."""
_BOUNDING = 0.2
"""Weight of the 1f1b plans at their best beside those at the usual prices, when plans are looked for."""
_CHANGEABLE = 0.2
"""Part by which a 1f1b plan may be slower than the fastest and still be changed."""
_PUBLISHED = 12
"""Arrangements of a published planner that are timed, the best by price: a plan that is slower than the
grid may still be the fastest once it is laid out in chunks."""
_OF_FEW_SHAPES = ("hetpipe", "pipedream")
"""Published planners that searches of interleaved pipelines start from, the quickest first: one pipeline of
all devices, whose stages are alike, is hardly a mix that columns are generated for."""
_CHEAP = ("hetpipe", "lb-bsp")
"""Published planners that every search starts from: hundredths of a second each on a few devices."""
_PLANNER_S = 1.0
"""Seconds of a step of such searches at least: what the second planner takes on hundreds of devices."""
_NEAR = 0.01
"""Gap at which the answer is good enough: what `--budget-s` says of the end of a search."""
_FEWER = 0.25
"""Weight of the usual prices of fewer node groups beside those of all."""
_CHANGING = 0.05
"""Part of the search that goes to changes of the fastest plans at its end, more if more is left."""
_CHANGING_EARLY = 0.1
"""Part of what is left, and of what was spent, that goes to changes of the fastest plan before proofs."""
_CHANGING_CHUNKS = 0.5
"""Part of the time for changes that is left for chunks of layers where the fastest plan has none yet."""
_PRICING_CHUNKS = 0.5
"""Part of that in which plans in chunks are put in order."""
_WEIGHT = 0.5
"""Weight of each depth of interleaved pipelines beside the likelier one before it."""
_LIKELY = _WEIGHT**2
"""Least weight of a part of the space whose first plans come before proofs: of the two likeliest depths."""
_TAIL = 0.7
"""Part of the longest tail of a subspace's best plan that none exceeds where all have one in common."""
_ROOMIER = 4
"""Searches with more memory left free, as long as no plan fits."""
_ROOM = 1.5
"""Times the memory that plans lack that is left free the next time."""


WITHOUT_EXTRA = "Unequal pipelines were not searched: that needs the extra foreshard[plan]"


def search_cluster(request: PlanRequest) -> PlanResult:
    """Return the best plans on any cluster, with a bound on every plan of the space.

    On equal nodes the grid alone answers where a tool is to train what is planned. Where dollars or joules
    are to be small, which unequal pipelines only move, or the framework runs no 1f1b pipelines, it does if
    samples divide over all devices and none is idle.
    """
    equal = len(request.cluster.nodes) == 1
    by_time = request.objectives[0] == "time" or request.limits
    pipelines = by_time and "1f1b" in offers_of(request.framework).schedules
    grid: PlanResult | None = None
    if equal and not (pipelines and request.tool is None):
        grid = search_homogeneous(request)
        if request.tool is not None or _is_even(request, grid):
            return grid
        request = replace(request, budget_s=max(request.budget_s - grid.wall_s, _LEAST_S))
    whole = request.choices.of_whole_plans
    if equal and whole:
        even = search_homogeneous(request)
        note = f"Unequal pipelines were not searched: {', '.join(whole)} is stated"
        return replace(even, notes=(*even.notes, note))
    if request.choices and not node_sets(request):
        return search_homogeneous(request) if equal else nothing_chosen(request)
    if equal and find_spec("scipy") is None:
        even = search_homogeneous(request)
        return replace(even, notes=(*even.notes, WITHOUT_EXTRA))
    search = MixedSearch(request)
    search.run(hastily=is_hasty(max(request.budget_s, request.overall_s)))
    if equal and not search.found.timed:
        left = replace(request, budget_s=max(search.whole.left_s, _LEAST_S))
        return search_homogeneous(left, least_s=0.0)
    result = search.result()
    if grid is None or not (grid.plans and result.plans):
        return result if grid is None or result.plans else grid
    best, other = (score(one.plans[0].prediction, request.objectives) for one in (grid, result))
    return grid if best <= other else result


def _is_even(request: PlanRequest, grid: PlanResult) -> bool:
    """Return whether samples divide over all devices, and the grid leaves none idle that it pays for.

    Joules are those of devices in use.
    """
    if not grid.plans:
        return grid.infeasible is None or grid.infeasible.key != "--global-batch"
    if request.objectives[0] == "energy":
        return True
    nodes, used = request.cluster.nodes[0], len(grid.plans[0].plan.ranks)
    most = min(nodes.num_devices, request.max_devices or nodes.num_devices)
    paid = -(-used // nodes.per_node) * nodes.per_node if request.objectives[0] == "cost" else most
    return used == paid and request.global_batch % most == 0


class MixedSearch:
    """The search of all subspaces of a request, and what comes of it.

    Every set of node groups is a subspace, since gradients join over the slowest link in use; interleaved
    plans of each depth are more, once there is a plan to say which depths are likely.

    Parameters
    ----------
    request : PlanRequest
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.whole = TimeBudget.of(request.budget_s, last_s=max(request.budget_s, LEAST_S))
        self.budget = self.whole.part(_SEARCHING)
        self.found = MixedFound(request=request)
        self.sets = node_sets(request)
        self.by_price = request.objectives[0] != "time" or request.limits.max_usd is not None
        self.stopped = False
        self.notes = _notes(request)
        self.by_set: list[Subspace] = []
        for use in self.sets:
            self.by_set.append(self._of_set(use, self._whole(use, self.by_set)))
        self.even = even_plans_of(request, alone=self.by_price)
        self.roomier: list[Subspace] = []
        self.others: list[Subspace] = []
        self.interleaved_bounds: list[Subspace] = []
        self._finding_s = self._proving_s = self._changing_s = 0.0
        self._changed: Plan | None = None
        self._reserve_bytes = 0.0
        self._depths: dict[tuple[int, int], Subspace] = {}
        self._joined: dict[Subspace, Subspace] = {}
        self._tried: list[Plan] = []
        self._usual_problems: dict[tuple[int, ...], Problem] = {}
        self._usual_searches: dict[tuple[int, ...], tuple[Subspace, ...]] = {}
        self._shared_prices: dict[tuple[tuple[int, ...], int], dict[bool, SharedPrices]] = {}

    def run(self, *, hastily: bool = False) -> None:
        """Work on subspaces until time is over or none promises anything; after a plan, or until Ctrl-C."""
        try:
            self._start()
            if hastily:
                self._offer_published(("hetpipe", "amp") if len(self.sets) > 1 else (), late=True)
                if self.found.timed:
                    self.notes.append(HASTE)
                    return
            self.by_set[0].floor_s()  # the bound rests on it: what it takes is not left for after the budget
            self._offer_published(_CHEAP[-1:] if self.by_price else _CHEAP, usual=not self.by_price)
            self._open()
            searching = self.budget.part(1.0 - _CHANGING)
            while not (self._is_over(searching) or self.stopped):
                self._leave_time()
                within = self._within(searching)
                chosen, share = next_subspace(self._subspaces, self.found.best_s)
                lowest = self._holding_down()
                if chosen is None and lowest is None:
                    break
                turn = self._proving_s < self._proving(chosen, lowest) * (self._proving_s + self._finding_s)
                if lowest is not None and (turn or chosen is None):
                    self._change_early()
                    self._proving_s += self._advance(lowest, share, within, proves=True)
                elif chosen is not None:
                    self._finding_s += self._advance(chosen, share, within)
            self._leave_time()
            self._change(self.budget)
            if self.by_price or not self.found.timed:
                self._offer_published(("hetpipe", "amp", "pipedream"))
        except KeyboardInterrupt:
            for subspace in self.pipelines if not self.found.timed else ():
                subspace.time_fresh(self.found, self.budget)
            if not self.found.timed:
                raise
            self.stopped = True

    def _proving(self, chosen: Part | None, lowest: Part | None) -> float:
        """Return the part of the search that goes to proofs at present, of what holds the bound down.

        Little beside the first plans of a likely part of the space, which may hold a better plan.
        """
        if isinstance(chosen, Subspace) and self._may_surprise(chosen):
            return _PROVING_BESIDE
        looking = any(self._may_surprise(one) for one in self.others)
        priced = lowest is None or lowest.is_priced
        return _PROVING if priced or looking else _PROVING_AT_FIRST

    def _may_surprise(self, one: Subspace) -> bool:
        """Return whether a likely part of the space may hold a better plan and was hardly searched."""
        likely = one.is_fresh and one.weight >= _LIKELY and one in self.others
        return likely and one.promise_s(self.found.best_s) > 0.0

    def _holding_down(self) -> Part | None:
        """Return the part of the space whose bound is to be raised: that of the answer, if it has any."""
        if not self.found.timed or self.request.objectives[0] != "time":
            return None
        return holding_down(self._subspaces, self.found.known_s)

    def _is_over(self, searching: TimeBudget) -> bool:
        """Return whether time is over: with a plan that of the search, else all there is."""
        over = searching.is_over or self.budget.is_over
        return over if self.found.timed else self.whole.is_past

    def _within(self, searching: TimeBudget) -> TimeBudget:
        """Return when a step has to end: with a plan that leaves time for changes."""
        return min(searching, self.budget, key=lambda one: one.ends_at) if self.found.timed else self.budget

    def _leave_time(self) -> None:
        """End the search so early that the engine can time what is shown, by what it took so far."""
        if self.request.chooses_later:
            timing_s = min(SHOWN * self.found.graph_s, _TIMING * self.request.budget_s)
            ends_at = self.whole.ends_at - timing_s
            self.budget = TimeBudget(min(self.budget.ends_at, ends_at), self.budget.last_at)

    def _start(self) -> None:
        """Search grids, the most promising first, a while each; a single one to its end."""
        share = _GRIDS_PAID / len(self.even) if self.by_price else _GRID
        share = 1.0 if len(self.even) == 1 else share
        for even_plans in sorted(self.even, key=lambda one: one.bound_s):
            if even_plans.promise_s(self.found.best_s) > 0.0:
                self._advance(even_plans, share, self.budget)

    def _advance(self, chosen: Part, share: float, within: TimeBudget, *, proves: bool = False) -> float:
        """Do a step of a part of the space, in a part of the time that is left; return its seconds."""
        had_plan, before_s = bool(self.found.timed), self.found.best_s
        left_s = within.left_s
        step = chosen.prove if proves else chosen.advance
        slice_s = chosen.proof_slice_s if proves else chosen.slice_s
        part = max(share, min(1.0, slice_s / max(left_s, slice_s, _LEAST_S)))
        step(self.found, within.part(part))
        spent_s = left_s - within.left_s
        # What found a faster plan may find another: its time counts for nothing.
        pays = self.found.best_s < before_s < np.inf
        chosen.spent_s += 0.0 if proves or pays else spent_s
        if isinstance(chosen, Subspace):
            self._make_room(chosen)
            self._join_tails(chosen)
        elif chosen.result is not None:
            self.stopped = chosen.result.stopped
        # Not after grids alone: what mixes find leaves fewer of their plans to lay out in chunks.
        if self.found.timed and chunk_counts(self.request) and not isinstance(chosen, EvenPlans):
            self._add_interleaved()
        for subspace in self.pipelines if self.found.timed and not had_plan else ():
            subspace.is_closed = subspace.is_proven = (
                False  # a plan to beat lets searches go on that had given up
            )
        return spent_s

    def _change(self, budget: TimeBudget, *, fastest_alone: bool = False) -> None:
        """Change the fastest 1f1b plans that differ in their ranks, as long as that helps.

        The fastest alone where a bound is near. Bounds do not know all that unequal stages spare: they are no
        reason to leave it as it is.
        """
        if not self.found.timed or budget.is_over:
            return
        least_s = min(one.bound_s for one in self.even)
        least_s = min(least_s, *(subspace.expected_s for subspace in self.by_set))
        is_near = not self.found.is_interleaved and self.found.best_s <= least_s * (1.0 + _NEAR)
        number = 1 if is_near or fastest_alone else len(self.found.timed)
        plain = [] if self.by_price else self.found.plain(number)
        if plain and self.found.is_interleaved:
            self._change_in_chunks(budget)
        starts: dict[Hashable, tuple[float, Plan]] = {}
        for seconds, plan in () if self._no_plain_helps else plain:
            if seconds <= plain[0][0] * (1.0 + _CHANGEABLE):
                starts.setdefault(tuple(len(s.ranks) for g in plan.groups for s in g.stages), (seconds, plan))
        in_chunks = bool(plain and chunk_counts(self.request))
        whole = budget.part(1.0 - _CHANGING_CHUNKS) if in_chunks else budget
        for seconds, plan in starts.values():
            if whole.is_over:
                break
            changed, changed_s = improved(self.request, plan, seconds, whole)
            if changed is not plan and self.request.choices.holds(changed):
                self.found.timed.append((changed_s, changed))
        if in_chunks:
            self._add_interleaved()
            self._change_in_chunks(budget)

    def _change_early(self) -> None:
        """Change the fastest plan before bounds on it are raised, once, in a part of the time so far."""
        spent_s = self._proving_s + self._finding_s
        best = self.found.best[1]
        if best is None or best is self._changed or self._changing_s > _CHANGING_EARLY * spent_s:
            return
        left_s = self.budget.left_s
        self._change(self.budget.part(_CHANGING_EARLY), fastest_alone=True)
        self._changing_s += left_s - self.budget.left_s
        self._changed = self.found.best[1]

    @property
    def _no_plain_helps(self) -> bool:
        """Return whether the fastest plan is interleaved, and no 1f1b plan is faster by more than AIM."""
        seconds, plan = self.found.best
        return plan is not None and is_interleaved(plan) and self._plain_bound_s * (1.0 + AIM) >= seconds

    def _change_in_chunks(self, budget: TimeBudget) -> None:
        """Try changes of the fastest plan in chunks, in any number where it has none, while they help.

        Those come first that the closed form promises most of: the graph takes longer than that.
        """
        counts, before_s = chunk_counts(self.request), np.inf
        while self.found.best_s < before_s and not budget.is_over:
            before_s, best = self.found.best
            if best is None:
                return
            own = max(group.num_chunks for group in best.groups)
            tried = [changed_in_chunks(self.request, best, n) for n in ([own] if own in counts else counts)]
            made = self._by_promise(chain.from_iterable(tried), budget.part(_PRICING_CHUNKS))
            for promised_s, plan in made:
                if not self.found.may_be_fastest(promised_s) or budget.is_over:
                    return
                if self.found.take_interleaved(plan, budget, promised_s=promised_s) < before_s:
                    break

    def _by_promise(self, made: Iterator[Plan], budget: TimeBudget) -> list[tuple[float, Plan]]:
        """Return plans with their seconds by the closed form, the fastest first, as far as time allows."""
        promised: list[tuple[float, Plan]] = []
        while not budget.is_over and (some := list(islice(made, AT_ONCE))):
            promised += zip(engine_seconds(self.request, some), some, strict=True)
        return sorted(promised, key=itemgetter(0))

    @property
    def _subspaces(self) -> list[Part]:
        return [*self.pipelines, *self.even]

    @property
    def pipelines(self) -> list[Subspace]:
        """Return the parts of the space that are problems of pipelines."""
        return [*reversed(self.roomier), *self.by_set, *self.others, *self.interleaved_bounds]

    def _whole(self, use: tuple[int, ...], known: Sequence[Subspace]) -> Subspace | None:
        """Return the first of some subspaces, of all node groups, if what bounds it bounds fewer of them."""
        if not known or self.request.max_devices is not None or not set(use) <= set(self.sets[0]):
            return None
        return known[0] if joins_alike(self.request, use, self.sets[0]) else None

    def _of_set(self, use: tuple[int, ...], within: Subspace | None = None) -> Subspace:
        """Return the subspace of 1f1b plans on a set of node groups."""
        return Subspace(
            price=lambda: capped(self.found.problem(use), self.request.max_devices),
            time_plans=self._time_plain,
            floor_s=cache(partial(self.found.work_s, use)),
            weight=1.0 if self.by_price else _BOUNDING,
            alone=self.by_price,
            proves=True,
            within=within,
            beside=lambda: self._usual_searches.get(use, ()),
        )

    def _open(self) -> None:
        """Add searches that only find plans.

        By prices as most plans have them, instead of what none is below; and, where money counts, within one
        link domain of each kind, which is often cheapest.
        """
        for place, use in enumerate(() if self.by_price else self.sets):
            usual = Subspace(
                price=partial(self._usual, use),
                time_plans=self._time_plain,
                floor_s=self.by_set[place].floor_s,
                weight=_FEWER if place else 1.0,
            )
            self._usual_searches[use] = (usual,)
            self.others.append(usual)
        for use in self.sets if self.by_price else ():
            if len(use) == 1:
                block = domain_block(self.request.cluster.nodes[use[0]])
                most = min(block, self.request.max_devices or block)
                self.others.append(
                    Subspace(
                        price=partial(self._priced, use, most),
                        time_plans=self._time_plain,
                        floor_s=lambda: 0.0,
                        alone=True,
                    )
                )

    def _priced(self, use: tuple[int, ...], most: int | None = None, **how: Any) -> Problem:
        """Return the problem of some node groups, of at most so many devices, priced as `how` says."""
        problem = price_stages(self.request, use, by_domain=True, every=True, **how)
        return capped(problem, most or self.request.max_devices)

    def _usual(self, use: tuple[int, ...]) -> Problem:
        """Return the problem of some node groups at the prices that most plans have, priced once."""
        if use not in self._usual_problems:
            self._usual_problems[use] = self._priced(use, apart=True)
        return self._usual_problems[use]

    def _make_room(self, chosen: Subspace) -> None:
        """Search with as much memory left free as plans so far lack, where the best of a step do not fit.

        The problem knows the buffers of no more than two stages and two pipelines; a plan may need more.
        """
        found = self.found
        last = self.roomier[-1] if self.roomier else self.by_set[0]
        lacking = chosen.lacks_memory(found.best_s) and np.isfinite(found.missing_bytes)
        if chosen is not last or not lacking or len(self.roomier) >= _ROOMIER:
            return
        self._reserve_bytes += _ROOM * found.missing_bytes
        found.missing_bytes = np.inf
        self.roomier.append(
            Subspace(
                price=partial(self._priced, self.sets[0], reserve_bytes=self._reserve_bytes),
                time_plans=self._time_plain,
                floor_s=self.by_set[0].floor_s,
                weight=self.by_set[0].weight,
            )
        )

    def _join_tails(self, chosen: Subspace) -> None:
        """Search once more with a tail that all pipelines have in common, of the usual prices.

        Gradients are summed when the last pipeline has them: the longest tail follows all of them, which a
        problem does not know that prices each pipeline alone.
        """
        tail_s = chosen.longest_tail_s
        problem = chosen.problem
        if (
            chosen.planners
            or problem is None
            or tail_s == 0.0
            or chosen in self._joined
            or chosen not in self._depths.values()
        ):
            return
        joined = Subspace(
            price=lambda: with_joint_tail(problem, _TAIL * tail_s),
            time_plans=chosen.time_plans,
            floor_s=chosen.floor_s,
            weight=chosen.weight,
        )
        chosen.is_wanted = lambda: joined.is_closed
        self._joined[chosen] = joined
        self.others.append(joined)

    def _add_interleaved(self) -> None:
        """Try chunks on the best 1f1b plans, and add depths near theirs and the bounds that matter."""
        request, found = self.request, self.found
        counts = chunk_counts(request)
        even = [plan for plan in found.even if is_interleaved(plan) and plan.groups[0].num_chunks in counts]
        for plan in (*(plan for _, plan in found.plain(_NEAREST)), *even):
            if any(plan is tried for tried in self._tried):
                continue
            if self.budget.is_over:
                return
            self._tried.append(plan)
            for made in [plan] if plan in even else [interleaved(plan, chunks) for chunks in counts]:
                if made is not None:
                    found.take_interleaved(made, self.budget)
        self._add_depths()
        if self._wants_chunks() and not self.interleaved_bounds and request.max_devices is None:
            for place, use in enumerate(self.sets):
                subspace = Subspace(
                    price=partial(self._loosest_interleaved, use),
                    time_plans=self._time_interleaved,
                    floor_s=self.by_set[place].floor_s,
                    is_wanted=self._wants_chunks,
                    finds=False,
                    proves=True,
                    within=self._whole(use, self.interleaved_bounds),
                    beside=tuple if place else self._depths.values,  # depths are of all node groups
                )
                self.interleaved_bounds.append(subspace)

    def _wants_chunks(self) -> bool:
        """Return whether the answer is interleaved, or may well be by the time that its bound is needed.

        That is once the bound on 1f1b plans counts filling and pipelines in chunks still promise more.
        """
        best_s = self.found.best_s
        in_chunks = (*self._depths.values(), *self._joined.values())
        promised = self.by_set[0].is_priced and any(one.promise_s(best_s) > 0.0 for one in in_chunks)
        return self.found.is_interleaved or promised

    def _add_depths(self) -> None:
        """Add interleaved pipelines of depths near that of the fastest plan, and weigh all by how near."""
        best = self.found.best[1]
        near = [] if best is None else list(depths(self.request, best))
        for chunks, stages in near:
            if (chunks, stages) not in self._depths:
                self._depths[chunks, stages] = Subspace(
                    price=partial(self._interleaved, self.sets[0], chunks, stages),
                    time_plans=self._time_interleaved,
                    floor_s=self.by_set[0].floor_s,
                    planners=list(_OF_FEW_SHAPES),
                    slice_s=_PLANNER_S,
                )
                self.others.append(self._depths[chunks, stages])
        order = list(dict.fromkeys(stages for _, stages in near))
        for (_, stages), subspace in self._depths.items():
            place = order.index(stages) if stages in order else len(order)
            subspace.weight = _WEIGHT ** (place + 1)
            if subspace in self._joined:
                self._joined[subspace].weight = subspace.weight

    def _loosest_interleaved(self, use: tuple[int, ...]) -> Problem:
        """Return the problem whose bound holds for interleaved pipelines of any number of chunks."""
        request = self.request
        priced = {
            chunks: price_stages(
                request, use, every=True, chunks=chunks, by_domain=True, copies_at=FEW_COPIES
            )
            for chunks in chunk_counts(request)
        }
        return capped(loosest(priced), request.max_devices)

    def _interleaved(self, use: tuple[int, ...], chunks: int, stages: int) -> Problem:
        """Return the problem of interleaved pipelines of so many stages or fewer, at usual prices."""
        priced = price_stages(
            self.request,
            use,
            every=True,
            chunks=chunks,
            stages=stages,
            apart=True,
            shared=self._shared_prices.setdefault((use, chunks), {}),
        )
        return scaled(capped(priced, self.request.max_devices), chunks)

    def _time_plain(self, problem: Problem, arrangement: Arrangement) -> float:
        plan = plan_of(self.request, problem, arrangement)
        return np.inf if plan is None else self.found.take(plan)

    def _time_interleaved(self, problem: Problem, arrangement: Arrangement) -> float:
        plan = plan_in_chunks(self.request, problem, arrangement)
        if plan is None:
            return np.inf
        self.found.take(in_a_row(plan))  # which may be faster where micro-batches are few
        return self.found.take_interleaved(plan, self.budget)

    def _offer_published(self, names: Sequence[str], *, usual: bool = False, late: bool = False) -> None:
        """Time what planners with fixed orders of devices find: columns may miss what hardly fits.

        `late`: beside a plan too they may take the time that a search without one has.
        """
        if self.found.timed and self.budget.is_over and not late:
            return
        use = self.sets[0]
        problem = self._usual(use) if usual else capped(self.found.problem(use), self.request.max_devices)
        for name in names:
            waits = late and name == names[0]
            budget = self.budget if self.found.timed and not waits else TimeBudget(self.whole.last_at)
            if budget.is_over:
                return
            best = BASELINES[name].best(problem, budget)
            offered = [arrangement for _, arrangement in best.by_number.values()]
            least_s = {one: step_seconds(problem, one, filling="least") for one in offered}
            for place, arrangement in enumerate(sorted(offered, key=least_s.__getitem__)[:_PUBLISHED]):
                if place and self.found.timed and self.budget.is_over:
                    return
                plan = plan_of(self.request, problem, arrangement)
                if plan is not None and not faults(problem, arrangement):
                    self.found.take(plan)

    def _set_bound_s(self, subspace: Subspace) -> float:
        """Return a step time that no 1f1b plan on a set of node groups beats."""
        problem, most = subspace.problem, self.request.max_devices
        if problem is not None and most is not None and sum(problem.counts) >= most:
            return work_bound(problem)  # fewer devices than there are can be chosen in other ways
        return subspace.bound_s

    @property
    def _plain_bound_s(self) -> float:
        """Return a step time that no 1f1b plan beats."""
        return min(self._set_bound_s(subspace) for subspace in self.by_set)

    @property
    def _interleaved_bound_s(self) -> float:
        """Return a step time that no plan beats whose pipelines of several stages are all interleaved."""
        if not self.interleaved_bounds:
            return min(subspace.floor_s() for subspace in self.by_set)
        return min(subspace.bound_s for subspace in self.interleaved_bounds)

    def result(self) -> PlanResult:
        """Return plans in order, predicted by the engine asked for, and the bound."""
        request, found = self.request, self.found
        predictions = self._predictions()
        plans, error = request.ranked(predictions)
        evaluated = sum(s.evaluated for s in self._subspaces) + len(found.timed)
        pruned = sum(s.search is None for s in self.by_set)
        pruned += sum(s.search.excluded for s in self.by_set if s.search)
        pruned += sum(one.result.pruned for one in self.even if one.result)
        open_ = any(one.promise_s(found.best_s) > 0.0 for one in self.by_set)
        open_ |= any(one.promise_s(found.best_s) > 0.0 for one in self.even)
        open_ |= any(subspace.is_unproven(found.known_s) for subspace in self.by_set)
        open_ |= any(one.result.interrupted for one in self.even if one.result)
        interrupted = self.stopped or (bool(found.timed) and open_)
        if not plans:
            return PlanResult(
                plans=(),
                lower_bound_step_time_s=0.0,
                evaluated=evaluated,
                pruned=pruned,
                wall_s=request.budget_s - self.whole.left_s,
                space=SPACE,
                interrupted=interrupted,
                stopped=self.stopped,
                infeasible=self._none(),
                notes=tuple(self.notes),
            )
        even_s = min(one.bound_s for one in self.even)
        bound = min(self._plain_bound_s, even_s)
        chosen = plans[0].plan
        if len(self.even) == 1 and len(chosen.ranks) < request.cluster.num_devices:
            whole = request.cluster.num_devices
            self.notes.append(f"{len(chosen.ranks)} of {whole} devices are used and paid for")
        if request.objectives[0] == "time" and not request.limits:
            step_s = plans[0].prediction.step_time_s
            left = TimeBudget.of(max(self.whole.left_s, _EXPLAINING_S))
            self.notes += idle_devices(request, chosen, step_s, found.timed, left)
        if by_work := self._bounded_by_work():
            kinds, above = " and on ".join(by_work), f"{ABOVE_WORK:.0%}".replace("%", " %")
            self.notes.append(f"The bound on {kinds} is at most {above} above that from work alone")
        if not interrupted and (why := self._why_a_gap(plans[0].prediction.step_time_s)):
            self.notes.append(why)
        first = self.by_set[0].search
        return PlanResult(
            plans=plans,
            lower_bound_step_time_s=min(bound, found.known_s),
            evaluated=evaluated,
            pruned=pruned,
            wall_s=request.budget_s - self.whole.left_s,
            space=self._space,
            ladder={
                name: min(float(value), even_s) for name, value in (first.ladder if first else {}).items()
            }
            | {"configuration": float(bound)},
            interrupted=interrupted,
            stopped=self.stopped,
            infeasible=error,
            notes=tuple(self.notes),
            front=front_of(predictions, request.limits),
            objective=request.objectives[0],
            wider=self._wider([one.plan for one in plans]),
        )

    def _why_a_gap(self, step_s: float) -> str:
        """Return why a gap is left by a search that has nothing left to do, empty where it is small."""
        parts = [*self.by_set, *(self.interleaved_bounds if self.found.is_interleaved else ())]
        lowest = min(parts, key=lambda one: one.bound_s)
        if self.by_price or step_s <= lowest.bound_s * (1.0 + _NEAR):
            return ""
        if lowest.bound_s * (1.0 + _NEAR) < lowest.ideal_s:
            return (
                "More seconds would not close the gap: pipelines that may take as little as the bound are too"
                " many to exclude"
            )
        return (
            "More seconds would not close the gap: where every link, every neighbour and every other pipeline"
            f" is at its best, as the bound takes them, pipelines take {lowest.ideal_s:.3g} s; no plan was"
            " found that comes nearer on the devices there are"
        )

    def _bounded_by_work(self) -> list[str]:
        """Return the kinds of plans of which a bound from work alone holds that of the answer down."""
        if self.request.objectives[0] != "time" or self.request.max_devices is not None:
            return []
        kinds = {"1f1b plans": self.by_set}
        if self.found.is_interleaved:
            kinds["interleaved plans"] = self.interleaved_bounds or self.by_set
        lowest = {kind: min(some, key=lambda one: one.bound_s) for kind, some in kinds.items()}
        near_s = self.found.best_s / (1.0 + _NEAR)
        return [kind for kind, one in lowest.items() if one.bound_s < near_s and not one.is_bounded]

    @property
    def _space(self) -> str:
        """Return which plans the bound speaks of."""
        if len(self.even) == 1 and self.even[0].result is not None:
            return f"{self.even[0].result.space}; or {SPACE}"
        return f"{SPACE}; or, on all or fewer nodes of one kind, {EVEN}"

    def _none(self) -> InfeasibleError:
        """Return why there is no plan: nothing fits, or nothing was found though something may fit."""
        complete = all(one.result is not None and not one.result.interrupted for one in self.even)
        if complete and not np.isfinite(self._plain_bound_s):
            return nothing_fits(self.request, self.sets, self.whole)
        return InfeasibleError(
            "no plan was found; one may exist, or lie outside the space that is searched",
            key="--budget-s",
            value=self.request.budget_s,
            rule=f"Searched were {SPACE}",
            fix="Allow more seconds, or try degrees of your own with foreshard predict",
        )

    def _predictions(self) -> list[Prediction]:
        """Return predictions of the best plan of each family, the best on each number of devices among them.

        Late, the fastest alone; where time is not to be small, as many as are shown, those that take least.
        """
        request = self.request
        families: dict[Hashable, tuple[float, Plan]] = {}
        best_first = sorted(self.found.timed, key=lambda timed: timed[0])
        for timed in best_first:
            families.setdefault((len(timed[1].ranks), family_of(timed[1])), timed)
        order = (best_first[: request.top] if request.chooses_later else []) + list(families.values())
        taking = sorted(best_first, key=lambda timed: resources(request, timed[1], timed[0]))
        first: dict[int, Plan] = {}
        for _, plan in taking:
            first.setdefault(len(plan.ranks), plan)
        fastest, others = [plan for _, plan in order[: request.top]], order[request.top : 4 * request.top]
        by_time = request.objectives[0] == "time"
        least_taking = [plan for _, plan in taking[: request.top]]
        wanted = [*fastest, *first.values()] if by_time else [*least_taking, *first.values(), *fastest]
        wanted += [plan for _, plan in others]
        least = 1 if by_time and not request.chooses_later else request.top
        made: list[Prediction] = []
        seen: list[Plan] = []
        for plan in wanted:
            late = len(made) >= least and self.budget.is_over
            late |= len(made) >= SHOWN and self.whole.left_s <= _SHOWING * self.request.budget_s
            if plan in seen or late:
                continue
            seen.append(plan)
            made.append(predicted(request, plan))
            if len(made) >= 2 * request.top + len(first):
                break
        return made

    def _wider(self, plans: Sequence[Plan]) -> tuple[WiderSpace, ...]:
        """Return what the bound leaves out of some plans, those of the grid apart, and bounds on such."""
        unequal = [plan for plan in plans if plan not in self.found.even]
        in_chunks = frozenset(plan.groups for plan in unequal if is_interleaved(plan))
        beside = frozenset(plan.groups for plan in unequal if not are_apart(self.request.cluster, plan))
        short = frozenset(plan.groups for plan in unequal if not are_short_alike(plan))
        plain_s, interleaved_s = self._plain_bound_s, self._interleaved_bound_s
        even_s = min(one.bound_s for one in self.even)
        work_s = min(subspace.floor_s() for subspace in self.by_set)
        spaces = (
            WiderSpace(
                found=in_chunks,
                words=INTERLEAVED,
                lower_bound_step_time_s=interleaved_s,
                note=f"The chosen plan is interleaved: no 1f1b plan takes less than {plain_s:.3g} s, no plan"
                f" of equal pipelines cut as evenly as they go less than {even_s:.3g} s, and none interleaved"
                f" throughout, with 2 or 4 chunks, less than {interleaved_s:.3g} s",
            ),
            WiderSpace(
                found=beside,
                words=BESIDE,
                lower_bound_step_time_s=work_s,
                note="In the chosen plan pipelines hold the same layers side by side in a link domain, or on"
                f" over twice the ranks of others: of such plans none takes less than {work_s:.3g} s of work",
            ),
            WiderSpace(
                found=short,
                words=SHORT,
                lower_bound_step_time_s=work_s,
                note="In the chosen plan stages split a short last micro-batch over different numbers of"
                f" ranks: of such plans none takes less than {work_s:.3g} s of work",
            ),
        )
        return tuple(one for one in spaces if one.found)


def _notes(request: PlanRequest) -> list[str]:
    """Return what is left out before any search, and why."""
    nodes, notes = request.cluster.nodes, []
    unable = [g.device.name for g in nodes if not g.device.supports(request.precision)]
    if unable:
        names = ", ".join(dict.fromkeys(unable))
        notes.append(f"{names}: no {request.precision} in hardware, left idle; --dtype fp16 may use them")
    vendors = sorted({g.device.vendor for g in nodes if g.device.supports(request.precision)})
    if len(vendors) > 1:
        notes.append(f"No collective joins devices of {' and '.join(vendors)}: each vendor was planned alone")
    return notes
