"""Bounds for ranges of numbers of pipelines, by column generation over fractions of pipelines."""

from __future__ import annotations

import numpy as np

from foreshard.planner.solver.duals import duals_at, pipeline_dual
from foreshard.planner.solver.integer_heuristic import offer_whole
from foreshard.planner.solver.search_state import SearchState

_ROUNDS = 25
"""Rounds of column generation; hardly any range needs ten."""
_ROUNDS_WITHOUT_MIX = 4
"""Rounds in which duals are doubled as long as no mix of the columns has enough pipelines."""
_LEARNT = 96
"""Columns added at once: more make every linear program slower than they make it better."""
_SAME_DUALS = 1e-6
"""Relative change of duals below which another round would find the same bound."""
_FAR = 1.2
"""Ratio of the best plan to a bound above which times between the two are tried at once."""


def fractional_bound(
    state: SearchState,
    pipelines: tuple[int, int],
    floor_s: float,
    tolerance: float,
    *,
    closely: bool = True,
    fills: bool = True,
) -> float:
    """Return a bound on steps with a number of pipelines in a range, and offer good plans on the way.

    Duals come from the step time in which the columns so far process the batch, which falls as columns come;
    the bound rises to meet it, up to a relative `tolerance`. With `closely`, whole numbers of the columns are
    tried for several times. Without `fills` the filling of pipelines does not count, which is quick, and no
    plans are offered.
    """
    problem = state.problem
    bound, priced = floor_s, False
    found = duals_at(state, pipelines, floor_s, fills=fills)
    for round_ in range(_ROUNDS):
        reached, duals = found or (np.inf, state.rates * max(bound, 1e-12) * 2.0**round_)
        pricing = state.pricing(pipelines, duals, fills=fills)
        pricing.start()
        if not pricing.boxes:
            return np.inf
        if fills:
            state.pricings[pipelines] = reached, pricing
        proven, better = pricing.earliest(
            pipeline_dual(problem, duals, pipelines),
            known_s=reached * (1.0 - 1e-4),
            aim_s=state.aim_s,
            tolerance=tolerance,
            budget=state.budget,
        )
        state.evaluated += pricing.solved
        # The least of a box is looser than that of its columns: in a proof rounds go on that gain nothing.
        is_spent = state.filling == "least" and priced and proven <= bound * (1.0 + tolerance)
        bound, priced = max(bound, proven), True
        fresh = [template for template in better[:_LEARNT] if template not in state.columns]
        state.learn(fresh)
        is_met = state.is_closed(bound) or bound >= reached * (1.0 - 2.0 * tolerance)
        if is_met or is_spent or state.is_late:
            break
        before = found
        if fresh or found is None:
            found = duals_at(state, pipelines, bound, fills=fills)
        is_stuck = not fresh or (found is not None and np.allclose(found[1], duals, rtol=_SAME_DUALS))
        if (is_stuck and before is not None) or (found is None and round_ >= _ROUNDS_WITHOUT_MIX):
            break
    if fills and not state.is_closed(bound):
        far = state.best_s > _FAR * bound * state.factor
        offer_whole(state, pipelines, bound, closely=closely or far)
    return bound
