"""Ours: drift plus penalty over all subsets of the devices, with changes that must earn what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreshard.control.arena import Arena
from foreshard.control.clairvoyant import multipliers_so_far
from foreshard.control.policies import Decision, _Simple
from foreshard.control.queues import Queues
from foreshard.control.slots import Budget
from foreshard.control.subsets import COSTS
from foreshard.sim.online import Happened, Seen

HORIZON_PART, LEAST_WEIGHT = 0.03, 10.0
"""V as a part of the slots of the run: an excess of 3 % of the budget weighs as much as all time."""
LAST_SLOTS, MOST_CORRECTION = 500, 0.2
"""The excess so far is worked off until the end, over no fewer slots, by no larger part of the budget."""
MOST_WORTH = 3.0
"""Largest multiplier that is believed, in reference steps per budget of a step."""
MARGIN = 0.004
"""Part of the budget that lessons aim to leave unspent: what changes and late sight cost is not in them."""
FIRST_LESSON, LESSON = 25, 250
"""Slots after which multipliers are first learned; then at every doubling, and at least every so many."""


class Lyapunov(_Simple):
    """In each slot the subset with the least weighted time and cost; queues of measured cost set the weights.

    A better subset replaces the one in use when its advantage, summed since the last change, has reached what
    the change costs, or the part of it that `patience` says (ski rental: with all of it, of two plans never
    more than twice the best possible). Shares follow the speeds last seen. Queues start from place-holder
    backlogs: V times the multipliers of the dual problem with the frequencies of the states seen so far.

    Parameters
    ----------
    arena : Arena
    budgets : sequence of Budget
    weight : float, optional
        V; from the length of the run when not given.
    patience : float
        Part of the cost of a change that the advantage must reach.
    """

    def __init__(
        self, arena: Arena, budgets: Sequence[Budget], *, weight: float | None = None, patience: float = 0.3
    ):
        super().__init__(arena)
        path = arena.path
        first = arena.kinds(int(path.condition[0]), int(path.pattern[0]))
        step_s = float(first.time_s.min())
        self.budgets, self.patience = tuple(budgets), patience
        if weight is None:
            weight = max(LEAST_WEIGHT, HORIZON_PART * path.num_slots)
        self.queues = Queues(budgets, weight=weight, step_s=step_s)
        self._lesson = FIRST_LESSON
        self._columns = [COSTS.index(one.kind) for one in budgets]
        self._now: tuple[int, ...] = ()
        self._regret = 0.0

    def decide(self, seen: Seen) -> Decision:
        """Return the subset in use with new shares, or a better one."""
        kinds = self.arena.kinds(seen.condition, seen.pattern)
        time_weight, weights = self.queues.weights()
        cost_weight = np.array([weights[one.name] for one in self.budgets])
        score = time_weight * kinds.time_s + kinds.costs[:, self._columns] @ cost_weight
        best = int(np.argmin(score))
        kept = kinds.subset(self._now)
        if kept is None:
            self._move(kinds.devices(best, self._now))
        else:
            self._regret += float(score[kept] - score[best])
            if self._regret > 0.0 and best != kept:
                wanted = kinds.devices(best, self._now)
                if self._regret >= self.patience * self._price(wanted, seen, time_weight, cost_weight):
                    self._move(wanted)
        return self.balanced(self._now, self.arena.sample_s(seen.condition))

    def _move(self, devices: tuple[int, ...]) -> None:
        self._now, self._regret = devices, 0.0

    def _price(
        self, wanted: tuple[int, ...], seen: Seen, time_weight: float, cost_weight: np.ndarray
    ) -> float:
        """Return what a change costs in the units of the score, as the state last seen has it."""
        arena = self.arena
        time_s, costs = arena.change(
            arena.structure(self._now), arena.structure(wanted), seen.condition, seen.pattern
        )
        spent = np.array([costs[one.kind] for one in self.budgets])
        return max(0.0, time_weight) * time_s + float(spent @ cost_weight)

    def learn(self, happened: Happened) -> None:
        """Let the queues grow by what was measured."""
        costs = {one.name: happened.costs[one.kind] for one in self.budgets}
        self.queues.record(happened.time_s, costs)
        if self.budgets and happened.slot + 1 >= self._lesson:
            self._lesson = min(2 * self._lesson, self._lesson + LESSON)
            self._place(happened.slot + 1)

    def _place(self, slots: int) -> None:
        """Move the place-holders to what the states seen so far make of them.

        Source
        ------
        Huang, Liu, Hao 2014 (The power of online learning in stochastic network optimization): backlogs
        replaced by learned multipliers, which leaves the queues to correct what was learned wrongly.
        """
        learned = multipliers_so_far(self.arena, [self._left(one, slots) for one in self.budgets], slots)
        for one, multiplier in zip(self.budgets, learned, strict=True):
            queue = self.queues[one.name]
            worth = min(multiplier * queue.unit / self.queues.step_s, MOST_WORTH)
            holder = self.queues.weight * worth
            shift = max(holder - queue.first_backlog, -queue.backlog)
            queue.backlog += shift
            queue.first_backlog += shift

    def _left(self, budget: Budget, slots: int) -> Budget:
        """Return the budget less what was spent too much, spread over the slots that are left."""
        queue = self.queues[budget.name]
        total = self.arena.path.num_slots
        saved = (queue.allowed - queue.spent) / (queue.allowed / slots) - MARGIN * total
        part = saved / max(total - slots, LAST_SLOTS)
        part = min(max(part, -MOST_CORRECTION), MOST_CORRECTION)
        return replace(budget, limit=budget.limit * (1.0 + part))
