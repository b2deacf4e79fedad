"""One slot's choice: who works with whom, in what order, on which layers, with how many samples.

All structures are compared where kinds of workers are few enough; else one is searched by tentative moves
from the running one, from those chosen lately and from a few built ones. Moves are of kinds, not of workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.control.budgets.objective import worth_of
from foreshard.control.budgets.queues import Curve
from foreshard.control.moves import move
from foreshard.control.search.cache import Groups
from foreshard.control.search.cached_structures import Weights
from foreshard.control.search.candidates import all_structures, built, neighbours, repaired
from foreshard.control.search.costs import slowest_link
from foreshard.control.search.pricing import evaluate, runs
from foreshard.control.search.shares import counted, whole_shares
from foreshard.control.search.state_cache import PipelineLayout, StateCache, StructureMemo, WorkerUnit
from foreshard.control.slots import Budget, Chain, Choice, State, Structure, workers_apart
from foreshard.errors import InfeasibleError

MAX_STAGES = 8
_STARTS = 2
_SMALL, _COLD_LOOKS, _WARM_LOOKS = 6, 2000, 12
_WARM_EFFORT, _NO_END = 50, 10**12
"""Tables of cuts that a warm search makes, but for the first structure: a bound on what a slot takes."""
_BETTER = 1.0 - 1e-12
_VISITS = 6
"""Slots of a state in which built structures are looked at, those in which all were count twice; later ones
only walk."""
_FINALISTS = 6


def solve_slot(
    chain: Chain,
    state: State,
    *,
    batch: int,
    micro_batch: int,
    time_weight: float,
    cost_weights: Mapping[str, float] | None = None,
    budgets: Sequence[Budget] = (),
    start: Structure | Choice | None = None,
    running: Structure | Choice | None = None,
    change_weight: float = 0.0,
    curve: Curve | None = None,
    memo: StructureMemo | None = None,
    max_stages: int = MAX_STAGES,
    most_looks: int | None = None,
) -> Choice:
    """Return the choice that minimises time_weight * seconds + sum of cost_weights * costs, `dp_over_mp`.

    Parameters
    ----------
    chain, state
    batch, micro_batch : int, samples
    time_weight : float
        Of a second; below 0 slow structures are preferred, but no group waits on purpose.
    cost_weights : mapping of budget name to weight
    budgets : sequence of Budget
    start : Structure or Choice, optional
        Where to search from, besides what is built.
    running : Structure or Choice, optional
        What is compared at no change; searched from as well.
    change_weight : float
        Of a second that a change from the running structure takes.
    curve : Curve, optional
        What is added that is not linear in time and costs.
    memo : StructureMemo, optional
        Makes later slots fast; belongs to one chain.
    max_stages : int
        Longest pipeline.
    most_looks : int, optional
        New structures to look at in this slot; a state that comes back is looked at further. Without it 2,000
        for up to six workers or where nothing runs yet, else 12.

    Raises
    ------
    InfeasibleError
        When no pipeline of the workers that are there holds the model.
    """
    memo = StructureMemo() if memo is None else memo
    landscape = memo.landscape(
        chain,
        state,
        batch=batch,
        micro_batch=micro_batch,
        max_stages=max_stages,
        apart=workers_apart(budgets),
    )
    weights = Weights.of(state, time_weight, cost_weights or {}, budgets)
    bound = running.structure if isinstance(running, Choice) else running
    begin = start.structure if isinstance(start, Choice) else start
    if most_looks is None:
        cold = (bound is None and begin is None) or chain.num_workers <= _SMALL
        most_looks = _COLD_LOOKS if cold else _WARM_LOOKS
    search = _Search(landscape, weights, bound, change_weight, most_looks, curve)
    search.run([one for one in (bound, begin) if one is not None])
    if not search.found:
        raise InfeasibleError(
            f"no pipeline of {len(landscape.alive)} workers holds the model",
            rule="A stage needs memory",
            fix="Allow longer pipelines, or add workers",
        )
    choice = search.final(cost_weights or {}, budgets)
    memo.chose(_groups(choice.structure))
    return choice


def _groups(structure: Structure) -> Groups:
    return tuple(sorted(tuple(sorted(group.workers)) for group in structure.groups))


def _whole(landscape: StateCache, layout: PipelineLayout, weights: Weights) -> np.ndarray:
    return whole_shares(
        layout.start_s,
        layout.rate_s,
        landscape.batch,
        landscape.micro_batch,
        time_weight=layout.time_weight(weights),
        sample_weight=layout.sample_weight(weights),
    ).shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Look:
    """A structure looked at and what it is worth with parts of samples allowed, the change to it included."""

    worth: float
    layout: PipelineLayout


class _Search:
    """Looks at structures until none is better, or as many as a slot has time for."""

    def __init__(
        self,
        landscape: StateCache,
        weights: Weights,
        running: Structure | None,
        change_weight: float,
        most_looks: int,
        curve: Curve | None,
    ):
        self.curve = curve if curve is not None and curve.budgets else None
        self.landscape, self.weights, self.library = landscape, weights, landscape.library
        self.running, self.change_weight, self.left = running, change_weight, most_looks
        self.until = landscape.memo.effort.done + (_WARM_EFFORT if most_looks == _WARM_LOOKS else _NO_END)
        self.found: dict[int, _Look] = {}
        self.level = self._level()

    def _level(self) -> int:
        """Return how dear messages are against time, as a power: what decides on cuts."""
        weights, landscape = self.weights, self.landscape
        time_weight = weights.time + float(weights.active.sum())
        if not landscape.egress or time_weight <= 0.0 or not weights.sent.any():
            return 0
        price = float(weights.sent.max()) * landscape.batch / landscape.micro_batch / time_weight
        return round(math.log(price, 16.0)) or 1

    def run(self, given: Sequence[Structure]) -> None:
        """Look at all structures, or walk from the best that are known."""
        for structure in given:
            self._look_as_is(structure)
            self.look(repaired(self.landscape, _groups(structure)))
        everything = all_structures(self.landscape)
        if everything is not None:
            for groups in everything:
                self.look(groups)
            self._ranked()
            return
        spare = self.left // 3
        for groups in self._promising() if self.landscape.visits < _VISITS else ():
            if self.left <= spare or self._spent():
                break
            self.look(repaired(self.landscape, groups))
        # Where there was no time for all, the state is worth another visit.
        self.landscape.visits += 1 if self._spent() else 2
        for at in self._ranked():
            self._walk(at)

    def _promising(self) -> list[Groups]:
        """Return structures chosen lately and built ones, the most promising first; not all of them fit."""
        known: dict[object, Groups] = {}
        there = set(self.landscape.alive)
        for groups in itertools.chain(self.landscape.memo.recent, built(self.landscape, self.weights)):
            alive = tuple(group for group in groups if there.issuperset(group))
            if alive:
                known.setdefault(self.landscape.signature(alive), alive)
        return sorted(known.values(), key=self._guess)

    def _guess(self, groups: Groups) -> float:
        """Return a rough worth: work over all speeds, the fill of equal stages, one ring."""
        land = self.landscape
        workers = [worker for group in groups for worker in group]
        if not land.state.available[workers].all():
            return math.inf
        at = np.array(workers)
        speed = float((land.state.speed[at] / land.chain.before_s[at, -1]).sum())
        depth, count = len(workers) / len(groups), len(groups)
        rounds = land.batch / land.micro_batch / count
        seconds = land.batch / speed * (1.0 + (depth - 1.0) / rounds)
        if count > 1:
            rate, _ = slowest_link(land.state, at)
            seconds += 2.0 * (count - 1) / count * float(land.chain.sync_bytes.sum()) / depth / rate
        return (self.weights.time + float(self.weights.active[at].sum())) * seconds

    def _ranked(self) -> list[int]:
        """Weigh the best of the library in full; return the best few."""
        worth = self.library.weighed(self.weights, self.landscape.state, self.curve)
        for at in np.argsort(worth, kind="stable")[:_FINALISTS].tolist():
            self._weigh(at)
        return sorted(self.found, key=lambda at: (self.found[at].worth, at))[:_STARTS]

    def _weigh(self, at: int) -> _Look:
        if at not in self.found:
            layout = self.library.layouts[at]
            split = layout.split(self.weights, self.landscape.batch)
            worth = split.worth
            if self.curve is not None:
                row = self.library.table(self.landscape.state, self.curve.budgets, slice(at, at + 1))
                worth += float(self.curve.extra(*row)[0])
            if self.running is not None and self.change_weight > 0.0:
                land = self.landscape
                moved = move(land.chain, land.state, self.running, layout.structure)
                worth += self.change_weight * moved.time_s
            self.found[at] = _Look(worth=worth, layout=layout)
            if (split.shares <= 0.0).any():
                used = zip(layout.structure.groups, split.shares, strict=True)
                less = tuple(group.workers for group, share in used if share > 0.0)
                fewer = self.look(less)
                if fewer is not None:
                    self._weigh(fewer)
        return self.found[at]

    def _look_as_is(self, structure: Structure) -> None:
        """Look at a structure with its own order and cuts, if it can run."""
        landscape = self.landscape
        workers = structure.workers
        if structure.reading != "dp_over_mp" or any(not landscape.state.available[w] for w in workers):
            return
        share = -(-landscape.batch // len(structure.groups))
        shares = [share] * len(structure.groups)
        if runs(landscape.chain, landscape.state, structure, shares, micro_batch=landscape.micro_batch):
            if structure not in self.library.known:
                layout = landscape.layout([landscape.unit_of(group) for group in structure.groups])
                self.library.known[structure] = self.library.add(layout)
            self._weigh(self.library.known[structure])  # type: ignore[arg-type]

    def look(self, groups: Groups) -> int | None:
        """Return the row of a structure in the library, None if it cannot run or there is no time to see."""
        if not groups:
            return None
        key = (self.landscape.signature(groups), self.level)
        if key not in self.library.known:
            if self.left <= 0 or (self.found and self._spent()):
                return None
            self.left -= 1
            self.library.known[key] = None
            if all(self.landscape.fits(group) for group in groups):
                self.library.known[key] = self._settle(groups)
        return self.library.known[key]

    def _spent(self) -> bool:
        """Return whether so many tables of cuts were made as a warm slot has time for."""
        return self.landscape.memo.effort.done >= self.until

    def _settle(self, groups: Groups) -> int:
        """Choose a point of the front for each group, for the micro-batches that it then gets."""
        landscape = self.landscape
        rates = np.array([1.0 / landscape.front_of(group, 0)[-1].slowest_s for group in groups])
        rounds = landscape.batch / landscape.micro_batch * rates / rates.sum()
        best: PipelineLayout | None = None
        best_worth = math.inf
        time_weight = self.weights.time + sum(float(self.weights.active[w]) for g in groups for w in g)
        for _ in range(3):
            units = [self._unit(g, float(n), time_weight) for g, n in zip(groups, rounds, strict=True)]
            layout = landscape.layout(units)
            if layout is best:
                break
            split = layout.split(self.weights, landscape.batch)
            if best is None or split.worth < best_worth:
                best, best_worth = layout, split.worth
            rounds = split.shares / landscape.micro_batch
        assert best is not None
        return self.library.add(best)

    def _unit(self, group: Sequence[int], rounds: float, time_weight: float) -> WorkerUnit:
        landscape = self.landscape
        level = self.level if len(group) > 1 else 0
        front = landscape.front_of(group, level)
        points = [
            (cut.batch_s(max(rounds, 1.0)) * max(time_weight, 1e-12), at) for at, cut in enumerate(front)
        ]
        if level:
            samples = max(rounds, 1.0) * landscape.micro_batch
            points = [
                (worth + samples * self._sent(landscape.unit(group, front[at])), at) for worth, at in points
            ]
        return landscape.unit(group, front[min(points)[1]])

    def _sent(self, unit: WorkerUnit) -> float:
        return float(self.weights.sent[list(unit.pipeline.workers)] @ unit.sent_usd)

    def _walk(self, at: int) -> None:
        """Move on while some tentative move is better; where all are known, the ranking has seen them."""
        while self.left > 0 and (at, self.level) not in self.landscape.explored:
            best = at
            groups = tuple(group.workers for group in self.library.layouts[at].structure.groups)
            for other in neighbours(self.landscape, groups):
                tried = self.look(other)
                if tried is not None and self._weigh(tried).worth < self.found[best].worth * _BETTER:
                    best = tried
                if self.left <= 0:
                    break
            else:
                self.landscape.explored.add((at, self.level))
            if best == at:
                return
            at = best

    def final(self, cost_weights: Mapping[str, float], budgets: Sequence[Budget]) -> Choice:
        """Return the best of the finalists in whole micro-batches."""
        landscape, weights = self.landscape, self.weights
        best: Choice | None = None
        best_worth = math.inf
        ranked = sorted(self.found.items(), key=lambda one: (one[1].worth, one[0]))
        for place, (_, look) in enumerate(ranked):
            if look.worth >= best_worth or (place >= _FINALISTS and best is not None):
                break
            choice = _chosen(landscape, look.layout, weights)
            worth = worth_of(choice, weights.time, cost_weights, budgets, self.curve)
            if self.running is not None and self.change_weight > 0.0:
                moved = move(landscape.chain, landscape.state, self.running, choice.structure).time_s
                worth += self.change_weight * moved
            if best is None or worth < best_worth:
                best, best_worth = choice, worth
        assert best is not None
        return best


def _chosen(landscape: StateCache, layout: PipelineLayout, weights: Weights) -> Choice:
    """Return a structure in whole micro-batches; where samples weigh nothing they are always the same."""
    free = layout.sample_weight(weights) is None and layout.time_weight(weights) > 0.0
    found = landscape.chosen.get(layout.structure) if free else None
    if found is None:
        shares = counted(_whole(landscape, layout, weights))
        found = _without_idle(
            evaluate(
                landscape.chain, landscape.state, layout.structure, shares, micro_batch=landscape.micro_batch
            )
        )
        if free:
            landscape.chosen[layout.structure] = found
    return found


def _without_idle(choice: Choice) -> Choice:
    """Return the choice without groups that got no sample."""
    if all(choice.shares):
        return choice
    kept = [(g, share) for g, share in zip(choice.structure.groups, choice.shares, strict=True) if share]
    structure = Structure(groups=tuple(group for group, _ in kept))
    shares = tuple(share for _, share in kept)
    return Choice(structure=structure, shares=shares, time_s=choice.time_s, costs=choice.costs)
