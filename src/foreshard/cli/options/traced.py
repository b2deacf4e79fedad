"""MODEL that is traced: a factory that returns a module with example inputs, or a classic network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreshard.cli.options.varying import noise_of

if TYPE_CHECKING:
    from foreshard.planner.result import PlanResult
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.traced_module import TracedModule


def to_predict(values: dict[str, Any]) -> TracedModule | None:
    """Return the module that MODEL names, traced as `predict` is asked; None for one that is not traced."""
    from foreshard import api
    from foreshard.advise import traced_request
    from foreshard.profile.networks.catalog import is_traced

    if not is_traced(values["model"]):
        return None
    plan = api.load_plan(values["plan"]) if values.get("plan") else None
    return api.trace(values["model"], **traced_request.traced_as(plan, values))


def to_plan(model: str, cluster: str, asked: dict[str, Any]) -> TracedModule | None:
    """Return the module that MODEL names, traced as `plan` is asked; None for one that is not traced."""
    from foreshard import api
    from foreshard.advise import traced_request
    from foreshard.profile.networks.catalog import is_traced

    if not is_traced(model):
        return None
    return api.trace(model, **traced_request.searched_as(api.load_cluster(cluster), asked))


def predict(module: TracedModule, values: dict[str, Any], others: dict[str, Any]) -> Prediction:
    """Return the prediction of `predict` for a traced module."""
    from foreshard import api
    from foreshard.advise import traced_request

    traced_request.check_predicts({**values, **_stated(others)})
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

    traced_request.check_plans({**asked, **_stated(others)})
    kept = {name: asked[name] for name in ("optimizer", "top", "budget_s") if name in asked}
    return api.plan_traced(module, cluster, global_batch=asked["global_batch"], **kept)


def _stated(others: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given of those that hold nothing where they were not."""
    return {name: value for name, value in others.items() if value}
