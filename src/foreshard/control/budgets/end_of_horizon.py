"""The end of a run: its last change is placed where what is left of the budgets is spent.

While nothing changes, the best mixture of the running plan and another needs one change, and its time follows
from what was saved so far and what either plan spends above the budgets.
"""

from __future__ import annotations

import numpy as np

from foreshard.control.budgets.queues import Queues

_SPARE = 0.002
"""Part of the whole budget that is left for what was predicted wrongly."""
_LEAST = 0.003
"""Part of the whole budget that the rest must be above it, for a change to a cheaper plan."""


def left_over(queues: Queues, horizon: int, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what is left of the budgets if a plan runs to the end, and what is too little to matter.

    Parameters
    ----------
    queues : Queues
    horizon : int, steps
    excess : ndarray, shape (budgets,)
        Of a step of the plan, above the budgets.
    """
    known = [queues[one.name] for one in queues.budgets]
    allowed = np.array([(1.0 + queue.conceded) * queue.allowed for queue in known])
    whole = allowed / queues.steps * horizon
    saved = allowed - np.array([queue.spent for queue in known]) - _SPARE * whole
    return saved - (horizon - queues.steps) * excess, _LEAST * whole


def partner(
    left: np.ndarray, least: np.ndarray, steps: int, time_s: np.ndarray, excess: np.ndarray
) -> tuple[int, float] | None:
    """Return which plan shares the rest best with the running one, and for how many steps it is to run.

    Parameters
    ----------
    left, least : ndarray, shape (budgets,)
        See `left_over`.
    steps : int
        That are left.
    time_s, excess : ndarray, shape (n,), (n, budgets)
        Of all plans, less those of the running one.

    Returns
    -------
    (int, float) or None
        Row, and steps: as many as can be paid for a faster plan, as many as are needed of a cheaper one. None
        where no mixture keeps the budgets.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where((excess < 0.0) & (left < 0.0), left / excess, 0.0).max(1)
        paid = np.where(excess > 0.0, np.maximum(left, 0.0) / excess, np.inf).min(1)
    runs = np.where(time_s < 0.0, paid, needed)
    part = np.minimum(runs, steps)
    total_s = np.where((left - part[:, None] * excess >= -least).all(1), part * time_s, np.inf)
    if not np.isfinite(total_s).any():
        return None
    row = int(total_s.argmin())
    return row, float(runs[row])
