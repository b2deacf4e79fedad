"""Policies of the simulator to compare with: equal shares, balanced shares, static, greedy, other planners'.

All run on data-parallel plans over subsets of the devices, under the same prices. None looks ahead, but for
those whose name ends in `@budget` and `static-best`: these stay on one subset of devices that is chosen with
hindsight, the fastest that keeps the budgets on the very path (`hindsight.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from foreshard.control.policies import replicas_by_speed
from foreshard.control.search.subsets import even_shares
from foreshard.control.slots import Budget, Structure
from foreshard.simulate.environment import Environment
from foreshard.simulate.slot_loop import Observation, Rule, SlotOutcome

Decision = tuple[Structure, tuple[int, ...]]
Devices = Callable[[Observation], tuple[int, ...]]
SMOOTHING, DEAD_BAND = 0.3, 0.05
"""Of `proportional`: weight of the newest time, and the imbalance below which it leaves shares alone."""
SLOWED = 1.1
"""Of `malleus-like`: ratio of times that counts as a change."""


class _Simple:
    """A rule that learns nothing from what a slot took."""

    def __init__(self, environment: Environment, devices: Devices | None = None):
        self.environment = environment
        self.devices = devices or self.everyone
        self._memo: dict[tuple[object, ...], Decision] = {}

    def everyone(self, seen: Observation) -> tuple[int, ...]:
        """Return all devices that are there and hold the model."""
        return tuple(np.flatnonzero(self.environment.replicas(seen.pattern)).tolist())

    def learn(self, happened: SlotOutcome) -> None:
        """Forget it."""

    def balanced(self, workers: tuple[int, ...], sample_s: np.ndarray) -> Decision:
        """Return shares by which these devices end together at such seconds per sample."""
        work, key = self.environment.work, (workers, sample_s[list(workers)].tobytes())
        if key not in self._memo:
            self._memo[key] = replicas_by_speed(work.chain, workers, sample_s, work.batch)
        return self._memo[key]


class EqualShare(_Simple):
    """Distributed data parallelism as shipped: everyone, the same share each."""

    def decide(self, seen: Observation) -> Decision:
        """Return equal shares."""
        workers = self.devices(seen)
        shares = even_shares(len(workers), self.environment.work.batch)
        return self.environment.structure(workers), tuple(shares.tolist())


class SpeedShare(_Simple):
    """LB-BSP: everyone, shares by the speeds last seen (`control.policies.replicas_by_speed`)."""

    def decide(self, seen: Observation) -> Decision:
        """Return shares by last speeds."""
        return self.balanced(self.devices(seen), self.environment.sample_s(seen.condition))


class Proportional(_Simple):
    """A controller of OmniLearn's kind: smoothed times, and a dead band against needless re-shares.

    Source
    ------
    Tyagi and Sharma 2025 (arXiv 2503.17469): proportional control of batch sizes on the deviation of a
    worker's time from the mean, with smoothing and a dead band; constants are ours.
    """

    def __init__(self, environment: Environment, devices: Devices | None = None):
        super().__init__(environment, devices)
        self._smooth: np.ndarray | None = None
        self._last: Decision | None = None

    def decide(self, seen: Observation) -> Decision:
        """Return the shares of before, or new ones when times are out of balance."""
        now = self.environment.sample_s(seen.condition)
        old = now if self._smooth is None else self._smooth
        self._smooth = old + SMOOTHING * (now - old)
        workers = self.devices(seen)
        if self._last is not None and self._last[0].workers == workers:
            times = np.array(self._last[1]) * self._smooth[list(workers)]
            if times.max() <= (1.0 + DEAD_BAND) * times.mean():
                return self._last
        self._last = self.balanced(workers, self._smooth)
        return self._last


class StatedSpeeds(_Simple):
    """Metis-like: everyone, shares by the mean speeds of the devices, never by what happens.

    Source
    ------
    Um et al. 2024 (Metis, USENIX ATC): load balance over heterogeneous devices, planned once. Its pipelines
    are not among the plans that are simulated.
    """

    def decide(self, seen: Observation) -> Decision:
        """Return shares by mean speeds."""
        return self.balanced(self.devices(seen), self.environment.mean_sample_s())


class WholeClusterPlan(_Simple):
    """AMP-like and Sailor-like: equal shares on the devices whose equal shares are best at stated speeds.

    `budgets` (Sailor) keeps to those subsets that are within them by the stated speeds and prices; planned
    again only when devices come or go.

    Source
    ------
    Li et al. 2022 (AMP, NeurIPS): uneven devices, even data, planned once; Strati et al. 2025 (Sailor, SOSP):
    which devices to rent under a price limit, re-planned on a change of what is available.
    """

    def __init__(self, environment: Environment, budgets: Sequence[Budget] = ()):
        super().__init__(environment)
        self.budgets = budgets
        self._chosen: dict[int, Decision] = {}

    def decide(self, seen: Observation) -> Decision:
        """Return the plan for the devices that are there."""
        if seen.pattern not in self._chosen:
            self._chosen[seen.pattern] = self._plan(seen.pattern)
        return self._chosen[seen.pattern]

    def _plan(self, pattern: int) -> Decision:
        work, state = self.environment.work, self.environment.mean_state()
        there = np.flatnonzero(self.environment.replicas(pattern))
        # Even shares wait for the slowest, so that the best fleet of a size has its fastest, or its cheapest.
        orders = (
            self.environment.mean_sample_s()[there],
            (self.environment.mean_sample_s() * state.usd_per_h)[there],
        )
        best, least = None, np.inf
        for order in orders:
            ranked = there[np.argsort(order, kind="stable")]
            for count in range(1, len(ranked) + 1):
                workers = tuple(sorted(ranked[:count].tolist()))
                shares = tuple(even_shares(count, work.batch).tolist())
                structure = self.environment.structure(workers)
                time_s, costs = self.environment.price(state, structure, shares)
                over = max([costs[b.key] / b.allowance(time_s) - 1.0 for b in self.budgets], default=0.0)
                rank = time_s if over <= 0.0 else 1e9 * (1.0 + over)
                if rank < least:
                    best, least = (structure, shares), rank
        assert best is not None
        return best


class Malleus(_Simple):
    """Malleus-like: everyone, balanced anew when some device's time moves by a tenth; no budget.

    Source
    ------
    Li et al. 2025 (Malleus, arXiv 2410.13333): straggler-resilient re-planning of data and layers; of its
    plans the data-parallel ones are simulated.
    """

    def __init__(self, environment: Environment, devices: Devices | None = None):
        super().__init__(environment, devices)
        self._basis: np.ndarray | None = None

    def decide(self, seen: Observation) -> Decision:
        """Return shares by the times at the last change."""
        now = self.environment.sample_s(seen.condition)
        if self._basis is None or np.maximum(now / self._basis, self._basis / now).max() > SLOWED:
            self._basis = now
        return self.balanced(self.devices(seen), self._basis)


class Greedy(_Simple):
    """The fastest subset of the state last seen, or with budgets the cheapest, slot by slot."""

    def __init__(self, environment: Environment, budgets: Sequence[Budget] = ()):
        super().__init__(environment)
        self.budgets = budgets
        self._choice: dict[tuple[int, int], Decision] = {}

    def decide(self, seen: Observation) -> Decision:
        """Return the best subset, whatever a change to it costs."""
        key = (seen.condition, seen.pattern)
        if key not in self._choice:
            subsets = self.environment.subsets(*key)
            spent = subsets.column(self.budgets) / [budget.allowance(1.0) for budget in self.budgets]
            rank = spent.sum(1) if self.budgets else subsets.time_s
            workers = subsets.devices(int(np.argmin(rank)))
            self._choice[key] = self.balanced(workers, self.environment.sample_s(seen.condition))
        return self._choice[key]


class BankedBudget(_Simple):
    """The fastest subset whose batch costs no more than its allowance and what was saved before.

    Without a queue or a price of cost: what is saved is spent at the first occasion. The subset in use stays
    while it can be paid and no other is a tenth faster; when none can be paid, the fastest of those within
    the allowance alone runs, or else the cheapest.
    """

    def __init__(self, environment: Environment, budgets: Sequence[Budget]):
        super().__init__(environment)
        self.budgets = budgets
        self._saved = np.zeros(len(budgets))
        self._now: tuple[int, ...] = ()

    def decide(self, seen: Observation) -> Decision:
        """Return the fastest subset that can be paid."""
        subsets = self.environment.subsets(seen.condition, seen.pattern)
        paid = subsets.over(self.budgets, self._saved) <= 0.0
        plain = subsets.over(self.budgets, np.zeros(len(self.budgets)))
        paid = paid if paid.any() else plain <= 0.0
        best = int(np.argmin(np.where(paid, subsets.time_s, np.inf)) if paid.any() else np.argmin(plain))
        kept = subsets.subset(self._now)
        if kept is None or not paid[kept] or subsets.time_s[kept] > SLOWED * subsets.time_s[best]:
            self._now = subsets.devices(best, self._now)
        return self.balanced(self._now, self.environment.sample_s(seen.condition))

    def learn(self, happened: SlotOutcome) -> None:
        """Add up what was saved."""
        part = happened.batches / happened.of
        for i, budget in enumerate(self.budgets):
            self._saved[i] += part * (budget.allowance(happened.time_s) - happened.costs[budget.key])


def on_subset(environment: Environment, subset: Sequence[int]) -> Devices:
    """Return the devices of a subset that are there; when none is, all that are."""
    chosen = frozenset(subset)
    there = [
        np.flatnonzero(environment.replicas(at)).tolist() for at in range(len(environment.path.available))
    ]
    kept = [tuple(device for device in row if device in chosen) or tuple(row) for row in there]
    return lambda seen: kept[seen.pattern]


BY_SHARES: dict[str, Callable[[Environment, Devices | None], Rule]] = {
    "equal-share": EqualShare,
    "lb-bsp": SpeedShare,
    "proportional": Proportional,
    "metis-like": StatedSpeeds,
    "malleus-like": Malleus,
}
"""Rules that only decide on shares; a subset of devices makes them keep a budget."""
