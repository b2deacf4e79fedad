"""The best plans of a search so far, and what it has covered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreshard.predict.plan_table import PlanTable

_DEGREES = ("tp", "pp", "cp", "ep", "etp")


@dataclass(slots=True, kw_only=True)
class Found:
    """The best rows so far, one for each cell, and what the search has covered.

    beat : plans of this score or more are of no interest
    score : what is made small, of each kept plan
    bound : no row has a smaller score, by the analytical engine
    floor_s : no step takes less by any engine: computation alone, spread evenly over the stages
    interrupted : rows are left that might be better
    least_step_s : of the plans timed
    least_peak : the row that needs least memory, of those priced
    """

    keep: int
    beat: float = np.inf
    tables: list[PlanTable] = field(default_factory=list)
    score: np.ndarray = field(default_factory=lambda: np.empty(0))
    step_time_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    bound: float = 0.0
    evaluated: int = 0
    pruned: int = 0
    interrupted: bool = False
    floor_s: float = 0.0
    least_step_s: float = np.inf
    least_peak_bytes: float = np.inf
    least_peak: PlanTable | None = None

    @property
    def worst(self) -> float:
        """Return the score a row must beat to be kept."""
        return min(self.beat, float(self.score[-1]) if len(self.score) == self.keep else np.inf)

    def add(
        self, table: PlanTable, score: np.ndarray, step_time_s: np.ndarray, *, most_s: float = np.inf
    ) -> None:
        """Keep the best plan of each choice of degrees among those kept and these."""
        better = np.flatnonzero((score < self.worst) & (step_time_s <= most_s))
        if not len(better):
            return
        order = better[np.argsort(score[better], kind="stable")]
        _, first = np.unique(_degrees(table, order), axis=1, return_index=True)
        order = order[np.sort(first)[: self.keep]]
        tables = [*self.tables, *(table.take(slice(i, i + 1)) for i in order)]
        scores = np.concatenate([self.score, score[order]])
        steps = np.concatenate([self.step_time_s, step_time_s[order]])
        seen: dict[tuple[int, ...], int] = {}
        for i in np.argsort(scores, kind="stable"):
            seen.setdefault(tuple(_degrees(tables[i], np.array([0])).ravel()), int(i))
        kept = list(seen.values())[: self.keep]
        self.tables = [tables[i] for i in kept]
        self.score, self.step_time_s = scores[kept], steps[kept]


def _degrees(table: PlanTable, index: np.ndarray) -> np.ndarray:
    """Return the degrees of the plans at `index`, shape (degrees, plans)."""
    return np.array([getattr(table, name)[index] for name in _DEGREES])
