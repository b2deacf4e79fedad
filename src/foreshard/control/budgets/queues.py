"""Virtual queues: what was spent above the budgets so far, and how much that makes cost weigh next.

Queues grow by measured cost, never by predicted cost: a budget is kept whatever the forecasts were worth.
Budgets that cannot be kept together are raised by the least part that they must be exceeded by: queues settle
there too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreshard.control.budgets.dual import DualTable
from foreshard.control.slots import SECONDS, Budget
from foreshard.errors import SpecError


def drift(
    backlog: float | np.ndarray, excess: float | np.ndarray
) -> tuple[float | np.ndarray, float | np.ndarray]:
    """Return the backlog after a slot, and what was cut off because a queue is never negative.

    Parameters
    ----------
    backlog, excess : float or ndarray
        Cost less budget, in units of the budget.

    Examples
    --------
    >>> drift(1.0, 0.5), drift(1.0, -3.0)
    ((1.5, 0.0), (0.0, 2.0))
    """
    level = backlog + excess
    if isinstance(level, np.ndarray):
        return np.maximum(level, 0.0), np.maximum(-level, 0.0)
    return (level, 0.0) if level > 0.0 else (0.0, -level)


@dataclass(slots=True, kw_only=True)
class Queue:
    """The backlog of one budget.

    Attributes
    ----------
    budget : Budget
    backlog, first_backlog : float
        In units of the budget of one (reference) step; the first is a place-holder that need not be zero.
    reflected : float
        All that was cut off at zero.
    spent : float
        Cost of all steps.
    allowed : float
        What they were allowed to cost.
    unit : float
        Cost that counts as one.
    conceded : float
        Part of the budget by which it is raised because it cannot be kept.
    least : float
        Seconds that a unit of cost weighs at least, so that the present slot keeps the budget by itself.
    """

    budget: Budget
    backlog: float
    first_backlog: float
    unit: float
    reflected: float = 0.0
    spent: float = 0.0
    allowed: float = 0.0
    conceded: float = 0.0
    least: float = 0.0

    def record(self, time_s: float, cost: float, steps: int = 1) -> None:
        """Take in what a step took and cost, or the mean of several steps."""
        allowance, cost = steps * self.budget.allowance(time_s), steps * cost
        level, cut = drift(self.backlog, (cost - (1.0 + self.conceded) * allowance) / self.unit)
        self.backlog, self.reflected = float(level), self.reflected + float(cut)
        self.spent += cost
        self.allowed += allowance

    @property
    def violation(self) -> float:
        """Return by how much of the budget the mean cost is above it (below: negative)."""
        return self.spent / self.allowed - 1.0 if self.allowed else 0.0

    @property
    def excess(self) -> float:
        """Return what was spent above the budget, less what was conceded, in budgets of a step."""
        return (self.spent - (1.0 + self.conceded) * self.allowed) / self.unit

    @property
    def stated_excess(self) -> float:
        """Return what was spent above the budget as stated, in budgets of a step."""
        return (self.spent - self.allowed) / self.unit

    def concede(self, part: float) -> None:
        """Raise the budget by a part, for the steps so far too."""
        more = (self.conceded - part) * self.allowed / self.unit
        self.conceded = part
        self.backlog = max(self.backlog + more, 0.0)
        self.first_backlog = self.backlog - self.reflected - self.excess

    def refer(self, step_s: float) -> None:
        """Count in what a step of so many seconds may cost; the place-holder stays as many of these."""
        part = self.unit / self.budget.allowance(step_s)
        self.unit /= part
        self.reflected *= part
        self.backlog = max(self.first_backlog + self.excess + self.reflected, 0.0)
        self.first_backlog = self.backlog - self.reflected - self.excess

    def identity_error(self) -> float:
        """Return how far the books are from closing: 0 whatever the policy was.

        All excess ever is the growth of the backlog less what was cut off: (spent - allowed) / unit =
        backlog - first_backlog - reflected, with allowed raised by what is conceded.
        """
        excess = self.excess
        growth = self.backlog - self.first_backlog - self.reflected
        scale = 1.0 + self.reflected + (self.spent + (1.0 + self.conceded) * self.allowed) / self.unit
        return abs(excess - growth) / scale


class Queues:
    """Drift plus penalty: weights of time and cost from any number of budgets.

    Parameters
    ----------
    budgets : sequence of Budget
    weight : float
        V, without dimension: how many budgets of a step one reference step is worth when queues are near one.
        Time is within O(1/V) of the best, backlogs and the excess over a finite run grow as V.
    step_s : float
        Reference step: the fastest plan's at the start; see `refer`.

    Notes
    -----
    A budget per second or hour bounds the ratio of cost to time, which is to say that cost less what the time
    of the step allows is not above zero in the mean: the weight of time is less by what the budgets allow.
    Steps are then frames of a renewal process: what is minimised is the rate of drift plus penalty, the mean
    of (weighed excess - V) over mean seconds in the `states` known. The weight of a second that does this
    grows with the backlog. Were it V over the reference step, a backlog above V would make slow steps good by
    themselves; so, of two plans that cost the same a second, the faster is better at any backlog.

    Source
    ------
    Neely 2013, Dynamic optimization and learning for renewal systems (IEEE TAC 58).
    """

    def __init__(
        self,
        budgets: Sequence[Budget],
        *,
        weight: float,
        step_s: float,
    ):
        _check(budgets, weight, step_s)
        self.weight, self.step_s = float(weight), float(step_s)
        self.steps, self.total_s = 0, 0.0
        self.states: DualTable | None = None
        self._second: tuple[DualTable | None, tuple[float, ...], float] = (None, (), 0.0)
        self._queues = {
            budget.name: Queue(
                budget=budget,
                backlog=0.0,
                first_backlog=0.0,
                unit=budget.allowance(step_s),
            )
            for budget in budgets
        }

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Return all budgets."""
        return tuple(queue.budget for queue in self._queues.values())

    @property
    def backlog(self) -> dict[str, float]:
        """Return the backlogs by budget name."""
        return {name: queue.backlog for name, queue in self._queues.items()}

    def __getitem__(self, name: str) -> Queue:
        return self._queues[name]

    def place(self, name: str, backlog: float) -> None:
        """Make a backlog the place-holder that a queue started from; what it gathered since stays."""
        queue = self._queues[name]
        shift = max(backlog - queue.first_backlog, -queue.backlog)
        queue.backlog += shift
        queue.first_backlog += shift

    def refer(self, step_s: float) -> None:
        """Let the reference step take so many seconds; place-holders stay what they were.

        A budget per time allows a step what its seconds do. Where steps take many times the reference, a step
        moved a backlog by more than V of a short run would hold: what it saved was cut off at zero.
        """
        self.step_s = step_s
        for queue in self._queues.values():
            queue.refer(step_s)

    @property
    def is_per_time(self) -> bool:
        """Return whether a budget is per second or hour."""
        return any(queue.budget.per != "step" for queue in self._queues.values())

    def second_weight(self) -> float:
        """Return the weight of a second before what budgets per time allow in it."""
        if self.states is None or not self.is_per_time:
            return self.weight / self.step_s
        backlog = tuple(queue.backlog / queue.unit for queue in self._queues.values())
        then, backlog_then, found = self._second
        if then is not self.states or backlog_then != backlog:
            found = self.states.second_weight(self.weight, np.array(backlog), found)
            self._second = self.states, backlog, found
        return found

    def weights(self) -> tuple[float, dict[str, float]]:
        """Return the weight of a second and, by budget name, the weights of cost: what a slot minimises.

        The weight of a second can be negative where budgets per time bind: what is saved in slow and cheap
        steps then pays for fast ones.
        """
        second = time_weight = self.second_weight()
        costs = {}
        for name, queue in self._queues.items():
            costs[name] = max(queue.backlog / queue.unit, queue.least * second)
            if queue.budget.per != "step":
                limit = (1.0 + queue.conceded) * queue.budget.limit
                time_weight -= costs[name] * limit / SECONDS[queue.budget.per]
        return time_weight, costs

    def record(self, time_s: float, costs: Mapping[str, float], steps: int = 1) -> None:
        """Take in the measured seconds and costs (by budget name) of a step, or the means of several.

        Raises
        ------
        SpecError
            For a cost that is no number or negative, or is missing.
        """
        for name in self._queues:
            cost = costs.get(name, math.nan)
            if not 0.0 <= cost < math.inf:
                raise SpecError(
                    f"a cost of {cost}", key=name, value=cost, rule="A cost is measured, finite, >= 0"
                )
        if not 0.0 <= time_s < math.inf:
            raise SpecError(f"a step of {time_s} s", key="time_s", value=time_s, rule="A step takes time")
        self.steps += steps
        self.total_s += steps * time_s
        for name, queue in self._queues.items():
            queue.record(time_s, costs[name], steps)

    @property
    def violation(self) -> float:
        """Return the largest excess of a mean cost over its budget, at least 0."""
        return max([0.0, *(queue.violation for queue in self._queues.values())])

    def identity_error(self) -> float:
        """Return the largest error of the books over all budgets (G1)."""
        return max([0.0, *(queue.identity_error() for queue in self._queues.values())])


def _check(budgets: Sequence[Budget], weight: float, step_s: float) -> None:
    if len({budget.name for budget in budgets}) < len(budgets):
        raise SpecError("two budgets of one name", key="budgets", rule="Names of budgets differ")
    if not 0.0 <= weight < math.inf:
        raise SpecError(f"a weight of {weight}", key="weight", value=weight, rule="V is finite, not negative")
    if not 0.0 < step_s < math.inf:
        raise SpecError(f"a reference step of {step_s} s", key="step_s", value=step_s, rule="It takes time")
