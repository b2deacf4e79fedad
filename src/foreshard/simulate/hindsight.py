"""Baselines held to the budgets: the best fixed devices for a rule, chosen knowing the whole path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreshard.control.search.subsets import SubsetClasses
from foreshard.control.slots import Budget
from foreshard.simulate.dynamics import Path
from foreshard.simulate.environment import Environment
from foreshard.simulate.reference_policies import BY_SHARES, on_subset
from foreshard.simulate.slot_loop import Run, play

_TRIED = 24
"""Subsets that are played to find the best, spread over the front of time and cost."""
_SAMPLED = 400
"""Slots that each is played on, in stretches of eight over the whole path."""


def best_subset(
    environment: Environment, name: str, budgets: Sequence[Budget], *, sees_now: bool, batches: int = 1
) -> tuple[int, ...]:
    """Return the subset on which a rule is fastest among those that keep the budgets.

    Candidates are the subsets, by device class of the mean state, that no other beats in both time and cost
    there. Each is played on stretches of the path; when none keeps the budgets, the least above is taken.
    """
    part = replace(environment, path=_stretches(environment.path))
    best, least = None, np.inf
    for devices in _candidates(environment, budgets):
        rule = BY_SHARES[name](part, on_subset(part, devices))
        run = play(rule, part, sees_now=sees_now, batches=batches)
        over = violation(run, budgets)
        rank = float(run.time_s.mean()) if over <= 0.0 else 1e9 * (1.0 + over)
        if rank < least:
            best, least = devices, rank
    assert best is not None
    return best


def violation(run: Run, budgets: Sequence[Budget]) -> float:
    """Return by how much of a budget the mean cost is above it: the largest, negative when all are kept."""
    over = []
    for budget in budgets:
        allowed = float(budget.allowance(float(run.time_s.mean())))
        over.append(float(run.costs[budget.key].mean()) / allowed - 1.0)
    return max(over, default=0.0)


def _candidates(environment: Environment, budgets: Sequence[Budget]) -> list[tuple[int, ...]]:
    work, state = environment.work, environment.mean_state()
    # rounded, so that devices that are alike in the long run are one kind
    state = replace(state, speed=_rounded(state.speed), usd_per_h=_rounded(state.usd_per_h))
    subsets = SubsetClasses.of(
        work.chain, state, work.batch, micro_batch=work.micro_batch, apart=environment.apart
    )
    order = np.lexsort((subsets.costs[:, 0], subsets.time_s))
    front, least = [], np.inf
    for at in order:
        if subsets.costs[at, 0] < least * (1.0 - 1e-9):
            front.append(int(at))
            least = subsets.costs[at, 0]
    picked = np.unique(np.round(np.linspace(0, len(front) - 1, min(_TRIED, len(front)))).astype(int))
    return [subsets.devices(front[i]) for i in picked]


def _rounded(values: np.ndarray) -> np.ndarray:
    """Round to a tenth by ratio."""
    return np.asarray(1.1 ** np.round(np.log(values) / np.log(1.1)))


def _stretches(path: Path) -> Path:
    """Return every so-many-th stretch of eight slots, about `_SAMPLED` slots in all."""
    slots = path.num_slots
    step = max(1, slots // _SAMPLED)
    kept = np.flatnonzero((np.arange(slots) // 8) % step == 0)
    return replace(path, condition=path.condition[kept], pattern=path.pattern[kept])
