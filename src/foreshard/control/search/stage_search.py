"""One slot's choice with data parallelism inside stages: workers of a stage split every micro-batch.

All structures are compared where kinds of workers are few enough; else one is searched by tentative moves
from the running one, those chosen lately and a few built ones. Cuts and splits of given stages are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from foreshard.control.budgets.queues import Curve
from foreshard.control.moves import move
from foreshard.control.search.cache import Groups
from foreshard.control.search.cached_structures import Weights
from foreshard.control.search.grouping import MAX_STAGES
from foreshard.control.search.stage_cache import Level, Staged, StageLandscape, StageMemo
from foreshard.control.search.stage_candidates import all_stages, built, neighbours, renamed, repaired
from foreshard.control.slots import MP_OVER_DP, Budget, Chain, Choice, State, Structure, workers_apart
from foreshard.errors import InfeasibleError

_SMALL, _COLD_LOOKS, _WARM_LOOKS = 4, 2000, 8
_STARTS, _FINALISTS, _VISITS = 2, 6, 6
_BETTER = 1.0 - 1e-12


def solve_stages(
    chain: Chain,
    state: State,
    *,
    batch: int,
    micro_batch: int,
    time_weight: float,
    cost_weights: Mapping[str, float] | None = None,
    budgets: Sequence[Budget] = (),
    running: Structure | Choice | None = None,
    change_weight: float = 0.0,
    curve: Curve | None = None,
    memo: StageMemo | None = None,
    max_stages: int = MAX_STAGES,
    most_looks: int | None = None,
) -> Choice:
    """Return the choice that minimises time_weight * seconds + sum of cost_weights * costs, `mp_over_dp`.

    Parameters
    ----------
    chain, state, batch, micro_batch, time_weight, cost_weights, budgets, running, change_weight, curve
        As for :func:`foreshard.control.search.grouping.solve_slot`.
    memo : StageMemo, optional
        Makes later slots fast; belongs to one chain.
    max_stages : int
    most_looks : int, optional
        New structures to look at in this slot; a state that comes back is looked at further. Without it 2,000
        for up to four workers or where nothing runs yet, else 8.

    Notes
    -----
    Every worker of a stage has a sample of every micro-batch at least. Where these can be split in many ways
    a few are tried, the fastest for all layers among them, else all.

    Raises
    ------
    InfeasibleError
        When no split of the layers fits.
    """
    memo = StageMemo() if memo is None else memo
    land = memo.landscape(
        chain,
        state,
        batch=batch,
        micro_batch=micro_batch,
        max_stages=max_stages,
        apart=workers_apart(budgets),
    )
    weights = Weights.of(state, time_weight, cost_weights or {}, budgets)
    bound = running.structure if isinstance(running, Choice) else running
    if most_looks is None:
        cold = bound is None or chain.num_workers <= _SMALL
        most_looks = _COLD_LOOKS if cold else _WARM_LOOKS
    search = _Search(land, weights, bound, change_weight, most_looks, curve)
    search.run()
    if not search.found:
        raise InfeasibleError(
            f"no stages of {len(land.alive)} workers hold the model",
            rule="A stage needs memory",
            fix="Allow more stages, or add workers",
        )
    choice = search.best()
    memo.chose(_workers(choice.structure))
    return choice


def _workers(structure: Structure) -> Groups:
    return tuple(group.workers for group in structure.groups)


class _Search:
    """Looks at structures until none is better, or as many as a slot has time for."""

    def __init__(
        self,
        land: StageLandscape,
        weights: Weights,
        running: Structure | None,
        change_weight: float,
        most_looks: int,
        curve: Curve | None,
    ):
        self.curve = curve if curve is not None and curve.budgets else None
        self.land, self.weights, self.library = land, weights, land.library
        self.running = running if running is not None and running.reading == MP_OVER_DP else None
        self.change_weight, self.left = change_weight, most_looks
        self.level: Level = self._level()
        self.found: dict[int, float] = {}

    def _level(self) -> Level:
        """Return how dear busy seconds and bytes are against time, as powers of 16."""
        weights, chain = self.weights, self.land.chain
        time_weight = max(weights.time + float(weights.active.sum()), 1e-12)
        bytes_per_s = float(np.max(chain.boundary_bytes, initial=1.0)) / float(chain.before_s[:, -1].min())
        sent = float(weights.sent.max() * self.land.state.usd_per_byte.max()) * bytes_per_s
        first, second = (
            round(math.log(price / time_weight, 16.0)) or 1 if price > 0.0 else 0
            for price in (float(np.abs(weights.busy).max()), sent)
        )
        return first, second

    def run(self) -> None:
        """Look at all structures, or walk from the best that are known."""
        if self.running is not None:
            self._look_as_is(self.running)
            self.look(repaired(self.land, _workers(self.running)))
        everything = all_stages(self.land)
        if everything is not None and self.level not in self.land.complete and len(everything) < self.left:
            for stages in everything:
                self.look(stages)
            self.land.complete.add(self.level)
        if self.level in self.land.complete:
            self._ranked()
            return
        spare = self.left // 3
        for stages in self._promising() if self.land.visits < _VISITS else ():
            if self.left <= spare:
                break
            self.look(repaired(self.land, stages))
        self.land.visits += 1
        for at in self._ranked():
            self._walk(at)

    def _promising(self) -> list[Groups]:
        """Return structures chosen lately and built ones, the most promising first."""
        known: dict[object, Groups] = {}
        for stages in itertools.chain(self.land.memo.recent, built(self.land, self.weights)):
            alive = repaired(self.land, stages)
            if self.land.fits(alive):
                known.setdefault(self.land.signature(alive), alive)
        return sorted(known.values(), key=self._guess)

    def _guess(self, stages: Groups) -> float:
        """Return a rough worth: work over all speeds, the fill of even stages, the slowest ring."""
        land, depth = self.land, len(stages)
        at = np.array([worker for stage in stages for worker in stage])
        speed = float((land.state.speed[at] / land.chain.before_s[at, -1]).sum())
        rounds = land.batch / land.micro_batch
        seconds = land.batch / speed * (1.0 + (depth - 1.0) / rounds)
        widest = max(len(stage) for stage in stages)
        if widest > 1:
            rate = float(land.state.bandwidth_bytes_per_s[np.ix_(at, at)].min())
            seconds += 2.0 * (widest - 1) / widest * float(land.chain.sync_bytes.sum()) / depth / rate
        return (self.weights.time + float(self.weights.active[at].sum())) * seconds

    def _look_as_is(self, structure: Structure) -> None:
        """Look at a structure with its own cuts, if it can run."""
        if structure in self.library.known:
            at = self.library.known[structure]
        else:
            choice = self.land.kept(structure, self.weights)
            at = self.library.add(Staged(choice=choice)) if math.isfinite(choice.time_s) else None
            self.library.known[structure] = at
        if at is not None:
            self._weigh(at)

    def look(self, stages: Groups) -> int | None:
        """Return the row of a structure in the library, None if it cannot run or there is no time to see."""
        if not self.land.fits(stages):
            return None
        key = (self.land.signature(stages), self.level)
        if key not in self.library.known:
            if self.left <= 0:
                return None
            self.left -= 1
            choice = self.land.choice(stages, self.weights)
            runs = choice is not None and math.isfinite(choice.time_s)
            self.library.known[key] = self.library.add(Staged(choice=choice)) if runs and choice else None
        return self.library.known[key]

    def _ranked(self) -> list[int]:
        """Weigh the best of the library in full; return the best few and that of each depth."""
        worth = self.library.weighed(self.weights, self.land.state, self.curve)
        deep: dict[int, int] = {}
        for place, at in enumerate(np.argsort(worth, kind="stable").tolist()):
            depth = len(self.library.layouts[at].choice.structure.groups)
            if place < _FINALISTS or depth not in deep:
                self._weigh(at)
            deep.setdefault(depth, at)
            if len(deep) == self.land.max_stages and place >= _FINALISTS:
                break
        best = sorted(self.found, key=lambda at: (self.found[at], at))[:_STARTS]
        return list(dict.fromkeys([*best, *deep.values()])) if self.land.visits <= _VISITS else best

    def _weigh(self, at: int) -> float:
        """Return what a structure is worth, the change to it included."""
        if at not in self.found:
            row = slice(at, at + 1)
            worth = float(self.library.weighed(self.weights, self.land.state, self.curve, row)[0])
            if self.running is not None and self.change_weight > 0.0:
                worth += self.change_weight * self._change(at)[1]
            self.found[at] = worth
        return self.found[at]

    def _change(self, at: int) -> tuple[Structure, float]:
        """Return a structure by the workers that it is best made of, and the seconds to get there."""
        assert self.running is not None
        key = (self.running, at)
        if key not in self.land.changes:
            made = renamed(self.land, self.library.layouts[at].choice.structure, self.running)
            moved = move(self.land.chain, self.land.state, self.running, made)
            self.land.changes[key] = made, moved.time_s
        return self.land.changes[key]

    def _walk(self, at: int) -> None:
        """Move on while some tentative move is better; where all are known, the ranking has seen them."""
        while self.left > 0 and (at, self.level) not in self.land.explored:
            best = at
            for other in neighbours(self.land, _workers(self.library.layouts[at].choice.structure)):
                tried = self.look(other)
                if tried is not None and self._weigh(tried) < self.found[best] * _BETTER:
                    best = tried
                if self.left <= 0:
                    break
            else:
                self.land.explored.add((at, self.level))
            if best == at:
                return
            at = best

    def best(self) -> Choice:
        """Return the best structure, of workers that are alike those that hold most of its layers."""
        at = min(self.found, key=lambda one: (self.found[one], one))
        choice = self.library.layouts[at].choice
        if self.running is None:
            return choice
        named, _ = self._change(at)
        return choice if named == choice.structure else self.land.priced(named, choice.shares)
