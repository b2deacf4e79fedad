"""Why no plan fits on equal nodes, and the nearest changes that let one fit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreshard.errors import InfeasibleError
from foreshard.planner.grid.best_so_far import Found
from foreshard.planner.grid.search import search_rows
from foreshard.planner.headroom import left_free_words
from foreshard.planner.nearest_change import (
    fitting_changes,
    fix_of,
    more_equal_nodes,
    other_batches,
    other_frameworks,
    other_optimizers,
    other_sequences,
    smaller_margins,
)
from foreshard.planner.request import PlanRequest
from foreshard.planner.solver.time_budget import TimeBudget
from foreshard.spec.cluster import Cluster
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.predict.plan_table import PlanTable

_TRIAL_S, _ALL_S = 2.0, 12.0
"""Seconds that a user waits for one change, and for all of them."""


def infeasible(
    request: PlanRequest,
    searched: Sequence[tuple[Cluster, Found]],
    *,
    exhaustive: bool = True,
    explain: bool = True,
    left_s: float = _ALL_S,
) -> InfeasibleError:
    """Return what keeps every plan out and, with `explain`, the nearest changes that let one in.

    Changes are tried in the seconds that are left of the budget.
    """
    most_s = min(_ALL_S, left_s)
    part, found = min(searched, key=lambda pair: pair[1].least_peak_bytes)
    capacity = part.nodes[0].device.capacity_bytes / 2**30
    left = left_free_words(request)
    free = f", with {left}" if left else ""
    least, on = found.least_peak_bytes / 2**30, number_of(part.num_devices, "device")
    if not exhaustive:
        seen = (
            ""
            if found.least_peak is None
            else f"; the least memory so far is {least:.1f} of {capacity:.1f} GiB on {on}"
        )
        return InfeasibleError(
            f"no plan that fits was found before the search ended{seen}",
            key="--budget-s",
            value=request.budget_s,
            rule="The search was not exhaustive: a plan may exist",
            fix=_fix(request, most_s) if explain else None,
        )
    if found.least_peak is None and request.choices:
        return InfeasibleError(
            f"no degrees with {request.choices} divide global batch {request.global_batch} and sequence "
            f"{request.seq_len} on {on}",
            key="--" + request.choices.names[0].replace("_", "-"),
            value=str(request.choices),
            rule="Degrees multiply to the devices; dp divides the global batch, tp the attention heads",
            fix="State another value, or leave it out",
        )
    if found.least_peak is None:
        return InfeasibleError(
            f"no degrees divide global batch {request.global_batch} and sequence {request.seq_len} on {on}",
            key="--global-batch",
            value=request.global_batch,
            rule="dp divides the global batch, tp the attention heads, cp and tp the sequence",
            fix="Use a global batch that is a multiple of the number of nodes",
        )
    return InfeasibleError(
        f"no plan fits memory: the least, on {on} "
        f"({_words(found.least_peak)}), takes {least:.1f} of {capacity:.1f} GiB{free}",
        key="memory",
        value=f"{least:.1f} GiB",
        rule="The fullest device of a plan fits its memory",
        fix=_fix(request, most_s) if explain else None,
    )


def _words(table: PlanTable) -> str:
    row = {name: int(getattr(table, name)[0]) for name in ("tp", "pp", "cp", "ep", "dp", "zero")}
    text = " ".join(f"{name} {value}" for name, value in row.items() if value > 1 or name in ("tp", "zero"))
    return f"{text}, recompute {table.rules[int(table.recompute[0])]}"


def _fits(request: PlanRequest, budget: TimeBudget) -> bool:
    """Return whether a search finds any plan within a moment."""
    patience_s = min(_TRIAL_S, budget.left_s)
    found = search_rows(
        request.grid_on(request.cluster), keep=1, deadline=time.perf_counter(), patience_s=patience_s
    )
    if found.stopped:
        raise KeyboardInterrupt
    return len(found.score) > 0


def _fix(request: PlanRequest, most_s: float) -> str | None:
    """Return the nearest change of each kind that fits, as far as the user waits for it."""
    kinds = (
        other_batches,
        more_equal_nodes,
        other_frameworks,
        other_optimizers,
        other_sequences,
        smaller_margins,
    )
    budget = TimeBudget.of(most_s)
    try:
        found = fitting_changes(
            (kind(request) for kind in kinds),
            lambda changed: _fits(changed, budget),
            most=len(kinds),
            budget=budget,
        )
    except KeyboardInterrupt:
        return None
    if not found and budget.is_over:
        return "Allow more seconds with --budget-s: not every change that may fit was tried"
    nothing = "Use devices with more memory: no change of devices, framework or sequence tried here fits"
    return fix_of(found) or nothing
