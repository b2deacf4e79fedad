"""The best schedule found within a budget for a collective on a topology, with its distance to the bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.schedules.verify import verify
from foreshard.comm.synthesis.attempts import KNOWN_PACE, ScheduleAttempt, ScheduleFound, attempts_at
from foreshard.comm.synthesis.bounds import lower_bound_s
from foreshard.comm.synthesis.budget import BudgetSpent, SynthesisBudget
from foreshard.comm.synthesis.timing import seconds_of
from foreshard.comm.topology.graph import Topology
from foreshard.errors import ForeshardError, SpecError

CLOSE_ENOUGH = 1e-3
"""Gap to the lower bound at which the search stops: a tenth of a percent is below what links vary by."""


_BOUND_FRAC = 0.3
"""Part of a budget that the bound of an all-to-all may take: the rest is for schedules."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Synthesis:
    """A schedule made for a topology and a size."""

    schedule: Schedule
    method: str  # what found it
    seconds: float  # by `seconds_of`: of an execution in which links serve their sends in order
    lower_bound_s: float  # that no schedule takes fewer of
    wall_s: float  # what the search took
    is_interrupted: bool = False  # whether Ctrl-C ended the search

    @property
    def gap(self) -> float:
        """Part by which the schedule may be longer than the best one, at most."""
        return self.seconds / self.lower_bound_s - 1.0


def synthesize(
    collective: str, num_bytes: float, topology: Topology, *, budget: SynthesisBudget, seed: int = 0
) -> Synthesis:
    """Return the fastest schedule found for a collective of a size on a topology.

    An algorithm of the library comes first, whatever the budget. Then methods are tried one after the other,
    with chunks of half the size each time, until one is within `CLOSE_ENOUGH` of the bound, all are tried, or
    the budget is spent but for what it takes to finish the schedule. The best one is verified and returned,
    after Ctrl-C too; it depends on the seed and, where the budget ends the search, on the speed of the
    machine.

    Parameters
    ----------
    collective : str
        One of `COLLECTIVES`.
    num_bytes : float, bytes
        Size of the collective, as `Chunk.weight` is a part of it.
    topology : Topology
    budget : SynthesisBudget
    seed : int, default 0

    Raises
    ------
    SpecError
        For an unknown collective, a size that is not above 0, or devices that do not reach each other.
    ForeshardError
        If what was found does not compute the collective: a fault of the search.
    """
    if not 0.0 < num_bytes < np.inf:
        raise SpecError(
            f"a collective of {num_bytes:g} bytes",
            key="num_bytes",
            value=num_bytes,
            rule="Above 0 and finite",
        )
    bound = lower_bound_s(collective, num_bytes, topology, limit_s=_BOUND_FRAC * budget.left_s)
    attempts = attempts_at(collective, num_bytes, topology, seed, bound, budget.check)
    found, method, is_interrupted = _search(attempts, bound, budget)
    schedule = replace(found.schedule(), overlaps=True)
    if not found.is_listed and (faults := verify(schedule)):
        raise ForeshardError(f"the schedule that {method} made is wrong: {faults[0]}")
    return Synthesis(
        schedule=schedule,
        method=method,
        seconds=found.seconds if found.is_listed else seconds_of(schedule, topology, num_bytes),
        lower_bound_s=bound,
        wall_s=budget.spent_s,
        is_interrupted=is_interrupted,
    )


def _search(
    attempts: Iterable[ScheduleAttempt], bound_s: float, budget: SynthesisBudget
) -> tuple[ScheduleFound, str, bool]:
    """Return the best of attempts that a budget allows, its method, and whether Ctrl-C came.

    The first is made whatever the budget. Of the others those are left out that would take longer than is
    left by what their method took before, and those that run out of time are given up. What is left is
    counted without the time to finish the best one or the one under way, whichever takes longer.
    """
    best: ScheduleFound | None = None
    made_by, finishing_s, is_interrupted = "", 0.0, False
    pace = dict(KNOWN_PACE)
    try:
        for attempt in attempts:
            budget.kept_s = max(finishing_s, attempt.finishing_s)
            if best and not budget.allows(pace.get(attempt.method, 0.0) * attempt.work):
                continue
            begun_s = budget.worked_s
            found = attempt.make(best.seconds if best else np.inf, budget.check)
            pace[attempt.method] = (budget.worked_s - begun_s) / attempt.work
            if found is not None and (best is None or found.seconds < best.seconds):
                best, made_by, finishing_s = found, attempt.method, attempt.finishing_s
            if best and best.seconds <= bound_s * (1 + CLOSE_ENOUGH):
                break
    except BudgetSpent:
        pass
    except KeyboardInterrupt:
        if best is None:
            raise
        is_interrupted = True
    assert best is not None, "the library has an algorithm for every collective"
    return best, made_by, is_interrupted
