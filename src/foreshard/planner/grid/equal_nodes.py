"""Plans for equal nodes: how many of them to use, and the best degrees on those."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from foreshard.catalog.frameworks import load_framework
from foreshard.errors import InfeasibleError, LimitError
from foreshard.planner.grid.best_so_far import Found
from foreshard.planner.grid.bounds import device_seconds_floor
from foreshard.planner.grid.infeasible import infeasible
from foreshard.planner.grid.node_counts import part_of, sizes_of
from foreshard.planner.grid.search import search_rows
from foreshard.planner.grid.space import SPACE
from foreshard.planner.ranking import SHOWN, front_of
from foreshard.planner.request import PlanRequest
from foreshard.planner.result import ObjectiveBound, PlanResult, Ranked
from foreshard.planner.solver.time_budget import LEAST_S
from foreshard.predict.plan_table import PlanTable
from foreshard.predict.step import predict
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import OVERRIDES
from foreshard.spec.plan import Plan, acting
from foreshard.spec.prediction import Prediction
from foreshard.units import number_of

_OF_REQUEST = (
    "collectives",
    "bucket_bytes",
    "attention",
    "fp8_recipe",
    "dispatcher",
    *OVERRIDES,
    "elementwise",
    "host",
)
"""What a request sets of its framework, apart from what is hidden."""
_ROUNDING = 1e-12
"""Share by which sums of the same terms in another order may differ."""
_KEPT = 24
"""Plans kept for a last choice: other families are among them, and those that the closed form misjudges."""
_SEARCHING = 0.9
"""Part of the budget for the search; the rest is for predicting the plans that it kept."""


@dataclass(slots=True, kw_only=True)
class _Searched:
    """What was searched on how many devices, and what a bound excluded or time did not allow."""

    parts: list[Cluster] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    skipped: dict[int, float] = field(default_factory=dict)  # devices -> seconds no step falls below
    left: dict[int, float] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)  # why a tool cannot train plans, and how many

    @property
    def interrupted(self) -> bool:
        return bool(self.left) or any(found.interrupted for found in self.found)

    @property
    def stopped(self) -> bool:
        return any(found.stopped for found in self.found)


def search_homogeneous(request: PlanRequest, *, explain: bool = True, least_s: float = LEAST_S) -> PlanResult:
    """Return the best plans on equal nodes, proven best by the analytical engine unless time runs out.

    All nodes are searched first, then fewer of them: every size that computation alone does not exclude.

    Parameters
    ----------
    request : PlanRequest
    explain : bool
        Whether to search for the nearest change when nothing fits.
    least_s : float
        Seconds that it has at least as long as there is no plan.
    """
    started = time.perf_counter()
    search_s = _SEARCHING * request.budget_s
    searched = _search(request, started + search_s, max(0.0, least_s - search_s))
    predictions = _predictions(request, searched, started + request.budget_s)
    error: InfeasibleError | LimitError | None
    plans, error = request.ranked(predictions)
    if not plans and searched.refused:
        error = request.none_of(searched.refused)
    elif not plans and request.beat_s == np.inf:
        pairs = list(zip(searched.parts, searched.found, strict=True))
        explain = explain and not searched.stopped
        left_s = started + request.budget_s - time.perf_counter()
        complete = not searched.interrupted
        error = infeasible(request, pairs, exhaustive=complete, explain=explain, left_s=left_s)
    ladder = _ladder(request, searched, plans)
    return PlanResult(
        plans=plans,
        lower_bound_step_time_s=max(ladder.values(), default=0.0),
        evaluated=sum(found.evaluated for found in searched.found),
        pruned=sum(found.pruned for found in searched.found),
        wall_s=time.perf_counter() - started,
        space=_space(request, searched, plans),
        ladder=ladder if plans else {},
        interrupted=searched.interrupted,
        stopped=searched.stopped,
        infeasible=error,
        notes=tuple(_notes(request, searched, plans)),
        front=front_of(predictions, request.limits),
        bound=_bound(request, searched),
        objective=request.objectives[0],
    )


def _bound(request: PlanRequest, searched: _Searched) -> ObjectiveBound | None:
    """Return what no plan on any number of devices that was searched goes below in dollars or joules.

    None where it is not known: a number was left out, prices are not known, or limits drop plans.
    """
    objective = request.objectives[0]
    if objective == "time" or request.limits or searched.left or searched.skipped:
        return None
    values = []
    for part, found in zip(searched.parts, searched.found, strict=True):
        rate = request.usd_per_device_hour
        price = part.usd_per_h if rate is None else rate * part.num_devices
        if objective == "cost" and price is None:
            return None
        values.append(found.bound * (price / 3600.0 if objective == "cost" and price is not None else 1.0))
    return ObjectiveBound(objective=objective, value=min(values)) if values else None


def least_step_s(request: PlanRequest) -> float:
    """Return seconds that no step takes fewer of, on any number of the devices: computation alone."""
    whole = request.cluster.num_devices
    floor = device_seconds_floor(request.grid_on(request.cluster))
    return floor / min(request.max_devices or whole, whole)


def _search(request: PlanRequest, deadline: float, patience_s: float) -> _Searched:
    """Search every size that may hold one of the best plans; Ctrl-C ends it once there is one."""
    searched = _Searched()
    objective = request.objectives[0]  # joules are those of devices in use, dollars those of whole nodes
    paid = objective == "cost" or (objective == "time" and request.limits.max_usd is not None)
    sizes = list(sizes_of(request.cluster, request.max_devices, whole_nodes=paid))
    floor: float | None = None
    for i, size in enumerate(sizes):
        beat = _beat(request, searched, size)
        try:
            if beat < np.inf and floor is None:
                floor = device_seconds_floor(request.grid_on(request.cluster))
            least_s = (floor or 0.0) / size
            if request.objectives[0] == "time" and not request.limits and least_s >= beat:
                searched.skipped[size] = least_s
            elif searched.interrupted or (searched.found and time.perf_counter() >= deadline):
                searched.left[size] = least_s
            else:
                _search_size(request, searched, size, (deadline, patience_s), beat)
        except KeyboardInterrupt:
            if not any(len(found.score) for found in searched.found):
                raise
            searched.left.update({left: (floor or 0.0) / left for left in sizes[i:]})
            searched.found[-1].stopped = True
            break
    return searched


def _search_size(
    request: PlanRequest, searched: _Searched, size: int, until: tuple[float, float], beat: float
) -> None:
    part = part_of(request.cluster, size)
    grid = request.grid_on(part)
    deadline, patience_s = until
    if any(len(found.score) for found in searched.found):
        patience_s = 0.0
    options = {"deadline": deadline, "patience_s": patience_s, "executor": request.executor}
    options["refusals"] = None if request.tool is None else partial(_refusals, request)
    found = search_rows(grid, keep=_kept(request), beat=beat, **options)  # type: ignore[arg-type]
    nothing = not len(found.score) and not found.stopped
    if nothing and grid.max_step_s < np.inf and found.least_step_s < np.inf:
        # Nothing keeps the limits; the fastest plan says how far away they are.
        found = search_rows(request.grid_on(part, objective="time"), keep=1, **options)  # type: ignore[arg-type]
    searched.parts.append(part)
    searched.found.append(found)
    searched.refused += found.refused


def _refusals(request: PlanRequest, row: PlanTable) -> tuple[str, ...]:
    return request.refusals(_plan_of(request, row))


def _plan_of(request: PlanRequest, row: PlanTable) -> Plan:
    plan = row.plan(
        0,
        request.model,
        seq_len=request.seq_len,
        framework=request.framework.label,
        precision=request.precision,
        optimizer=request.optimizer,
    )
    return request.stated(replace(plan, comm=acting(plan, request.comm)))


def _kept(request: PlanRequest) -> int:
    """Return the plans to keep: those shown, and more where they are timed once more."""
    return max(_KEPT, request.top) if request.chooses_later else request.top


def _beat(request: PlanRequest, searched: _Searched, size: int) -> float:
    """Return the score from which on plans on so many devices are of no interest.

    Fewer devices must be faster than more of them. Dollars go with device-seconds; limits may drop the best.
    """
    if request.limits:
        return np.inf
    # Engines sum in another order than the search does: what differs by rounding is no faster.
    known = [request.beat_s * (1.0 - _ROUNDING)] if request.objectives[0] == "time" else []
    for part, found in zip(searched.parts, searched.found, strict=True):
        scale = part.num_devices / size if request.objectives[0] == "cost" else 1.0
        known += [score * scale for score in found.score]
    rank = 1 if request.objectives[0] == "time" else request.top
    return sorted(known)[rank - 1] if len(known) >= rank else np.inf


def _predictions(request: PlanRequest, searched: _Searched, deadline: float) -> list[Prediction]:
    """Return the plans found as predictions by the engine asked for; beyond the deadline a few."""
    made: list[Prediction] = []
    # A plan states what it hides otherwise than the framework does: as its file will be read.
    framework = request.framework
    if request.comm:
        own = {name: getattr(framework, name) for name in _OF_REQUEST}
        framework = replace(load_framework(framework.label), **own)
    for part, found in zip(searched.parts, searched.found, strict=True):
        for i, table in enumerate(found.tables):
            if i >= min(request.top, SHOWN) and (searched.stopped or time.perf_counter() >= deadline):
                break
            plan = _plan_of(request, table)
            made.append(
                predict(
                    request.model,
                    part,
                    plan,
                    framework=framework,
                    engine="analytical",
                    costs=request.costs,
                    calibration=request.calibration,
                    tokens=request.tokens,
                    usd_per_device_hour=request.usd_per_device_hour,
                    timeline=False,
                )
            )
    return made


def _ladder(request: PlanRequest, searched: _Searched, plans: Sequence[Ranked]) -> dict[str, float]:
    """Return bounds on the step time, the simplest first.

    For the objective time they hold for every number of devices, else for that of the chosen plan.
    """
    pairs = list(zip(searched.parts, searched.found, strict=True))
    everywhere = request.objectives[0] == "time"
    if not plans and not everywhere:
        return {}
    used = len(plans[0].plan.ranks) if plans else 0
    same = [found for part, found in pairs if part.num_devices == used]
    asked = [found for _, found in pairs] if everywhere else same
    others = [*searched.skipped.values(), *searched.left.values()] if everywhere else []
    floors = (found.floor_s for found in asked if 0 < found.floor_s < np.inf)
    ladder = {"compute": float(min([*floors, *others], default=0.0))}
    if request.objectives[0] != "energy":
        ladder["search"] = float(min([*(found.bound for found in asked), *others], default=0.0))
    return ladder


def _space(request: PlanRequest, searched: _Searched, plans: Sequence[Ranked]) -> str:
    most = max((part.num_devices for part in searched.parts), default=0)
    if plans and request.objectives[0] != "time":
        return f"{SPACE}, on {number_of(len(plans[0].plan.ranks), 'device')}"
    if not searched.skipped and len(searched.parts) == 1:
        return f"{SPACE}, on {number_of(most, 'device')}"
    least = min([part.num_devices for part in searched.parts] + list(searched.skipped))
    count = len(searched.parts) + len(searched.skipped)
    return f"{SPACE}, on {count} numbers of devices from {least} to {most}"


def _notes(request: PlanRequest, searched: _Searched, plans: Sequence[Ranked]) -> Iterator[str]:
    if not plans:
        return
    whole, used = request.cluster.num_devices, len(plans[0].plan.ranks)
    objective = request.objectives[0]
    if used < whole:
        fits = any(
            len(found.score) and part.num_devices == min(whole, request.max_devices or whole)
            for part, found in zip(searched.parts, searched.found, strict=True)
        )
        why = "" if fits or request.max_devices else "; no plan uses all: divisibility or memory"
        yield f"{used} of {whole} devices are used and paid for{why}"
    if objective != "time":
        yield f"{len(searched.parts)} numbers of devices were searched"
    if searched.interrupted:
        yield "The search ended before it was exhaustive; the bound holds for what was left out too"
