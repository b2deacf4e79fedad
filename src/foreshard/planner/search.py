"""The planner's front door: one call for any cluster."""

from __future__ import annotations

from typing import Any

from foreshard.errors import SpecError
from foreshard.planner.rental import rent
from foreshard.planner.request import Request, checked_request
from foreshard.planner.result import PlanResult
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import PRECISIONS


def plan(model: Model, cluster: Cluster, **asked: Any) -> PlanResult:
    """Return the best plans for a model on a cluster, and how far they can be from the best possible.

    Parameters
    ----------
    model : Model
    cluster : Cluster
    asked
        As in :func:`foreshard.planner.request.checked_request`: `global_batch` (required), seq_len,
        objective, max_usd, max_hours, tokens, max_devices, framework, precision, optimizer, engine, top,
        budget_s, usd_per_device_hour, executor.

    Returns
    -------
    PlanResult
        Without plans, `infeasible` says why and what would fit.

    Raises
    ------
    SpecError
        For bad input.
    """
    request = checked_request(model, cluster, **asked)
    _precision_known(request)
    if len(cluster.nodes) == 1:
        from foreshard.planner.homogeneous import search_homogeneous

        return search_homogeneous(request)
    from foreshard.planner.mixed import search_mixed

    return search_mixed(request)


def _precision_known(request: Request) -> None:
    devices = [nodes.device for nodes in request.cluster.nodes]
    if any(device.supports(request.precision) for device in devices):
        return
    has = [name for name in PRECISIONS if any(device.supports(name) for device in devices)]
    raise SpecError(
        f"{', '.join(device.name for device in devices)} have no {request.precision}",
        key="--dtype", value=request.precision,
        rule="Devices compute matrix products of the precision in hardware",
        fix=f"Use one of {', '.join(has)}" if has else "Use other devices",
    )  # fmt: skip


__all__ = ["plan", "rent"]
