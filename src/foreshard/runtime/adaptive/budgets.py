"""Long-term budgets of a run: their names on the command line, and what a step has cost of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreshard.control.nominal import power_w
from foreshard.control.slots import Budget, State
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Plan
from foreshard.spec.scenario import budget_table, budget_words

NAMES = tuple(
    f"{quantity}_per_{period}" for quantity in ("usd", "energy_j", "carbon_kg") for period in ("h", "step")
)
_RULE = f"Budgets are {', '.join(NAMES)}, and duty:RANK, the part of the time that a rank may be busy"


def budget_of(text: str) -> Budget:
    """Return a budget from ``usd_per_h=3.5``, ``energy_j_per_step=900`` or ``duty:2=0.5``."""
    name, _ = budget_words(text)
    if name not in NAMES and not name.startswith("duty:"):
        what, fix = f"unknown budget {name!r}", "Write it like usd_per_h=3.5"
        raise SpecError(what, key="--budget", value=text, rule=_RULE, fix=fix)
    table = budget_table(text)
    assert table.limit is not None
    return Budget(name=table.name, kind=table.kind, limit=table.limit, per=table.per, worker=table.rank)


def check_budgets(budgets: Sequence[Budget], cluster: Cluster) -> None:
    """Raise for what the cluster does not state for every rank, and for ranks it does not have."""
    usd = {"usd_per_h": [nodes.usd_per_h for nodes in cluster.nodes]}
    power = {"power": [power_w(nodes)[0] if nodes.device.tdp_w else nodes.busy_w for nodes in cluster.nodes]}
    carbon = {"carbon_kg_per_kwh": [nodes.carbon_kg_per_kwh for nodes in cluster.nodes]}
    needed = {"usd": usd, "joule": power, "carbon_kg": power | carbon}
    names = [budget.name for budget in budgets]
    for budget in budgets:
        if names.count(budget.name) > 1:
            raise SpecError(
                f"{budget.name} has two limits",
                key="--budget",
                value=budget.name,
                rule="A budget has one limit",
                fix="Give it once",
            )
        if budget.worker is not None and budget.worker >= cluster.num_devices:
            raise SpecError(
                f"rank {budget.worker} of {cluster.num_devices}",
                file=cluster.name,
                key="--budget",
                value=budget.name,
                rule="duty is of a rank of the cluster",
            )
        for key, stated in needed.get(budget.kind, {}).items():
            if any(value is None for value in stated) or not any(stated):
                what = "prices" if key == "usd_per_h" else key
                raise SpecError(
                    f"no {what}",
                    file=cluster.name,
                    key=key,
                    value=budget.name,
                    rule=f"A budget of {budget.name} needs {what} of all ranks, not all 0",
                    fix=f"State {key} of all nodes (of all [[ranks]] of a lab)",
                )


def spent(budget: Budget, cluster: State, plan: Plan, time_s: float, work_s: Mapping[int, float]) -> float:
    """Return what a step has cost: of the ranks that the plan uses, those that wait included.

    `cluster` has prices and powers; the ranks computed for `work_s` of the step.
    """
    if budget.kind == "duty":
        return work_s.get(budget.worker or 0, 0.0)
    if budget.kind == "usd":
        return float(sum(cluster.usd_per_h[rank] for rank in plan.ranks)) * time_s / 3600.0
    total = 0.0
    for rank in plan.ranks:
        busy_s = work_s.get(rank, 0.0)
        joule = cluster.busy_w[rank] * busy_s + cluster.idle_w[rank] * max(time_s - busy_s, 0.0)
        total += float(joule if budget.kind == "joule" else joule * cluster.kg_per_j[rank])
    return total
