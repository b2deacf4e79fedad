"""The fastest plan for a cluster of Sailor's: by foreshard's solver, judged by the restated formula."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import judge
import numpy as np
from clusters import ALL_BYTES, Band, bands_of, groups_of, problem_of, slowest_kind
from judge import Group

from foreshard.planner.solver.problem import Template, template_faults
from foreshard.planner.solver.solve import solve

_NARROWEST = 1.01
"""Bands whose limits are closer than this are not split."""
_TYPICAL = 64
"""Devices over which a device comes to reduce all gradients, in good plans."""
_FIRST_PASS, _SPLIT = 0.3, 0.03
"""Parts of the time for the first pass over all bands and for each half of a split one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan, its seconds a step by the judge, the bound on every plan, and how long it took.

    alike, alike_s : the best plan found whose replicas cut the layers alike, as Sailor's code asks
    """

    groups: tuple[Group, ...]
    step_time_s: float
    alike: tuple[Group, ...]
    alike_s: float
    lower_bound_s: float
    search_s: float
    pipelines_priced: int

    @property
    def gap(self) -> float:
        """Return how much longer the step is than the bound, as a fraction of the bound."""
        return self.step_time_s / self.lower_bound_s - 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Bounded:
    """Plans whose longest reducing device reduces so many bytes, and a bound on their step.

    hope_s : the best step the solver found, which the judge may find slower
    """

    band: Band
    bound_s: float
    hope_s: float
    columns: tuple[Template, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Search:
    """The best plans so far by the judge: of all, and of those whose replicas cut the layers alike."""

    counts: tuple[int, ...]
    groups: tuple[Group, ...] = ()
    step_time_s: float = np.inf
    alike: tuple[Group, ...] = ()
    alike_s: float = np.inf
    priced: int = 0

    def solve(self, band: Band, columns: Sequence[Template], budget_s: float) -> _Bounded:
        """Solve one band, keep the best plan by the judge, and return the band with its bound."""
        problem = problem_of(self.counts, band)
        usable = [one for one in columns if not template_faults(problem, one)]
        solution = solve(
            problem,
            budget_s=budget_s,
            target_gap=1e-3,
            beat_s=self.step_time_s,
            columns=usable,
            filling="full",  # as the judge counts it
        )
        self.priced += solution.evaluated
        for arrangement in solution.others:
            self.offer(groups_of(problem, arrangement))
        empty = solution.arrangement is None and not solution.columns
        return _Bounded(
            band=band,
            bound_s=np.inf if empty else solution.lower_bound_s,
            hope_s=solution.step_time_s,
            columns=solution.columns,
        )

    def offer(self, groups: tuple[Group, ...]) -> None:
        """Keep a plan if the judge finds it faster."""
        seconds = judge.iteration_seconds(groups)
        if seconds >= self.alike_s or not judge.fits(groups):
            return
        if seconds < self.step_time_s:
            self.groups, self.step_time_s = groups, seconds
        if len({tuple(s.start for s in group.replicas[0]) for group in groups}) == 1:
            self.alike, self.alike_s = groups, seconds


def find(counts: tuple[int, ...], budget_s: float = 8.0) -> Found:
    """Search the bands of a cluster, then split those that promise most, until time is up.

    In turn the band with the lowest bound is split, so that the bound rises, and the one with the best plan
    by the solver, so that the solver comes to see plans as the judge does.

    Parameters
    ----------
    counts : tuple of int
        Devices by kind.
    budget_s : float
        Seconds for everything.
    """
    began = time.perf_counter()
    search = _Search(counts=counts)
    slices = sorted(bands_of(counts), key=lambda band: _unlikely(band, counts))
    bands: list[_Bounded] = []
    for band in slices:
        left = _FIRST_PASS * budget_s - (time.perf_counter() - began)
        bands.append(search.solve(band, (), max(0.0, left) / (len(slices) - len(bands))))
    longest, turn = 0.0, 0
    while chosen := _next(bands, slices[0].gpu, search.step_time_s, turn):
        now = time.perf_counter()
        if now - began + longest > budget_s:
            break
        bands.remove(chosen)
        for band in chosen.band.split():
            part = search.solve(band, chosen.columns, _SPLIT * budget_s)
            part.bound_s = max(part.bound_s, chosen.bound_s)
            bands.append(part)
        longest, turn = max(longest, time.perf_counter() - now), turn + 1
    return Found(
        groups=search.groups,
        step_time_s=search.step_time_s,
        alike=search.alike,
        alike_s=search.alike_s,
        lower_bound_s=min(search.step_time_s, *(band.bound_s for band in bands)),
        search_s=time.perf_counter() - began,
        pipelines_priced=search.priced,
    )


def _unlikely(band: Band, counts: tuple[int, ...]) -> tuple[bool, float]:
    """Return a key by which bands that may hold good plans come first; the order is no part of any bound."""
    typical = ALL_BYTES * min(0.7, _TYPICAL / sum(counts))
    return band.gpu != slowest_kind(counts), abs(math.log((band.least * band.most) ** 0.5 / typical))


def _next(bands: list[_Bounded], gpu: str, best_s: float, turn: int) -> _Bounded | None:
    """Return the band to split next, None when no split can matter."""
    wide = [one for one in bands if one.bound_s < best_s and one.band.most > _NARROWEST * one.band.least]
    hopeful = [one for one in wide if one.band.gpu == gpu and one.hope_s < best_s]
    if hopeful and turn % 2:
        return min(hopeful, key=lambda one: one.hope_s)
    return min(wide, key=lambda one: one.bound_s, default=None)
