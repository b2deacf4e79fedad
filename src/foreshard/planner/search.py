"""The planner's front door: one call for any cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreshard import quantity
from foreshard.errors import SpecError
from foreshard.planner.finalists import retimed, searching
from foreshard.planner.grid.by_order import ordered_schedules, search_by_order
from foreshard.planner.grid.equal_nodes import least_step_s
from foreshard.planner.headroom import leaving_free, left_free_words, with_whole_memory
from foreshard.planner.mixed.search import search_cluster
from foreshard.planner.request import PlanRequest, checked_request
from foreshard.planner.result import PlanResult
from foreshard.planner.settings import (
    ALWAYS,
    AS_SHIPPED,
    Setting,
    checked_precisions,
    left_out,
    settings,
    switches,
)
from foreshard.planner.settings_search import search_settings
from foreshard.spec.adapters import with_adapters
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import AUTO, OF_FRAMEWORK, PRECISIONS


def plan(model: Model, cluster: Cluster, **asked: Any) -> PlanResult:
    """Return the best plans for a model on a cluster, and how far they can be from the best possible.

    Parameters
    ----------
    model : Model
    cluster : Cluster
    asked
        As in :func:`foreshard.planner.request.checked_request`: `global_batch` (required), seq_len,
        objective, max_usd, max_hours, tokens, max_devices, framework, optimizer, engine, top, budget_s,
        usd_per_device_hour, executor, memory_margin: the least probability of fitting (0.95).
        `precision` may be several words: the search chooses among them. `comm` is what communication the
        search may switch: 'framework' (nothing: as it runs by default), 'all' that the framework ships, or
        names. `lora` is RANK[:TARGETS], adapters on frozen weights. Degrees
        and options (tp, pp, micro_batch, recompute, ...) fix what plans have, as a value or several; min_tp,
        max_tp and the like limit it, `forbid` takes NAME=VALUE.

    Returns
    -------
    PlanResult
        Without plans, `infeasible` says why and what would fit.

    Raises
    ------
    SpecError
        For bad input.
    """
    if asked.get("global_batch") is None:
        rule, fix = "Samples of a step over all devices", "State it, as global_batch=512"
        raise SpecError("not given", key="--global-batch", rule=rule, fix=fix)
    adapters = asked.pop("lora", None)
    model = model if adapters is None else with_adapters(model, adapters)
    precisions = checked_precisions(asked.pop("precision", None) or cluster.default_precision(of_all=False))
    may = asked.pop("comm", None) or AS_SHIPPED
    whole = checked_request(model, cluster, precision=precisions[0], **asked)
    request = leaving_free(whole)
    out = left_out(request, precisions)
    precisions = tuple(name for name in precisions if name not in out) or precisions
    _precision_known(replace(request, precision=precisions[0]))
    chosen = tuple(settings(request, precisions, switches(may, request.framework)))
    result = _ordered(request) if ordered_schedules(request) else plans_under(request, chosen)
    result = with_whole_memory(result, whole)
    notes = tuple(f"{name} is left out: {why}" for name, why in out.items())
    if left := left_free_words(whole):
        result = replace(result, space=f"{result.space}; with {left}" if result.space else "")
    if request.tool is not None:
        notes = (*notes, f"Searched were plans that {request.tool} trains as predicted")
        result = replace(result, space=f"{result.space}; of those, what {request.tool} trains")
    if request.choices:
        notes = (*notes, f"Searched were plans with {request.choices}")
    if fixed := ", ".join(_fixed(request, asked, switches(may, request.framework))):
        notes = (*notes, f"Not searched, the same in every plan: {fixed}")
    return replace(result, notes=(*result.notes, *notes)).with_lora(adapters)


def _fixed(request: PlanRequest, asked: Mapping[str, Any], may: Sequence[str]) -> Iterator[str]:
    """Yield what was stated of the framework and its communication, which all plans then have."""
    stated = {name: asked.get(name) for name in ("collectives", "buckets")}
    if isinstance(stated["buckets"], int):
        stated["buckets"] = quantity.memory(stated["buckets"])
    stated |= {name: getattr(request, name) for name in OF_FRAMEWORK if name != "overrides"}
    stated |= request.overrides.stated() | dict.fromkeys((name for name in ALWAYS if name in may), True)
    words = {True: "on", False: "off"}
    yield from (
        f"{name} {words[value] if isinstance(value, bool) else value}"
        for name, value in stated.items()
        if value not in (None, AUTO)
    )


def _ordered(request: PlanRequest) -> PlanResult:
    """Return the best plans under schedules that are followed op by op, timed by the engine asked for."""
    started = time.perf_counter()
    return retimed(request, search_by_order(searching(request)), started=started)


def plans_under(request: PlanRequest, chosen: Sequence[Setting]) -> PlanResult:
    """Return the best plans under some settings, timed by the engine asked for."""
    started = time.perf_counter()
    mixed = len(request.cluster.nodes) > 1  # equal nodes cut their own grid into tasks
    result = search_settings(
        searching(request),
        chosen,
        search_cluster,
        executor=request.executor if mixed else "local",
        least_step_s=None if mixed else least_step_s,
    )
    return retimed(request, result, started=started)


def _precision_known(request: PlanRequest) -> None:
    devices = [nodes.device for nodes in request.cluster.nodes]
    if any(device.supports(request.precision) for device in devices):
        return
    has = [name for name in PRECISIONS if any(device.supports(name) for device in devices)]
    raise SpecError(
        f"{', '.join(device.name for device in devices)} have no {request.precision}",
        key="--dtype",
        value=request.precision,
        rule="Devices compute matrix products of the precision in hardware",
        fix=f"Use one of {', '.join(has)}" if has else "Use other devices",
    )
