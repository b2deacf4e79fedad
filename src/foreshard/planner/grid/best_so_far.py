"""The best plans of a search so far, and what it has covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from foreshard.predict.plan_table import COLUMNS, PlanTable

_DEGREES = ("tp", "pp", "cp", "ep", "etp")
"""Columns in which kept plans differ: of each choice of degrees the best plan is kept."""
_EQUAL_BITS = 40
"""Scores that agree to 12 digits are equal: sums in another order differ by less."""
_SLACK = 1.0 + 2.0**-_EQUAL_BITS


@dataclass(slots=True, kw_only=True)
class Found:
    """The best plan of every choice of degrees, the best `keep` of those, and what the search has covered.

    beat : plans of this score or more are of no interest
    refusals : reasons not to keep the plan of a table of one row; None where all may be kept
    refused : how many plans each reason kept out
    score : what is made small, of each kept plan
    bound : no row has a smaller score, by the analytical engine
    floor_s : no step takes less by any engine: computation alone, spread evenly over the stages
    interrupted : rows are left that might be better
    stopped : the user ended the search
    least_step_s : of the plans timed
    least_peak : the row that needs least memory, of those priced
    """

    keep: int
    beat: float = np.inf
    refusals: Callable[[PlanTable], tuple[str, ...]] | None = None
    refused: Counter[str] = field(default_factory=Counter)
    tables: list[PlanTable] = field(default_factory=list)
    score: np.ndarray = field(default_factory=lambda: np.empty(0))
    step_time_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    bound: float = 0.0
    evaluated: int = 0
    pruned: int = 0
    interrupted: bool = False
    stopped: bool = False
    floor_s: float = 0.0
    least_step_s: float = np.inf
    least_peak_bytes: float = np.inf
    least_peak: PlanTable | None = None
    _wanted: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def excludes(self, bound: np.ndarray | float) -> np.ndarray:
        """Return which bounds are too high for a plan to be kept; a plan as good as the last one may be."""
        worst = float(self.score[-1]) if len(self.score) == self.keep else np.inf
        return (np.asarray(bound) > worst * _SLACK) | (np.asarray(bound) >= self.beat)

    def add(
        self, table: PlanTable, score: np.ndarray, step_time_s: np.ndarray, *, most_s: float = np.inf
    ) -> None:
        """Keep the best plan of each choice of degrees among those kept and these."""
        better = np.flatnonzero(~self.excludes(score) & (step_time_s <= most_s))
        if not len(better):
            return
        table, score, step_time_s = table.take(better), score[better], step_time_s[better]
        if self.tables:
            table = joined([*self.tables, table])
            score = np.concatenate([self.score, score])
            step_time_s = np.concatenate([self.step_time_s, step_time_s])
        order = _in_order(table, score)
        degrees = np.array([getattr(table, name)[order] for name in _DEGREES])
        if self.refusals is None:
            _, first = np.unique(degrees, axis=1, return_index=True)
            kept = order[np.sort(first)[: self.keep]]
        else:
            kept = self._first_wanted(table, order, degrees)
        self.tables = [table.take(slice(i, i + 1)) for i in kept]
        self.score, self.step_time_s = score[kept], step_time_s[kept]

    def _is_wanted(self, row: PlanTable) -> bool:
        assert self.refusals is not None
        key = tuple(int(getattr(row, name)[0]) for name in COLUMNS)
        if key not in self._wanted:
            reasons = self.refusals(row)
            self.refused.update(reasons)
            self._wanted[key] = not reasons
        return self._wanted[key]

    def _first_wanted(self, table: PlanTable, order: np.ndarray, degrees: np.ndarray) -> np.ndarray:
        """Return the first plan of each choice of degrees that is wanted, `keep` of them at most."""
        kept: dict[tuple[int, ...], int] = {}
        for place, row in enumerate(order):
            key = tuple(degrees[:, place].tolist())
            if key not in kept and self._is_wanted(table.take(slice(row, row + 1))):
                kept[key] = int(row)
                if len(kept) == self.keep:
                    break
        return np.array(list(kept.values()), dtype=np.int64)

    def note_peak(self, table: PlanTable, peak_bytes: np.ndarray) -> None:
        """Remember the plan that needs least memory."""
        least = int(peak_bytes.argmin())
        if peak_bytes[least] < self.least_peak_bytes:
            self.least_peak_bytes = float(peak_bytes[least])
            self.least_peak = table.take(slice(least, least + 1))

    def merge(self, other: Found) -> None:
        """Add what a search of other rows found."""
        self.evaluated += other.evaluated
        self.pruned += other.pruned
        self.refused += other.refused
        self.interrupted |= other.interrupted
        self.stopped |= other.stopped
        self.least_step_s = min(self.least_step_s, other.least_step_s)
        if other.least_peak_bytes < self.least_peak_bytes:
            self.least_peak_bytes, self.least_peak = other.least_peak_bytes, other.least_peak
        if other.tables:
            self.add(joined(other.tables), other.score, other.step_time_s)


def joined(tables: list[PlanTable]) -> PlanTable:
    """Return the rows of several tables with the same recompute rules."""
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMNS}
    return PlanTable(**columns, rules=tables[0].rules)


def _in_order(table: PlanTable, score: np.ndarray) -> np.ndarray:
    """Return the plans by score, equal ones by their columns: the order of the search plays no part."""
    fraction, exponent = np.frexp(score)
    about = np.ldexp(np.round(np.ldexp(fraction, _EQUAL_BITS)), exponent)
    return np.lexsort([getattr(table, name) for name in reversed(COLUMNS)] + [about])
