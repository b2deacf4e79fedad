"""Published planners, rebuilt from their papers over the same priced stages, under one judge."""

from __future__ import annotations

from foreshard.planner.baselines.adoption import adopted, beside_others
from foreshard.planner.baselines.registry import BASELINES, Baseline
from foreshard.planner.baselines.verdict import Judged, judge

__all__ = ["BASELINES", "Baseline", "Judged", "adopted", "beside_others", "judge"]
