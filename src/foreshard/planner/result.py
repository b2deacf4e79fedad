"""What a search returns: plans in order, a bound no plan beats, and what stands between the two."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from foreshard.errors import InfeasibleError, LimitError
from foreshard.spec.plan import Group, Plan
from foreshard.spec.prediction import Prediction
from foreshard.spec.shown import Shown

_PROVEN = 0.01
"""Gap from which a note gives the bounds of each kind of plan, where the chosen one is of the wider space."""
_ROUNDING = 1e-12
"""Part of a step by which sums of the same terms in another order may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A plan, its prediction, and in a sentence why it stands where it does."""

    plan: Plan
    prediction: Prediction
    why: str

    def with_lora(self, adapters: str) -> Ranked:
        """Return the plan with adapters stated in it."""
        plan = replace(self.plan, lora=adapters)
        return replace(self, plan=plan, prediction=replace(self.prediction, plan=plan))

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``plan --json`` prints for one plan."""
        return {"plan": self.plan.to_dict(), "prediction": self.prediction.to_dict(), "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveBound:
    """What no plan of the space goes below, in the objective that was made small."""

    objective: str
    value: float

    def of(self, best: Prediction) -> ObjectiveBound:
        """Return the bound where a plan of the space is known."""
        found = {"cost": best.cost.usd_per_step, "energy": best.energy_j_per_step}.get(self.objective)
        return self if found is None else replace(self, value=min(self.value, found))

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``plan --json`` prints."""
        return {"objective": self.objective, "value": self.value, "unit": UNITS[self.objective]}


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderSpace:
    """Plans found outside the space of the bound, and what a bound on them too would be.

    Attributes
    ----------
    found : frozenset of tuple of Group
        The groups of each.
    words : str
        Which plans come to the space.
    lower_bound_step_time_s : float
        No plan that comes to the space takes less.
    note : str
        The bounds of each kind.
    """

    found: frozenset[tuple[Group, ...]]
    words: str
    lower_bound_step_time_s: float
    note: str


UNITS = {"time": "s", "cost": "USD per step", "energy": "J per step"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult(Shown):
    """Plans best first, and the proof.

    Attributes
    ----------
    plans : tuple of Ranked
    lower_bound_step_time_s : float
        No plan of the space takes less, by the engine that predicted `plans`; without plans 0 where it is not
        known. One above plans[0], or below it by no more than rounding, is set to its time.
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
    bound : ObjectiveBound, optional
        Where another objective than time is made small.
    objective : {'time', 'cost', 'energy'}
    front : tuple of Ranked
        Of the plans found, those that no other beats in time, cost or energy without losing in another;
        the fastest first.
    wider : tuple of WiderSpace
        Until the choice is made: where some of `plans` are outside `space`.
    """

    plans: tuple[Ranked, ...]
    lower_bound_step_time_s: float
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
    bound: ObjectiveBound | None = None
    objective: str = "time"
    wider: tuple[WiderSpace, ...] = ()

    def __post_init__(self) -> None:
        if self.plans:
            best_s = self.plans[0].prediction.step_time_s
            if self.lower_bound_step_time_s > best_s * (1.0 - _ROUNDING):
                object.__setattr__(self, "lower_bound_step_time_s", best_s)

    def with_lora(self, adapters: str | None) -> PlanResult:
        """Return the result with the adapters stated in every plan."""
        if adapters is None:
            return self
        plans, front = (tuple(one.with_lora(adapters) for one in found) for found in (self.plans, self.front))
        return replace(self, plans=plans, front=front)

    @property
    def gap(self) -> float:
        """Return (step time of plans[0] - bound) / bound; 0 means proven best."""
        if not self.plans:
            return 0.0
        bound_s = self.lower_bound_step_time_s
        return self.plans[0].prediction.step_time_s / bound_s - 1.0 if bound_s > 0 else math.inf

    @property
    def binding(self) -> str:
        """Return what keeps the best plan from being faster, or every plan out; empty where time did."""
        if self.plans:
            return self.plans[0].prediction.bottleneck
        return "memory" if self.infeasible is not None and self.infeasible.key == "memory" else ""

    def bounded(self) -> PlanResult:
        """Return the result with the bound of the space that the chosen plan lies in."""
        groups = self.plans[0].plan.groups if self.plans else ()
        own = [wider for wider in self.wider if groups in wider.found]
        result = replace(self, wider=())
        if not own:
            return result
        bound = min(self.lower_bound_step_time_s, *(wider.lower_bound_step_time_s for wider in own))
        result = replace(
            result,
            lower_bound_step_time_s=bound,
            space="; ".join([self.space, *(wider.words for wider in own)]),
            ladder=self.ladder | {"configuration": bound},
        )
        notes = (*self.notes, *(wider.note for wider in own))
        return replace(result, notes=notes) if result.gap > _PROVEN else result

    @property
    def proof(self) -> ObjectiveBound | None:
        """Return the bound in the objective, None where there is none."""
        if not self.plans:
            return None
        if self.objective == "time":
            return ObjectiveBound(objective="time", value=self.lower_bound_step_time_s)
        return self.bound

    @property
    def bounds_time(self) -> bool:
        """Return whether a bound on the step time speaks of the choice."""
        return bool(self.plans) and self.objective == "time"

    @property
    def gap_to_bound(self) -> float | None:
        """Return by how much the chosen plan is above the bound in the objective, as a part of it."""
        if self.bounds_time:
            return self.gap
        bound = self.proof
        if bound is None or bound.value <= 0.0:
            return None
        best = self.plans[0].prediction
        found = {"cost": best.cost.usd_per_step, "energy": best.energy_j_per_step}[bound.objective]
        return None if found is None else max(0.0, found / bound.value - 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``plan --json`` prints."""
        made: dict[str, Any] = {
            "schema_version": 1,
            "plans": [plan.to_dict() for plan in self.plans],
            "lower_bound_step_time_s": self.lower_bound_step_time_s if self.bounds_time else None,
            "gap": self.gap_to_bound,
            "bound": None if self.proof is None else self.proof.to_dict(),
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
