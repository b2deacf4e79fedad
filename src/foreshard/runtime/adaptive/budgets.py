"""Long-term budgets of a run: their names on the command line, and what a step has cost of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreshard.control.slots import J_PER_KWH, Budget
from foreshard.errors import SpecError
from foreshard.lab.lab import Lab
from foreshard.spec.plan import Plan
from foreshard.spec.scenario import budget_table

NAMES = tuple(
    f"{quantity}_per_{period}" for quantity in ("usd", "energy_j", "carbon_kg") for period in ("h", "step")
)
_STATED = {
    "usd": (("usd_per_h", "usd_per_h"),),
    "joule": (("busy_w", "power"),),
    "carbon_kg": (("busy_w", "power"), ("kg_per_kwh", "carbon_kg_per_kwh")),
}
_RULE = f"Budgets are {', '.join(NAMES)}, and duty:RANK, the part of the time that a rank may be busy"


def budget_of(text: str) -> Budget:
    """Return a budget from ``usd_per_h=3.5``, ``energy_j_per_step=900`` or ``duty:2=0.5``.

    Raises
    ------
    SpecError
    """
    name = text.partition("=")[0]
    if name not in NAMES and not name.startswith("duty:"):
        raise SpecError(
            f"unknown budget {name!r}",
            key="--budget",
            value=text,
            rule=_RULE,
            fix="Write it like usd_per_h=3.5",
        )
    told = budget_table(text)
    assert told.limit is not None
    return Budget(name=told.name, kind=told.kind, limit=told.limit, per=told.per, worker=told.rank)


def check_budgets(budgets: Sequence[Budget], lab: Lab, file: str) -> None:
    """Raise for what the lab does not state for every rank, and for ranks it does not have."""
    for budget in budgets:
        if budget.worker is not None and budget.worker >= len(lab.slow):
            raise SpecError(
                f"rank {budget.worker} of {len(lab.slow)}",
                file=file,
                key="--budget",
                value=budget.name,
                rule="duty is of a rank of the lab",
            )
        for field, key in _STATED.get(budget.kind, ()):
            stated = getattr(lab, field)
            if any(one is None for one in stated) or not any(stated):
                what = "prices" if key == "usd_per_h" else key
                raise SpecError(
                    f"no {what}",
                    file=file,
                    key=f"ranks.{key}",
                    value=budget.name,
                    rule=f"A budget of {budget.name} needs {what} of all ranks, not all 0",
                    fix=f"Add {key} to all [[ranks]]",
                )


def spent(budget: Budget, lab: Lab, plan: Plan, time_s: float, work_s: Mapping[int, float]) -> float:
    """Return what a step has cost: of the ranks that the plan uses, those that wait included.

    Parameters
    ----------
    budget : Budget
    lab : Lab
    plan : Plan
    time_s : float
        Of the step.
    work_s : mapping of rank to seconds
        In which it computed.
    """
    if budget.kind == "duty":
        return work_s.get(budget.worker or 0, 0.0)
    if budget.kind == "usd":
        return sum(lab.usd_per_h[rank] or 0.0 for rank in plan.ranks) * time_s / 3600.0
    joule = {
        rank: (lab.busy_w[rank] or 0.0) * work_s.get(rank, 0.0)
        + (lab.idle_w[rank] or 0.0) * max(time_s - work_s.get(rank, 0.0), 0.0)
        for rank in plan.ranks
    }
    if budget.kind == "joule":
        return sum(joule.values())
    return sum(joule[rank] * (lab.kg_per_kwh[rank] or 0.0) / J_PER_KWH for rank in plan.ranks)
