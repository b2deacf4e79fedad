"""What a slot minimises, and the shares with which a structure that is kept is worth most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from foreshard.control.budgets.queues import Curve
from foreshard.control.search.cached_structures import Weights
from foreshard.control.search.pricing import boundary_usd, evaluate, pace_of, stage_s, stage_spans
from foreshard.control.search.shares import counted, whole_shares
from foreshard.control.search.stage_splits import restaged
from foreshard.control.slots import MP_OVER_DP, Budget, Chain, Choice, State, Structure


def reshare(
    chain: Chain,
    state: State,
    structure: Structure,
    *,
    batch: int,
    micro_batch: int,
    time_weight: float,
    cost_weights: Mapping[str, float] | None = None,
    budgets: Sequence[Budget] = (),
) -> Choice:
    """Return the best shares of a structure that is kept; its time is infinite where it cannot run.

    Every group keeps at least one sample, and so does every worker of a stage of several: the structure is
    what it was.
    """
    weights = Weights.of(state, time_weight, cost_weights or {}, budgets)
    if structure.reading == MP_OVER_DP:
        return restaged(chain, state, structure, weights, batch=batch, micro_batch=micro_batch)
    pace = pace_of(chain, state, structure, micro_batch=micro_batch)
    spans = stage_spans(structure)
    worker, group, first, stop = spans
    each = weights.busy[worker] * stage_s(chain, state, worker, first, stop)
    if weights.sent.any():
        sent_usd = boundary_usd(chain, state, spans, np.ones(len(structure.groups)))
        each = each + (weights.sent * sent_usd)[worker]
    shares = whole_shares(
        pace.start_s,
        pace.rate_s,
        batch,
        micro_batch,
        time_weight=weights.time + float(weights.active[worker].sum()),
        sample_weight=np.bincount(group, each, minlength=len(structure.groups)) if each.any() else None,
    ).shares
    for empty in np.flatnonzero(shares == 0):
        given = min(micro_batch, int(shares.max()) - 1)
        shares[int(shares.argmax())] -= given
        shares[empty] = given
    return evaluate(chain, state, structure, counted(shares), micro_batch=micro_batch)


def worth_of(
    choice: Choice,
    time_weight: float,
    cost_weights: Mapping[str, float],
    budgets: Sequence[Budget],
    curve: Curve | None = None,
) -> float:
    """Return what a slot minimises."""
    if not math.isfinite(choice.time_s):
        return math.inf
    cost = sum(cost_weights.get(budget.name, 0.0) * choice.costs[budget.key] for budget in budgets)
    if curve is not None:
        costs = np.array([[choice.costs[budget.key] for budget in curve.budgets]])
        cost += float(curve.extra(np.array([choice.time_s]), costs)[0])
    return time_weight * choice.time_s + cost
