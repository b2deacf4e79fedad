"""The best schedule found within a budget for a collective on a topology, with its distance to the bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from foreshard.comm.schedules.schedule import Schedule
from foreshard.comm.synthesis.attempts import Attempt, ScheduleFound, attempts_at
from foreshard.comm.synthesis.bounds import lower_bound_s
from foreshard.comm.synthesis.timing import seconds_of
from foreshard.comm.topology.graph import Topology
from foreshard.errors import SpecError

CLOSE_ENOUGH = 1e-3
"""Gap to the lower bound at which the search stops: a tenth of a percent is below what links vary by."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Synthesis:
    """A schedule made for a topology and a size.

    Attributes
    ----------
    schedule : Schedule
    method : str
        What found it.
    seconds : float
        By `seconds_of`: of an execution in which links serve their sends in order.
    lower_bound_s : float
        That no schedule takes fewer of.
    wall_s : float
        What the search took.
    num_attempts : int
        Schedules that were made.
    """

    schedule: Schedule
    method: str
    seconds: float
    lower_bound_s: float
    wall_s: float
    num_attempts: int

    @property
    def gap(self) -> float:
        """Part by which the schedule may be longer than the best one, at most."""
        return self.seconds / self.lower_bound_s - 1.0


def synthesize(
    collective: str, num_bytes: float, topology: Topology, *, budget_s: float, seed: int = 0
) -> Synthesis:
    """Return the fastest schedule found for a collective of a size on a topology.

    Methods are tried one after the other, with chunks of half the size each time, until one is within
    `CLOSE_ENOUGH` of the bound, all are tried, or the budget is spent; the best one is returned. It depends
    on the seed and, where the budget ends the search, on the speed of the machine.

    Parameters
    ----------
    collective : str
        One of `COLLECTIVES`.
    num_bytes : float, bytes
        Size of the collective, as `Chunk.weight` is a part of it.
    topology : Topology
    budget_s : float, seconds
        The first attempt is finished whatever the budget.
    seed : int, default 0

    Returns
    -------
    Synthesis

    Raises
    ------
    SpecError
        For an unknown collective, a size that is not above 0, or devices that do not reach each other.
    """
    start = time.perf_counter()
    if not 0.0 < num_bytes < np.inf:
        raise SpecError(
            f"a collective of {num_bytes:g} bytes",
            key="num_bytes",
            value=num_bytes,
            rule="Above 0 and finite",
        )
    bound = lower_bound_s(collective, num_bytes, topology)
    attempts = attempts_at(collective, num_bytes, topology, seed, bound)
    found, method, tried = _search(attempts, bound, start + budget_s)
    schedule = replace(found.schedule(), overlaps=True)
    return Synthesis(
        schedule=schedule,
        method=method,
        seconds=seconds_of(schedule, topology, num_bytes),
        lower_bound_s=bound,
        wall_s=time.perf_counter() - start,
        num_attempts=tried,
    )


def _search(
    attempts: Iterator[tuple[str, float, Attempt]], bound_s: float, deadline: float
) -> tuple[ScheduleFound, str, int]:
    """Return the best of attempts that a deadline allows, what made it, and how many were made.

    Parameters
    ----------
    attempts : iterator of (str, float, callable)
        A method's name, its work in any unit of that method (seconds for trees), and the attempt.
    bound_s : float, seconds
        The search ends within `CLOSE_ENOUGH` of it.
    deadline : float, seconds
        By `time.perf_counter`.

    Returns
    -------
    tuple of (ScheduleFound, str, int)
    """
    best: ScheduleFound | None = None
    made_by, tried = "", 0
    pace = {"trees": 1.0}
    for method, work, attempt in attempts:
        begun = time.perf_counter()
        if best and begun + pace.get(method, 0.0) * work > deadline:
            continue
        found = attempt(best.seconds if best else np.inf)
        tried += 1
        pace[method] = (time.perf_counter() - begun) / work
        if found is not None and (best is None or found.seconds < best.seconds):
            best, made_by = found, method
        if best and best.seconds <= bound_s * (1 + CLOSE_ENOUGH):
            break
    assert best is not None, "matching finds a schedule wherever all devices reach each other"
    return best, made_by, tried
