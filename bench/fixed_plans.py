"""All plans of a few workers, the best of them that never changes, and the bound of one who knows the path.

Plans are pipelines of one worker a stage, side by side: every partition of every subset of the workers, in
every order, with every cut. Times are those of `control.search.pricing`, so that what is found here is exact
where that is the truth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from foreshard.control.search.pricing import pace_of, runs
from foreshard.control.search.shares import water_filling
from foreshard.control.slots import Chain, State, Structure, WorkerPipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """A plan that stays.

    Attributes
    ----------
    structure : Structure
    shares : ndarray, shape (groups,), samples
        Parts of samples allowed: no fixed plan in whole samples is faster.
    time_s : float
        Mean step.
    """

    structure: Structure
    shares: np.ndarray
    time_s: float

    def whole_shares(self, batch: int) -> tuple[int, ...]:
        """Return the shares in whole samples, one at least, by largest remainders."""
        whole = np.maximum(np.floor(self.shares), 1).astype(int)
        while whole.sum() != batch:
            rest = self.shares - whole
            short = whole.sum() < batch
            at = int(rest.argmax()) if short else int(np.where(whole > 1, rest, np.inf).argmin())
            whole[at] += 1 if short else -1
        return tuple(whole.tolist())


def every_structure(
    chain: Chain, state: State, *, batch: int, micro_batch: int, max_stages: int
) -> list[Structure]:
    """Return all structures whose workers are there and hold their layers with any share."""
    workers = np.flatnonzero(state.available).tolist()
    most = min(max_stages, chain.num_layers)
    found = []
    for size in range(1, len(workers) + 1):
        for chosen in itertools.combinations(workers, size):
            for cells in _partitions(chosen, most):
                for groups in itertools.product(
                    *(list(_pipelines(cell, chain.num_layers)) for cell in cells)
                ):
                    structure = Structure(groups=groups)
                    if runs(chain, state, structure, [batch] * len(groups), micro_batch=micro_batch):
                        found.append(structure)
    return found


def _partitions(workers: Sequence[int], most: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way to put all workers into cells of at most so many."""
    if not workers:
        yield []
        return
    first, rest = workers[0], workers[1:]
    for size in range(min(most - 1, len(rest)) + 1):
        for others in itertools.combinations(rest, size):
            left = [worker for worker in rest if worker not in others]
            for cells in _partitions(left, most):
                yield [(first, *others), *cells]


def _pipelines(cell: Sequence[int], layers: int) -> Iterator[WorkerPipeline]:
    """Yield every order of some workers with every cut."""
    for inner in itertools.combinations(range(1, layers), len(cell) - 1):
        for order in itertools.permutations(cell):
            yield WorkerPipeline(workers=order, cuts=(0, *inner, layers))


class Hindsight:
    """What plans come to on a path that is known: states, and the part of the steps that each holds.

    Parameters
    ----------
    chain : Chain
    states : sequence of State
        The same workers are there in all of them.
    parts : ndarray, shape (states,)
    batch, micro_batch : int, samples
    max_stages : int
        Of a pipeline; 1 leaves replicas.
    """

    def __init__(
        self,
        chain: Chain,
        states: Sequence[State],
        parts: np.ndarray,
        *,
        batch: int,
        micro_batch: int,
        max_stages: int,
    ):
        self.structures = every_structure(
            chain, states[0], batch=batch, micro_batch=micro_batch, max_stages=max_stages
        )
        self._parts, self._batch = parts / parts.sum(), batch
        self._pace = [
            [pace_of(chain, state, one, micro_batch=micro_batch) for state in states]
            for one in self.structures
        ]
        self.least_s = np.array(
            [[water_filling(p.start_s, p.rate_s, batch).time_s for p in row] for row in self._pace]
        )
        """Of every structure in every state, shares free in each."""
        prices = np.array([state.usd_per_h for state in states])
        self.usd_per_h = np.array([prices[:, list(one.workers)].sum(1) for one in self.structures])

    def fixed(self, usd_per_h: float | None = None) -> FixedPlan | None:
        """Return the fastest plan that stays, shares too, and whose mean rent is within the budget."""
        return next(iter(self.fixed_plans(usd_per_h, 1)), None)

    def fixed_plans(self, usd_per_h: float | None, count: int) -> list[FixedPlan]:
        """Return the fastest plans that stay, one a structure, the fastest first.

        A linear program over shares for each structure, those first that would be fastest with free shares,
        until none that is left can be among the fastest. In states of low rent the program may stretch steps
        to afford others, which makes it a bound there.
        """
        free = self.least_s @ self._parts
        best: list[FixedPlan] = []
        for at in np.argsort(free, kind="stable").tolist():
            if len(best) == count and free[at] >= best[-1].time_s:
                break
            if usd_per_h is None or self.usd_per_h[at].min() <= usd_per_h:
                found = self._fixed_shares(at, usd_per_h)
                best = sorted([*best, *([found] if found else [])], key=lambda one: one.time_s)[:count]
        return best

    def _fixed_shares(self, at: int, usd_per_h: float | None) -> FixedPlan | None:
        pace, num = self._pace[at], len(self.structures[at].groups)
        states = len(pace)
        rows, ends = [], []
        for s, one in enumerate(pace):
            for g in range(num):
                row = np.zeros(num + states)
                row[g], row[num + s] = one.rate_s[g], -1.0
                rows.append(row)
                ends.append(-one.start_s[g])
        if usd_per_h is not None:
            rows.append(np.concatenate([np.zeros(num), self._parts * (self.usd_per_h[at] - usd_per_h)]))
            ends.append(0.0)
        done = linprog(
            np.concatenate([np.zeros(num), self._parts]),
            A_ub=np.array(rows),
            b_ub=np.array(ends),
            A_eq=np.concatenate([np.ones(num), np.zeros(states)])[None],
            b_eq=[self._batch],
        )
        if not done.success:
            return None
        return FixedPlan(structure=self.structures[at], shares=done.x[:num], time_s=float(done.fun))

    def clairvoyant_s(self, usd_per_h: float | None = None) -> float:
        """Return a mean step below which no policy over these plans gets within the budget.

        The dual of the linear program over mixtures of plans by state; changes are free and the state is
        known. Infinite where no plan keeps the budget.
        """
        if usd_per_h is None:
            return float(self._parts @ self.least_s.min(0))
        above = self.usd_per_h - usd_per_h
        if above.min() > 0.0:
            return np.inf
        # Beyond it a plan's weight would be negative: it would wait on purpose without end.
        most = 1.0 / -above.min() if above.min() < 0.0 else 1e6

        def dual(price: float) -> float:
            return float(self._parts @ (self.least_s * (1.0 + price * above)).min(0))

        low, high = 0.0, most
        for _ in range(80):  # concave in the price: thirds
            third = (high - low) / 3.0
            if dual(low + third) < dual(high - third):
                low += third
            else:
                high -= third
        return max(dual(low), dual(0.0))
