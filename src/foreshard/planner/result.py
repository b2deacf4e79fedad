"""What a search returns: plans in order, a bound no plan beats, and what stands between the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foreshard.errors import InfeasibleError, LimitError
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A plan, its prediction, and in a sentence why it stands where it does."""

    plan: Plan
    prediction: Prediction
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``plan --json`` prints for one plan."""
        return {"plan": self.plan.to_dict(), "prediction": self.prediction.to_dict(), "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Plans best first, and the proof.

    Attributes
    ----------
    plans : tuple of Ranked
    lower_bound_step_time_s : float
        No plan of the space takes less, by the engine that predicted `plans`; without plans 0 where it is not
        known.
    gap : float
        (step time of plans[0] - bound) / bound; 0 means proven best.
    binding : str
        What keeps the best plan from being faster.
    evaluated, pruned : int
        Plans timed, and plans excluded by a stated bound on memory or time; together the space.
    wall_s : float
    space : str
        Which plans the bound speaks of.
    ladder : dict of str to float
        Bounds from the simplest to the tightest, seconds.
    interrupted : bool
        Something was left out that may be better.
    stopped : bool
        The user ended the search.
    infeasible : InfeasibleError or LimitError, optional
        Why there is no plan, or none within the limits.
    notes : tuple of str
    front : tuple of Ranked
        Of the plans found, those that no other beats in time, cost or energy without losing in another;
        the fastest first.
    """

    plans: tuple[Ranked, ...]
    lower_bound_step_time_s: float
    gap: float
    binding: str
    evaluated: int
    pruned: int
    wall_s: float
    space: str = ""
    ladder: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    stopped: bool = False
    infeasible: InfeasibleError | LimitError | None = None
    notes: tuple[str, ...] = ()
    front: tuple[Ranked, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``plan --json`` prints."""
        made: dict[str, Any] = {
            "schema_version": 1,
            "plans": [plan.to_dict() for plan in self.plans],
            "lower_bound_step_time_s": self.lower_bound_step_time_s if self.plans else None,
            "gap": self.gap if self.plans else None,
            "binding": self.binding,
            "evaluated": self.evaluated,
            "pruned": self.pruned,
            "wall_s": self.wall_s,
            "space": self.space,
            "ladder_s": self.ladder,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "front": [ranked_plan.to_dict() for ranked_plan in self.front],
        }
        if self.infeasible is not None:
            made["error"] = self.infeasible.to_dict()
        return made
