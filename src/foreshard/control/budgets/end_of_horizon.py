"""The end of a run: how long another plan may run in what is left so that the budgets are spent.

The steps of a run are known. While nothing changes, the best mixture of the running plan and another needs
one change, whose time follows from what was saved so far and what either plan spends above the budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foreshard.control.budgets.dual import allowances
from foreshard.control.budgets.queues import Queues
from foreshard.control.slots import Budget, Choice

SPARE = 0.002
"""Part of the whole budget that is left for what was predicted wrongly."""
_LEAST = 0.003
"""Part of the whole budget that the rest must be above it, for a change to a cheaper plan."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndOfHorizon:
    """What is left of a run.

    Attributes
    ----------
    steps : int
    saved : ndarray, shape (budgets,)
        Allowed less spent so far, and less what is spared; negative when too much was spent.
    whole : ndarray, shape (budgets,)
        What all steps of the run may cost, about.
    budgets : tuple of Budget
    """

    steps: int
    saved: np.ndarray
    whole: np.ndarray
    budgets: tuple[Budget, ...]

    @staticmethod
    def of(queues: Queues, horizon: int) -> EndOfHorizon | None:
        """Return the rest of a run; None where no budget is left to be kept or no step."""
        left = horizon - queues.steps
        if left <= 0 or not queues.steps or not queues.budgets:
            return None
        known = [queues[one.name] for one in queues.budgets]
        whole = np.array([queue.allowed / queues.steps * horizon for queue in known])
        saved = np.array([queue.allowed - queue.spent for queue in known]) - SPARE * whole
        return EndOfHorizon(steps=left, saved=saved, whole=whole, budgets=queues.budgets)

    def less(self, time_s: float, costs: Mapping[str, float]) -> EndOfHorizon:
        """Return what is left after a change that takes so long and costs so much, by key of the budget."""
        spent = [
            costs.get(one.key, 0.0) - (0.0 if one.per == "step" else one.allowance(time_s))
            for one in self.budgets
        ]
        return replace(self, saved=self.saved - np.array(spent))

    def is_kept(self, running: Choice) -> bool:
        """Return whether a plan keeps all budgets to the end, but for what is not worth a change."""
        return bool((self._left(running) >= -_LEAST * self.whole).all())

    def mixtures(
        self, running: Choice, time_s: np.ndarray, costs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what comes of the running plan and each of several others, one after the other.

        Parameters
        ----------
        running : Choice
        time_s, costs : ndarray, shape (n,), (n, budgets)
            Of the other plans.

        Returns
        -------
        steps, total_s : ndarray, shape (n,)
            For how many of the steps left the other plan can be paid, or if it is slower, has to run: more
            than all of them where any number can be paid. What all steps then take; inf where not even this
            keeps the budgets.
        """
        left, excess = self._left(running), self._excess(time_s, costs)
        more = excess - self._excess_of(running)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.where((more < 0.0) & (left < 0.0), left / more, 0.0).max(1)
            paid = np.where(more > 0.0, np.maximum(left, 0.0) / more, np.inf).min(1)
        steps = np.where(time_s < running.time_s, paid, needed)
        part = np.minimum(steps, self.steps)
        kept = (left - part[:, None] * more >= -_LEAST * self.whole).all(1)
        total_s = part * time_s + (self.steps - part) * running.time_s
        return steps, np.where(kept, total_s, np.inf)

    def steps_of(self, other: Choice, running: Choice) -> float:
        """Return for how many of the steps left another plan can be paid, or if it is slower, has to run."""
        costs = np.array([[other.costs[one.key] for one in self.budgets]])
        return float(self.mixtures(running, np.array([other.time_s]), costs)[0][0])

    def partner(self, running: Choice, time_s: np.ndarray, costs: np.ndarray) -> int:
        """Return which of several plans shares the rest best; where none keeps the budgets, the cheapest."""
        _, total_s = self.mixtures(running, time_s, costs)
        if np.isfinite(total_s).any():
            return int(total_s.argmin())
        tightest = int((self._left(running) / self.whole).argmin())
        return int(self._excess(time_s, costs)[:, tightest].argmin())

    def _left(self, running: Choice) -> np.ndarray:
        """Return what is left in the end if a plan runs to it."""
        return np.asarray(self.saved - self.steps * self._excess_of(running))

    def _excess_of(self, choice: Choice) -> np.ndarray:
        costs = np.array([[choice.costs[one.key] for one in self.budgets]])
        return np.asarray(self._excess(np.array([choice.time_s]), costs)[0])

    def _excess(self, time_s: np.ndarray, costs: np.ndarray) -> np.ndarray:
        """Return the cost of a step above what it is allowed."""
        return np.asarray(costs - np.stack([allowances(one, time_s) for one in self.budgets], axis=1))
