"""The guard of the budgets: plans that stay, run one after the other while too much is spent.

Nothing that is forecast or judged holds on every path. What a plan costs while it runs is measured. While the
excess over a budget is above a limit, the guard runs one of a few plans, and leaves out each whose excess
rises. If one of them keeps the budgets, the excess is bounded: docs/derivations/budgets.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from foreshard.control.experts import REVIEW, WINDOW, Fixed

RISE = REVIEW / 2.0
"""Budgets of a step by which the excess may rise from its least before a plan is left out.

A plan that keeps the budgets in the mean exceeds them in some steps; half of REVIEW say something of it. When
all plans were left out it doubles: how far a plan that keeps the budgets exceeds them on the way is unknown.
"""
MOST_GUARDS = 8
"""Plans that are tried: each that is left out adds to the constant."""


class BudgetGuard:
    """Decides from the excess alone whether a plan that stays has to run, and which.

    Attributes
    ----------
    refuted : int
        How often every plan was left out: none of them kept the budgets.
    """

    def __init__(self) -> None:
        self.refuted, self._rise = 0, RISE
        self._left: list[Fixed] = []
        self._least: np.ndarray | None = None

    @property
    def is_on(self) -> bool:
        """Return whether the guard decides."""
        return self._least is not None

    def decide(
        self,
        excess: np.ndarray,
        end: float,
        plans: Callable[[], Iterable[Fixed]],
        runs: Callable[[Fixed], bool],
    ) -> Fixed | None:
        """Return the plan that has to run next, or None.

        Parameters
        ----------
        excess : ndarray, shape (budgets,)
            So far, in budgets of a step.
        end : float
            Excess at which the guard ends; it begins WINDOW budgets of a step above.
        plans : callable
            Returns plans to try, the likeliest to keep the budgets first; asked when none is left.
        runs : callable
            Whether a plan can run.
        """
        worst = float(excess.max())
        if worst <= end + (0.0 if self.is_on else WINDOW):
            self._least = None
            return None
        if self._least is None:
            self._least = np.full(len(excess), np.inf)
        elif float((excess - self._least).max()) > self._rise:
            del self._left[:1]
            if not self._left:
                self.refuted, self._rise = self.refuted + 1, 2.0 * self._rise
            self._least = np.full(len(excess), np.inf)
        else:
            self._least = np.minimum(self._least, excess)
        if not any(map(runs, self._left)):
            self._left = [plan for plan in dict.fromkeys(plans()) if runs(plan)][:MOST_GUARDS]
        while self._left and not runs(self._left[0]):
            # It lost a rank; it may keep the budgets when that is back.
            self._left.append(self._left.pop(0))
            self._least = np.full(len(excess), np.inf)
        return self._left[0] if self._left else None
