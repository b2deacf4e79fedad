"""MODEL that is traced: a factory that returns a module with example inputs, or a classic network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from foreshard.cli.options.varying import noise_of

if TYPE_CHECKING:
    from foreshard.planner.result import PlanResult
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.traced_module import TracedModule


def traced(model: str, precision: Any, degrees: Callable[[], Iterable[int]]) -> TracedModule | None:
    """Return the module that MODEL names, None for one that is not traced.

    `degrees` gives the tensor parallelism that is asked for.
    """
    from foreshard import api
    from foreshard.profile.networks.catalog import is_traced

    if not is_traced(model):
        return None
    if isinstance(precision, tuple):
        precision = precision[0]
    return api.trace(model, precision=precision or "bf16", degrees=degrees())


def degrees_of(values: dict[str, Any]) -> set[int]:
    """Return the tensor parallelism of the plan that `predict` is asked for."""
    from foreshard import api
    from foreshard.advise import traced_request

    plan = api.load_plan(values["plan"]) if values.get("plan") else None
    return traced_request.degrees_of(plan, values.get("tp"))


def degrees_on(cluster: str, max_tp: int | None) -> list[int]:
    """Return the tensor parallelism that `plan` tries."""
    from foreshard import api
    from foreshard.advise import traced_request

    return traced_request.degrees_on(api.load_cluster(cluster), max_tp)


def predict(module: TracedModule, values: dict[str, Any], others: dict[str, Any]) -> Prediction:
    """Return the prediction of `predict` for a traced module."""
    from foreshard import api
    from foreshard.advise import traced_request

    traced_request.check_predicts({**values, **others})
    cluster = api.load_cluster(values["cluster"])
    if values.get("plan"):
        plan = api.load_plan(values["plan"])
    else:
        plan = traced_request.plan_of(module, cluster, values)
    return api.predict_traced(
        module,
        cluster,
        plan,
        fidelity=values.get("fidelity") or "zero-shot",
        engine=values.get("engine") or "graph",
        noise=noise_of(values),
    )


def plan(module: TracedModule, cluster: Cluster, asked: dict[str, Any], others: dict[str, Any]) -> PlanResult:
    """Return the result of `plan` for a traced module."""
    from foreshard import api
    from foreshard.advise import traced_request

    traced_request.check_plans({**asked, **others})
    kept = {name: asked[name] for name in ("optimizer", "top", "budget_s") if name in asked}
    return api.plan_traced(module, cluster, global_batch=asked["global_batch"], **kept)
