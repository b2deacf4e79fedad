"""Prediction with expert advice: the plan of the forecast against plans that stay, by what both came to.

Forecasts are a step late and may be wrong: speeds that swap every step make the best plan of the last step
the worst of the next. What was measured afterwards says what any plan would have taken, of ranks that were in
use: those that were not are taken to be as they are in the mean. A plan that stays runs where, since it was
proposed, it would have done better than following the forecasts did, at the weights of drift plus penalty:
measured seconds and costs decide, whatever forecasts say.

Source
------
Cesa-Bianchi, Lugosi 2006, Prediction, Learning, and Games, section 2.11 (discounted regret), with full
information: every expert is judged in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.budgets.dual import corners
from foreshard.control.slots import Budget, Choice, State, Structure

WINDOW = 200
"""Steps that experts are judged over: K of the guarantee in docs/controller.md."""
REVIEW = 20
"""Steps between reviews of the plans that stay, and that one is judged for at least: a tenth of WINDOW."""
WRONG = 0.05
"""Part by which what was measured exceeds the forecasts before another plan than theirs runs.

A policy may be so much worse than the best plan that stays; below that there is nothing to mend.
"""
PRICED = (0.0, 1 / 16, 1 / 4, 1.0, 4.0, 16.0, 256.0)
"""Factors on the weights of costs at which plans that stay are sought, from the fastest to the cheapest."""
_MOST_PROPOSED = 16
"""Plans that are judged at a time, as each is priced in every step: about half of what is proposed at once.

Of more, those judged long enough that are best at no weights are forgotten: backlogs swing, and what is
worst at the weights of the moment may be half of the best mixture.
"""
FORESEEN = 4
"""Steps that foresight is judged for at least: fewer have no standard error to speak of."""
SURE = 2.0
"""Standard errors by which a plan that stays must have gained before it runs: 2.3 % of chance gains pass.

A straggler that is seen one step late makes one step in fifty dear; without this, one such step in the first
twenty was taken for a habit. Between plans that stay means decide: that forecasts are wrong is known then.
"""
_GAIN = 0.05
"""Part of a surprise that the ratio of what is measured to the model takes over."""
_MOST_PRICED = 20_000
"""Plans in states of which the seconds and costs are remembered."""
_GRID = 0.05
"""Step, in the logarithm, of the speeds of a window: its states are then few."""
Fixed = tuple[Structure, tuple[int, ...]]
"""A plan that stays: structure and shares."""
Weigh = Callable[[np.ndarray], tuple[float, float]]
"""The objective of seconds and costs, and the sum of its parts without what budgets per time allow."""
Prices = Callable[[State, Structure, Sequence[int]], np.ndarray]
"""Seconds and costs by budget of a plan in a state, shape (1 + budgets,)."""


@dataclass(slots=True, kw_only=True, eq=False)
class ExpertRecord:
    """Discounted means since a plan was proposed, rows of seconds and costs by budget.

    Attributes
    ----------
    steps : int
    weight : float
        Of the means, in steps.
    rows : ndarray, shape (3, 1 + budgets)
        What the plan of the forecast was forecast to take, what it took, what the plan that stays took.
    squares : ndarray, shape (1 + budgets, 1 + budgets)
        Products of what the plan that stays took less than the plan of the forecast.
    """

    steps: int
    weight: float
    rows: np.ndarray
    squares: np.ndarray

    def add(self, steps: int, rows: np.ndarray) -> None:
        """Take in some steps."""
        kept = (1.0 - 1.0 / WINDOW) ** steps
        before, new = kept * self.weight, WINDOW * (1.0 - kept)
        saved = rows[1] - rows[2]
        self.rows = (before * self.rows + new * rows) / (before + new)
        self.squares = (before * self.squares + new * np.outer(saved, saved)) / (before + new)
        self.steps, self.weight = self.steps + steps, before + new

    def gain(self, weigh: Weigh) -> float:
        """Return what the plan that stays gains on the plan of the forecast, as a part of the objective."""
        (_, _), (real, gross), (stays, _) = (weigh(row) for row in self.rows)
        return (real - stays) / gross if np.isfinite(stays) else -np.inf

    def sure_gain(self, weigh: Weigh) -> float:
        """Return the gain less SURE standard errors of its mean."""
        if not np.isfinite(self.squares).all():
            return -np.inf
        price = np.array([weigh(row)[0] for row in np.eye(len(self.squares))])
        variance = max(price @ self.squares @ price - (price @ (self.rows[1] - self.rows[2])) ** 2, 0.0)
        return float(self.gain(weigh) - SURE * (variance / self.weight) ** 0.5 / weigh(self.rows[1])[1])

    def error(self, weigh: Weigh) -> float:
        """Return by what part of the objective the plan of the forecast was worse than forecast."""
        forecast, (real, gross) = weigh(self.rows[0])[0], weigh(self.rows[1])
        return (real - forecast) / gross


class Experts:
    """The plan of the forecast and plans that stay, side by side.

    Parameters
    ----------
    budgets : sequence of Budget
    prices : callable
        Seconds and costs of a plan in a state, by the model.
    """

    def __init__(self, budgets: Sequence[Budget], prices: Prices):
        self._size, self._prices = 1 + len(budgets), prices
        self._priced: dict[tuple[Fixed, bytes], np.ndarray] = {}
        self._ratio: dict[Structure, np.ndarray] = {}
        self.common = np.ones(self._size)
        self._whole = np.zeros((2, self._size))
        self.forget()

    def forget(self) -> None:
        """Begin anew: who is there has changed, and with it what plans can run."""
        self.recent, self.foresight = self._empty(), self._empty()
        self._mature: dict[Fixed, ExpertRecord] = {}
        self._proposed: dict[Fixed, ExpertRecord] = {}
        self._mean_s = self._peak_s = np.zeros(0)
        self._weight = np.zeros(0)
        self._late: deque[State] = deque(maxlen=REVIEW)
        self._reviewed, self._asked = 0, -REVIEW

    def _empty(self) -> ExpertRecord:
        rows, squares = np.zeros((3, self._size)), np.zeros((self._size, self._size))
        return ExpertRecord(steps=0, weight=0.0, rows=rows, squares=squares)

    def ratio(self, structure: Structure) -> np.ndarray:
        """Return what was measured over the model's, of seconds and of each cost.

        A plan that never ran is taken to be off by as much as those that did.
        """
        return self._ratio.get(structure, self.common)

    def corrected(self, state: State, structure: Structure, shares: tuple[int, ...]) -> np.ndarray:
        """Return seconds and costs of a plan in a state: the model's, by what measurements of it came to."""
        return self._model(state, structure, shares) * self.ratio(structure)

    def _model(self, state: State, structure: Structure, shares: tuple[int, ...]) -> np.ndarray:
        key = ((structure, shares), state.key())
        if key not in self._priced:
            if len(self._priced) > _MOST_PRICED:
                self._priced.clear()
            self._priced[key] = self._prices(state, structure, shares)
        return self._priced[key]

    def lateness(self) -> np.ndarray:
        """Return seconds and costs that following the forecasts came to, over those that were forecast."""
        forecast, real = self._whole
        return np.where(forecast > 0.0, real / np.where(forecast > 0.0, forecast, 1.0), 1.0)

    @property
    def are_needed(self) -> bool:
        """Return whether plans were judged long enough that do better than forecasts that were wrong."""
        return bool(self._mature)

    def outcomes(self) -> np.ndarray:
        """Return mean seconds and costs of late, of the forecast's plan and of those judged long enough."""
        return np.array([self.recent.rows[1], *(record.rows[2] for record in self._mature.values())])

    def within(self, budgets: Sequence[Budget]) -> list[Fixed]:
        """Return the plans judged long enough that kept all budgets of late, those that left most first."""
        found = {}
        for fixed, record in self._mature.items():
            time_s, *costs = record.rows[2]
            spent = zip(costs, budgets, strict=True)
            found[fixed] = max(cost / budget.allowance(time_s) for cost, budget in spent)
        return sorted((fixed for fixed, part in found.items() if part <= 1.0), key=lambda fixed: found[fixed])

    def measured(self, state: State, ran: Choice, measured: np.ndarray, steps: int) -> None:
        """Take in what a plan took and cost, to know how far off the model is."""
        before, model = self.ratio(ran.structure), self._model(state, ran.structure, ran.shares)
        if not np.isfinite(model).all():
            return
        found = np.where(model > 0.0, measured / np.where(model > 0.0, model, 1.0), 1.0)
        gain = 1.0 - (1.0 - _GAIN) ** steps
        if len(self._ratio) > _MOST_PRICED:
            self._ratio.clear()
        self._ratio[ran.structure] = before + gain * (found - before)
        self.common = self.common + gain * (found - self.common)

    def saw(self, state: State, seen: Set[int], steps: int) -> State:
        """Take in how the ranks seen were in some steps; return the state with the others as of late."""
        pace = 1.0 / np.append(state.speed, state.bandwidth_bytes_per_s)
        if not len(self._mean_s):
            self._mean_s = self._peak_s = pace
            self._weight = np.ones(len(pace))
        kept = (1.0 - 1.0 / WINDOW) ** min(steps, WINDOW)
        fresh = np.ones(len(pace), bool)
        fresh[: len(state.speed)] = [rank in seen for rank in range(len(state.speed))]
        self._weight = np.where(fresh, kept * self._weight + WINDOW * (1.0 - kept), self._weight)
        part = fresh * (1.0 - kept) * WINDOW / self._weight
        self._mean_s = self._mean_s + part * (pace - self._mean_s)
        self._peak_s = np.maximum(fresh * pace, self._peak_s + part * (self._mean_s - self._peak_s))
        if not fresh.all():
            speed = np.where(fresh[: len(state.speed)], state.speed, self.typical(state)[0].speed)
            state = replace(state, speed=speed)
        self._late.append(state)
        return state

    def judge(
        self, state: State, seen: Set[int], steps: int, *, forecast: np.ndarray, real: np.ndarray
    ) -> None:
        """Take in some steps: how the cluster was, and the forecast's plan as forecast and as it came.

        A plan of ranks that were not seen is judged until it is known, and then no more: it would be what
        these were like when they were last in use.
        """
        steps = min(steps, WINDOW)
        self.recent.add(steps, np.array([forecast, real, real]))
        if not self._whole.any():
            self._whole = WINDOW * np.array([forecast, forecast])
        self._whole = self._whole + steps * np.array([forecast, real])
        for (structure, shares), record in self._proposed.items():
            if record.steps < REVIEW or seen >= set(structure.workers):
                record.add(steps, np.array([forecast, real, self.corrected(state, structure, shares)]))

    def trusts_foresight(self, weigh: Weigh) -> bool:
        """Return whether shares for the speeds foreseen did better than those for the last, surely."""
        return self.foresight.steps >= FORESEEN and self.foresight.sure_gain(weigh) > 0.0

    def is_due(self) -> bool:
        """Return whether plans that stay are to be looked at again."""
        if self.recent.steps < self._reviewed + REVIEW:
            return False
        self._reviewed = self.recent.steps
        return True

    def wants(self, weigh: Weigh) -> bool:
        """Return whether forecasts were so wrong that plans that stay are worth judging from now on."""
        if self.recent.steps < self._asked + REVIEW or self.recent.error(weigh) <= WRONG:
            return False
        self._asked = self.recent.steps
        return True

    def propose(self, plans: Iterable[Fixed]) -> None:
        """Judge plans from now on."""
        for fixed in plans:
            self._proposed.setdefault(fixed, self._empty())

    def mature(self, weigh: Weigh, stays: Fixed | None) -> dict[Fixed, ExpertRecord]:
        """Return the plans that were judged long enough; forget all while the forecast's does best.

        Parameters
        ----------
        weigh : callable
        stays : Fixed, optional
            That runs, which is not forgotten.
        """
        old = {
            fixed: record
            for fixed, record in self._proposed.items()
            if record.steps >= REVIEW or fixed == stays
        }
        kept: set[Fixed | None] = set(old)
        is_wrong = self.recent.error(weigh) > WRONG
        if stays is None and not (is_wrong and any(record.gain(weigh) > 0.0 for record in old.values())):
            kept = set()
        elif len(self._proposed) > _MOST_PROPOSED:
            rows = np.array([record.rows[2] for record in old.values()])
            best = corners(rows[:, 0], rows[:, 1:], few=0)
            kept = {stays, *(fixed for place, fixed in enumerate(old) if place in best)}
        for fixed in set(old) - kept:
            del self._proposed[fixed]
        self._mature = {fixed: record for fixed, record in old.items() if fixed in self._proposed}
        return self._mature

    def recalled(self) -> State:
        """Return a state of late, at every review another: what swaps in step with reviews is met too."""
        return self._late[self.recent.steps // REVIEW % len(self._late)]

    def typical(self, now: State) -> tuple[State, State]:
        """Return the state of late by mean seconds, and the one of the most seconds."""
        found = []
        if not len(self._mean_s):
            return now, now
        for pace in (self._mean_s, self._peak_s):
            rate = np.exp(-_GRID * np.round(np.log(np.maximum(pace, 1e-300)) / _GRID))
            rate[pace == 0.0] = np.inf
            speed, links = rate[: len(now.speed)], rate[len(now.speed) :]
            found.append(replace(now, speed=speed, bandwidth_bytes_per_s=links.reshape(now.latency_s.shape)))
        return found[0], found[1]
