"""Finalists of a search, timed by the engine: each plan once, those out of memory never."""

from __future__ import annotations

import math
from collections.abc import Iterable

from foreshard.predict.step_source import StepSource
from foreshard.spec.plan import Group, Plan


class JudgedPlans:
    """Step times of plans, by a source of formulas or of measured costs."""

    def __init__(self, source: StepSource):
        self._source = source
        self._seconds: dict[tuple[Group, ...], float] = {}

    def __len__(self) -> int:
        return len(self._seconds)

    def seconds(self, plan: Plan) -> float:
        """Return the time of a step, inf where the plan does not fit."""
        if plan.groups not in self._seconds:
            fits = self._source.memory(plan).fits
            self._seconds[plan.groups] = self._source.seconds(plan) if fits else math.inf
        return self._seconds[plan.groups]

    def ranked(self, plans: Iterable[Plan]) -> list[Plan]:
        """Return the distinct plans that fit, fastest first."""
        distinct = {plan.groups: plan for plan in plans}.values()
        return sorted((plan for plan in distinct if math.isfinite(self.seconds(plan))), key=self.seconds)
