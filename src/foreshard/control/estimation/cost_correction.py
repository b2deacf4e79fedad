"""What plans took and cost since the cluster last changed: forecasts of them give way to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foreshard.control.slots import Budget, Choice, Structure

_FORECAST_STEPS = 20.0
"""Steps measured that count as much as a forecast."""


class CostCorrection:
    """What plans took and cost while the cluster was as it is: forecasts give way to it.

    Parameters
    ----------
    late_steps : int
        That are measured under the old plan after a change.
    """

    def __init__(self, late_steps: int):
        self._late, self._known = late_steps, dict[Structure, _Sums]()
        self._running: Structure | None = None
        self._wait = 0

    def forget(self) -> None:
        """Begin anew: the cluster has changed."""
        self._known.clear()

    def record(self, running: Structure, time_s: float, costs: Mapping[str, float], steps: int) -> None:
        """Take in the seconds and the costs, by budget name, of steps that a plan ran."""
        if running != self._running:
            self._running, self._wait = running, self._late
        if self._wait > 0:
            self._wait -= steps
            return
        sums = self._known.setdefault(running, _Sums(costs=dict.fromkeys(costs, 0.0)))
        sums.steps += steps
        sums.time_s += steps * time_s
        for name, cost in costs.items():
            sums.costs[name] += steps * cost

    def corrected(self, choice: Choice, budgets: Sequence[Budget]) -> Choice:
        """Return a forecast that counts as much as some steps, with the steps there were."""
        sums = self._known.get(choice.structure)
        if sums is None:
            return choice
        part = 1.0 / (_FORECAST_STEPS + sums.steps)
        costs = {
            one.key: part * (_FORECAST_STEPS * choice.costs[one.key] + sums.costs[one.name])
            for one in budgets
        }
        time_s = part * (_FORECAST_STEPS * choice.time_s + sums.time_s)
        return replace(choice, time_s=time_s, costs=costs)


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Of the steps of a plan."""

    steps: int = 0
    time_s: float = 0.0
    costs: dict[str, float]
