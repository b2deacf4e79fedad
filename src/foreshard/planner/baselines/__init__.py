"""Published planners, rebuilt from their papers over the same priced stages, under one judge.

Decides what each of them would have chosen. A `solver.problem.Problem`, as our own search solves it, goes in;
for each planner its plan, timed by the same engine, comes out. A new published planner is one file and an
entry of ``registry.py``. Read ``registry.py`` first, then ``verdict.py``.
"""

from __future__ import annotations

from foreshard.planner.baselines.adoption import adopted, beside_others
from foreshard.planner.baselines.registry import BASELINES, Baseline
from foreshard.planner.baselines.verdict import BaselineResult, judge

__all__ = ["BASELINES", "Baseline", "BaselineResult", "adopted", "beside_others", "judge"]
