"""The best arrangement of pipelines and a bound on every other, from a problem with priced stages.

For every number of pipelines the configuration program (`configuration`) bounds the step and names pipelines;
whole numbers of those and exact shares make the plan. What is not proven by then is stated as a gap.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreshard.planner.configuration import columns_of, fractional_mix, samples_of, whole_mix
from foreshard.planner.enumeration import all_templates, best_of_all, undominated
from foreshard.planner.pricing import Pricing, Stages, cheapest_path
from foreshard.planner.problem import (
    Arrangement,
    Family,
    Problem,
    Template,
    pace_of,
    spread_factor,
    stage_seconds,
    step_seconds,
    tail_seconds,
    takes_of,
)
from foreshard.planner.shares import balance

_ROUNDS = 25
_STRETCH = (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.25, 0.4, 0.7, 1.2)
_KEPT = 96
_ALIKE = 3
_UNMIXED = 4
_CLOSER = 4
_CLOSE = 1.002
_MIXED = 96
_MIX_S = 0.2
_TOLERANCES = (5e-3, 1e-3, 2e-4)
_VARIED = 0.12
_VARIANTS = 24
_FEW_DEVICES = 10
_FEW_LAYERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An arrangement, how long its step takes, and how long any step must take.

    Attributes
    ----------
    arrangement : Arrangement or None
        None when no pipeline fits.
    step_time_s, lower_bound_s : float
    ladder : dict of str to float
        Bounds from the simplest to the tightest, seconds.
    others : tuple of Arrangement
        Good ones of other make, best first.
    columns : tuple of Template
        What the search generated; a later search may start from them.
    evaluated : int
        Pipelines priced as columns or as shortest paths.
    bounds : dict of (fewest, most) pipelines to float
        What is proven of steps with so many, spread apart; a later search may go on from there.
    """

    arrangement: Arrangement | None
    step_time_s: float
    lower_bound_s: float
    ladder: dict[str, float]
    others: tuple[Arrangement, ...]
    columns: tuple[Template, ...]
    evaluated: int
    excluded: int
    interrupted: bool
    bounds: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Return how much longer the step is than the bound, as a fraction of the bound."""
        return self.step_time_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else np.inf


@dataclass(slots=True, kw_only=True)
class _Search:
    """What is known so far: the best arrangement, the columns, and a bound for each number of pipelines."""

    problem: Problem
    deadline: float
    target_gap: float
    best: Arrangement | None = None
    best_s: float = np.inf
    beat_s: float = np.inf
    made: dict[Arrangement, float] = field(default_factory=dict)
    columns: dict[Template, None] = field(default_factory=dict)
    prices: np.ndarray | None = None
    stages: dict[tuple[int, int], dict[Family, Stages]] = field(default_factory=dict)
    evaluated: int = 0
    interrupted: bool = False

    @property
    def longest_s(self) -> float:
        """Return a time that no stage of a plan worth looking at takes."""
        usable = np.isfinite(self.problem.time_s) & (self.problem.max_in_flight > 0)
        return min(self.best_s, float(self.problem.far_s[usable].max()) if usable.any() else np.inf)

    @property
    def aim_s(self) -> float:
        """Return the time, spread apart, below which a range of pipelines is worth working out."""
        return min(self.best_s, self.beat_s) / _factor(self) / (1.0 + self.target_gap)

    def pricing(self, pipelines: tuple[int, int], prices: np.ndarray) -> Pricing:
        """Return pipelines at some prices, for a number of them in a range."""
        return Pricing(
            problem=self.problem, pipelines=pipelines, prices=prices, longest_s=self.longest_s,
            stages=self.stages.setdefault(pipelines, {}),
        )  # fmt: skip

    def near(self, bound_s: float) -> bool:
        """Return whether no more than the wanted gap can lie between a bound and the best arrangement."""
        return bound_s * (1.0 + 1e-9) >= self.aim_s

    @property
    def late(self) -> bool:
        """Return whether the time is up."""
        return time.perf_counter() >= self.deadline

    def offer(self, templates: Sequence[Template]) -> None:
        """Balance shares over some pipelines and keep the arrangement if it is good."""
        if not templates:
            return
        copies = len(templates)
        tails = [tail_seconds(self.problem, one, copies) for one in templates]
        shares = balance([pace_of(self.problem, one) for one in templates], tails, self.problem.global_batch)
        if shares is None:
            return
        made = Arrangement(templates=tuple(templates), shares=shares)
        seconds = step_seconds(self.problem, made)
        self.made[made] = seconds
        if seconds < self.best_s:
            self.best, self.best_s = made, seconds


def solve(
    problem: Problem,
    *,
    budget_s: float = 10.0,
    target_gap: float = 0.01,
    start: Arrangement | None = None,
    columns: Sequence[Template] = (),
    beat_s: float = np.inf,
    bounds: Mapping[tuple[int, int], float] | None = None,
) -> Solution:
    """Return the best arrangement found and a bound that no arrangement beats.

    Parameters
    ----------
    problem : Problem
    budget_s : float
        Seconds to search; an interrupt from the keyboard ends it sooner.
    target_gap : float
        Proven gap at which to stop.
    start : Arrangement, optional
        A running one to begin with.
    columns : sequence of Template
        Pipelines to begin with, such as those of an earlier solution.
    beat_s : float
        A step time known from elsewhere: what cannot beat it is not worked out.
    bounds : mapping, optional
        Of an earlier solution of the same problem.
    """
    search = _Search(
        beat_s=beat_s, problem=problem, deadline=time.perf_counter() + budget_s, target_gap=target_gap
    )
    ranges = _ranges(search)
    bounds = dict(bounds or {})
    ladder = {"compute": 0.0, "sync": 0.0}
    if not ranges:
        return _nothing(search)
    try:
        ladder = _simple_bounds(search)
        small = all_templates(problem) if _is_small(problem) else None
        if small is not None:
            return _solve_small(search, small, ranges, ladder)
        _seed(search, start, columns)
        _bound_ranges(search, ranges, ladder["compute"], bounds)
        _vary(search, bounds)
    except KeyboardInterrupt:
        search.interrupted = True
    lower = max(min(bounds.values(), default=0.0) * _factor(search), ladder["compute"])
    if search.best is None and not np.isfinite(lower):
        lower = 0.0
    ladder["configuration"] = min(lower, search.best_s)
    others = sorted(search.made, key=search.made.__getitem__)[:_KEPT]
    return Solution(
        arrangement=search.best,
        step_time_s=search.best_s,
        lower_bound_s=min(lower, search.best_s),
        ladder=ladder,
        others=tuple(others),
        columns=tuple(search.columns),
        evaluated=search.evaluated,
        excluded=0,
        interrupted=search.interrupted or (search.late and search.best is not None),
        bounds=bounds,
    )


def _bound_ranges(
    search: _Search, ranges: list[tuple[int, int]], compute_s: float, bounds: dict[tuple[int, int], float]
) -> None:
    """Work out the range of pipelines that holds the bound down, again and again, in halves where it is wide.

    A range of several rows of tails is bounded with the least of them, so that every number of pipelines has a
    bound at any time.
    """
    whole = [ranges[:1], ranges[1:]] if len(ranges) > 1 else [ranges]
    rows = {(some[0][0], some[-1][1]): some for some in whole}
    if bounds:
        rows = {one: [row for row in ranges if one[0] <= row[0] <= one[1]] for one in bounds}
    for one in rows:
        bounds[one] = max(bounds.get(one, 0.0), compute_s + _least_tail(search.problem, one))
    fineness = dict.fromkeys(bounds, 0)
    pending = set(bounds)
    if not search.columns:
        _first_columns(search, compute_s)
    while pending and not (search.late and search.best is not None):
        # The widest range first: most plans are of several pipelines.
        one = min(pending, key=bounds.__getitem__) if search.best is not None else max(pending)
        if search.near(bounds[one]):
            break
        found = _search_range(search, one, bounds[one], _TOLERANCES[fineness[one]])
        bounds[one] = max(bounds[one], found)
        some = rows[one]
        if search.near(bounds[one]):
            pending.remove(one)
        elif len(some) > 1:
            pending.remove(one)
            for half in (some[: len(some) // 2], some[len(some) // 2 :]):
                part = half[0][0], half[-1][1]
                rows[part], bounds[part], fineness[part] = half, bounds[one], 0
                pending.add(part)
            del bounds[one]
        elif fineness[one] + 1 < len(_TOLERANCES):
            fineness[one] += 1
        else:
            pending.remove(one)


def _vary(search: _Search, bounds: dict[tuple[int, int], float]) -> None:
    """Look for better whole numbers with the time left: among pipelines that other prices of devices call for."""
    if search.best is None or not bounds:
        return
    rng, ranges = np.random.default_rng(0), sorted(bounds, key=bounds.__getitem__)
    for i in range(_VARIANTS):
        if search.late or search.near(min(bounds.values())):
            return
        size = len(search.best.templates)
        own = [one for one in ranges if one[0] <= size <= one[1]]
        pipelines = (own or ranges)[0] if i % 2 == 0 else ranges[i // 2 % len(ranges)]
        mix = _priced(search, pipelines, bounds[pipelines])
        if mix is None:
            continue
        prices = mix[1] * np.exp(rng.normal(0.0, _VARIED, len(mix[1])))
        pricing = search.pricing(pipelines, prices)
        pricing.start()
        goal = _goal(search.problem, prices, pipelines)
        _, good = pricing.earliest(
            goal, known_s=np.inf, aim_s=np.inf, tolerance=_TOLERANCES[0], deadline=search.deadline
        )
        search.evaluated += pricing.solved
        before = len(search.columns)
        search.columns.update(dict.fromkeys(_varied(search.problem, good)))
        if len(search.columns) > before:
            _whole(search, pipelines, bounds[pipelines])


def _is_small(problem: Problem) -> bool:
    return sum(problem.counts) <= _FEW_DEVICES and problem.num_layers <= _FEW_LAYERS


def _solve_small(
    search: _Search, templates: list[Template], ranges: list[tuple[int, int]], ladder: dict[str, float]
) -> Solution:
    """Return the best of all arrangements, every pipeline being listed."""
    problem = search.problem
    kept = undominated(problem, templates)
    best = best_of_all(problem, kept, ranges) if kept else None
    if best is None:
        return _nothing(search)
    search.offer(best.templates)
    return Solution(
        arrangement=search.best,
        step_time_s=search.best_s,
        lower_bound_s=search.best_s,
        ladder=ladder | {"configuration": search.best_s},
        others=tuple(search.made),
        columns=tuple(kept),
        evaluated=len(kept),
        excluded=len(templates) - len(kept),
        interrupted=False,
    )


def _nothing(search: _Search) -> Solution:
    """Return that no pipeline fits."""
    return Solution(
        arrangement=None,
        step_time_s=np.inf,
        lower_bound_s=np.inf,
        ladder={},
        others=(),
        columns=(),
        evaluated=search.evaluated,
        excluded=0,
        interrupted=False,
    )


def _ranges(search: _Search) -> list[tuple[int, int]]:
    """Return (fewest, most) pipelines of each stretch of numbers with the same tails, as far as devices go."""
    problem = search.problem
    most = min(_most_pipelines(search), problem.global_batch)
    first = [copies for copies in problem.copies if copies <= most]
    if not first:
        return []
    return [(low, high - 1) for low, high in zip(first, [*first[1:], most + 1], strict=True)]


def _most_pipelines(search: _Search) -> int:
    """Return how many pipelines the devices can hold at most, and keep the columns that show it.

    A linear program over the pipelines of fewest devices; priced with its own duals, no other pipeline may be
    cheaper than one.
    """
    problem = search.problem
    counts, weights = np.array(problem.counts, dtype=float), np.ones(len(problem.counts))
    bound = float(sum(problem.counts))
    for _ in range(_ROUNDS):
        least, found = _fewest(problem, weights)
        search.evaluated += 1
        if found is None:
            return 0
        bound = min(bound, float(weights @ counts) / least)
        search.columns[found] = None
        takes = columns_of(problem, list(search.columns))
        mix = fractional_mix(takes, np.ones(takes.shape[1]), problem.counts, (0, sum(problem.counts)))
        if mix is None or mix.samples >= bound - 1e-6:
            break
        # Devices that are not scarce still count a little, so that the path has something to save.
        weights = mix.device_prices + 1e-9
    return int(bound + 1e-6)


def _fewest(problem: Problem, weights: np.ndarray) -> tuple[float, Template | None]:
    """Return the least weight of devices of any pipeline, and that pipeline."""
    none = np.zeros_like(problem.time_s)
    best, template = np.inf, None
    for size in np.unique(problem.micro_batch):
        # A second of filling counts next to nothing beside a device.
        found = cheapest_path(problem, none, weights, int(size), (1e12 * float(size), 1e12), np.inf)
        if found is not None and found[0] < best:
            best, template = found
    return best, template


def _least_tail(problem: Problem, pipelines: tuple[int, int]) -> float:
    tail = problem.tail_between(pipelines)
    usable = np.isfinite(problem.time_s) & (problem.max_in_flight > 0)
    return float(tail[usable].min()) if usable.any() else 0.0


def _factor(search: _Search) -> float:
    """Return the spread factor of a quarter of the devices: fewer could not be as fast as the best found."""
    devices = sum(search.problem.counts)
    if search.problem.jitter == 0.0:
        return 1.0
    best = min(search.best_s, search.beat_s)
    share = devices / 4.0
    while share > 1.0 and _fluid_s(search, share) < best:
        share /= 2.0
    return spread_factor(search.problem, share)


def _fluid_s(search: _Search, devices: float) -> float:
    """Return a time that no plan on at most so many devices beats, whatever its pipelines."""
    problem = search.problem
    prices = search.prices
    if prices is None or prices.max() <= 0:
        return 0.0
    work = _least_work(problem, prices)
    worth, left = 0.0, devices
    for kind in np.argsort(-prices):
        used = min(left, problem.counts[kind])
        worth += used * prices[kind]
        left -= used
    return problem.global_batch * work / worth if worth > 0 else 0.0


def _least_work(problem: Problem, prices: np.ndarray, options: np.ndarray | None = None) -> float:
    """Return the least priced device-seconds a sample needs on its way through any pipeline of some options."""
    some = np.arange(len(problem.takes)) if options is None else options
    times = problem.time_s[some]
    usable = np.isfinite(times) & (problem.max_in_flight[some] > 0)
    worth = (problem.takes[some] @ prices / problem.micro_batch[some])[:, None]
    cost = np.where(usable, worth * np.where(usable, times, 0.0), np.inf)
    least = np.append(cost.min(0), np.inf)[problem.types]
    after = np.full(problem.num_layers + 1, np.inf)
    after[problem.num_layers] = 0.0
    for start in range(problem.num_layers - 1, -1, -1):
        after[start] = (least[start] + after).min()
    return float(after[0])


def _simple_bounds(search: _Search) -> dict[str, float]:
    """Return the bounds that know no pipelines: computation alone, and with the least tail."""
    problem = search.problem
    rates = np.array([_rate(problem, kind) for kind in range(len(problem.counts))])
    search.prices = np.where(rates > 0, rates, rates.max() * 1e-3)
    compute = _fluid_s(search, float(sum(problem.counts)))
    return {"compute": compute, "sync": compute + _least_tail(problem, (1, sum(problem.counts)))}


def _rate(problem: Problem, kind: int) -> float:
    """Return the samples a second and device of one kind alone; 0 when it cannot run every layer."""
    own = np.flatnonzero((problem.takes.sum(1) == problem.takes[:, kind]) & (problem.takes[:, kind] > 0))
    if not len(own):
        return 0.0
    prices = np.zeros(len(problem.counts))
    prices[kind] = 1.0
    work = _least_work(problem, prices, own)
    return 1.0 / work if np.isfinite(work) and work > 0 else 0.0


def _seed(search: _Search, start: Arrangement | None, columns: Sequence[Template]) -> None:
    search.columns.update(dict.fromkeys(columns))
    if start is not None:
        search.columns.update(dict.fromkeys(start.templates))
        search.offer(start.templates)


def _first_columns(search: _Search, compute_s: float) -> None:
    """Generate pipelines at the prices that computation alone gives devices."""
    problem = search.problem
    copies = problem.copies[len(problem.copies) // 3]
    prices = search.prices * compute_s
    pricing = search.pricing((copies, copies), prices)
    pricing.start()
    for box in pricing.boxes.values():
        search.columns[box.template] = None
    goal = _goal(problem, prices, (copies, copies))
    _, good = pricing.earliest(goal, known_s=np.inf, aim_s=np.inf, tolerance=0.05, deadline=search.deadline)
    search.evaluated += pricing.solved
    search.columns.update(dict.fromkeys(_varied(problem, good)))


def _varied(problem: Problem, templates: Sequence[Template]) -> list[Template]:
    """Return the first few pipelines of each demand for devices, best first."""
    seen: dict[tuple[int, ...], int] = {}
    kept = []
    for one in templates:
        key = (*takes_of(problem, one).tolist(), int(problem.micro_batch[one[0].option]))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= _ALIKE and len(kept) < _KEPT:
            kept.append(one)
    return kept


def _search_range(search: _Search, pipelines: tuple[int, int], floor: float, tolerance: float) -> float:
    """Return a bound on steps with a number of pipelines in a range, and offer the best of them on the way.

    Prices come from the time in which the columns so far get through the batch, which falls as columns come; the
    bound rises to meet it.
    """
    problem = search.problem
    bound, mix = floor, _priced(search, pipelines, floor)
    for round_ in range(_ROUNDS):
        reached, prices = mix or (np.inf, search.prices * max(bound, 1e-12) * 2.0**round_)
        pricing = search.pricing(pipelines, prices)
        pricing.start()
        if not pricing.boxes:
            return np.inf
        proven, better = pricing.earliest(
            _goal(problem, prices, pipelines),
            known_s=reached * (1.0 - 1e-4), aim_s=search.aim_s, tolerance=tolerance, deadline=search.deadline,
        )  # fmt: skip
        search.evaluated += pricing.solved
        bound = max(bound, proven)
        fresh = [one for one in _varied(problem, better) if one not in search.columns]
        search.columns.update(dict.fromkeys(fresh))
        if (
            search.near(bound)
            or (search.late and search.best is not None)
            or bound >= reached * (1.0 - 2.0 * tolerance)
        ):
            break
        before, mix = mix, _priced(search, pipelines, bound) if fresh or mix is None else mix
        if (not fresh and before is not None) or (mix is None and round_ >= _UNMIXED):
            break
    if not search.near(bound):
        _whole(search, pipelines, bound)
    return bound


def _goal(problem: Problem, prices: np.ndarray, pipelines: tuple[int, int]) -> float:
    """Return the samples less prices below which every pipeline must stay for the batch to be out of reach."""
    left = problem.global_batch - float(prices @ np.array(problem.counts))
    return left / (pipelines[1] if left > 0 else pipelines[0])


def _priced(search: _Search, pipelines: tuple[int, int], low: float) -> tuple[float, np.ndarray] | None:
    """Return the time in which the columns, mixed in fractions, get through the batch, and the prices then."""
    problem = search.problem
    templates = list(search.columns)
    takes = columns_of(problem, templates)
    times = [stage_seconds(problem, one) for one in templates]
    bottleneck, total = np.array([t.max() for t in times]), np.array([t.sum() for t in times])
    tails = np.array([tail_seconds(problem, one, pipelines[0]) for one in templates])
    size = np.array([float(problem.micro_batch[one[0].option]) for one in templates])
    seconds, high, prices = low, np.inf, None
    for _ in range(12):
        samples = size * np.maximum((seconds - tails - total) / bottleneck + 1.0, 0.0)
        mix = fractional_mix(takes, samples, problem.counts, pipelines)
        if mix is None:
            return None
        if mix.samples >= problem.global_batch:
            high, prices = seconds, mix.device_prices
            break
        gain = float((size / bottleneck * (samples > 0)) @ mix.counts)
        short = problem.global_batch - mix.samples
        seconds += max(short / gain if gain > 0 else seconds, 1e-4 * seconds)
        prices = mix.device_prices
    return min(high, seconds), prices


def _whole(search: _Search, pipelines: tuple[int, int], bound: float) -> None:
    """Offer whole numbers of the columns: for times from the bound on until some get through the batch.

    Then for times between what fractions need and the best so far, as long as that closes in.
    """
    problem = search.problem
    templates = [one for one in search.columns if np.all(takes_of(problem, one) <= np.array(problem.counts))]
    mix = _priced(search, pipelines, bound) if templates else None
    if mix is None:
        return
    low, prices = mix
    takes = columns_of(problem, templates)
    for stretch in _STRETCH:
        if np.isfinite(search.best_s) or search.interrupted:
            break
        _offer_whole(search, pipelines, templates, takes, low * (1.0 + stretch), prices)
    for _ in range(_CLOSER):
        high = search.best_s / _factor(search)
        if high <= low * _CLOSE or search.late:
            return
        middle = low + 0.6 * (high - low)
        if not _offer_whole(search, pipelines, templates, takes, middle, prices):
            low = middle


def _offer_whole(
    search: _Search,
    pipelines: tuple[int, int],
    templates: Sequence[Template],
    takes: np.ndarray,
    seconds: float,
    prices: np.ndarray,
) -> bool:
    """Offer whole numbers of some pipelines that get through most in so many seconds; return whether it is all."""
    problem = search.problem
    samples = samples_of(problem, templates, pipelines[0], seconds)
    # Those that are worth most beyond the devices they take, at what devices are worth to fractions.
    order = np.argsort(-(samples - prices @ takes), kind="stable")
    keep = order[samples[order] > 0][:_MIXED]
    if not len(keep):
        return False
    limit = min(_MIX_S, max(0.02, search.deadline - time.perf_counter()))
    chosen = whole_mix(takes[:, keep], samples[keep], problem.counts, pipelines, limit_s=limit)
    if chosen is None:
        return False
    before = search.best_s
    search.offer([templates[i] for i, n in zip(keep, chosen, strict=True) for _ in range(n)])
    return float(samples[keep] @ chosen) >= problem.global_batch and search.best_s < before
