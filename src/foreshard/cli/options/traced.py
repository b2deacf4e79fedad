"""MODEL that is traced: a factory that returns a module with example inputs, or a classic network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foreshard.advise.request import flag_of
from foreshard.cli.options.varying import NOISE, noise_of
from foreshard.errors import SpecError
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.planner.result import PlanResult
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.plan import Plan
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.traced_module import TracedModule

_PREDICTS = {
    *("model", "cluster", "plan", "tp", "dp", "pp", "zero", "micro_batch", "global_batch", "schedule"),
    *("precision", "optimizer", "recompute", "engine", "costs", "fidelity", *NOISE),
}
_ARGUMENTS = {"model", "cluster"}
_PLANS = {"global_batch", "precision", "optimizer", "top", "budget_s", "engine", "objective", "max_tp"}


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
    from foreshard.spec.codec import whole

    if values.get("plan"):
        return {stage.tp for group in api.load_plan(values["plan"]).groups for stage in group.stages}
    return {whole(values.get("tp") or 1, key="--tp", name="tp")}


def degrees_on(cluster: str, max_tp: int | None) -> list[int]:
    """Return the tensor parallelism that `plan` tries: powers of two up to the devices of a node."""
    from foreshard import api

    most = max(nodes.per_node for nodes in api.load_cluster(cluster).nodes)
    most = most if max_tp is None else min(most, max_tp)
    return [2**power for power in range(1, most.bit_length())]


def predict(module: TracedModule, values: dict[str, Any], others: dict[str, Any]) -> Prediction:
    """Return the prediction of `predict` for a traced module."""
    from foreshard import api
    from foreshard.spec.degrees import plan_from_degrees

    _reject_unknown({**values, **others}, _PREDICTS)
    if values.get("costs") not in (None, "auto", "formula"):
        raise SpecError(
            f"costs {values['costs']} of a traced module",
            key="--costs",
            value=values["costs"],
            rule="Operations of a traced module are priced by formulas",
            fix="Leave out --costs, or profile the job and give the file that calibrate writes",
        )
    cluster = api.load_cluster(values["cluster"])
    if values.get("plan"):
        plan = api.load_plan(values["plan"])
    else:
        named = ("tp", "dp", "pp", "micro_batch", "global_batch", "schedule", "optimizer", "recompute")
        stated = {name: values[name] for name in named if values.get(name) is not None}
        made = plan_from_degrees(
            _cut_layers(module, stated.get("pp", 1)),
            cluster.num_devices,
            zero=values.get("zero") or 0,
            seq_len=1,
            sp=False,
            precision=module.precision,
            framework="ddp",
            **stated,
        )
        plan = _within(made, len(module.layers))
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

    _reject_unknown({**asked, **others}, _PLANS)
    if asked.get("engine") not in (None, "graph"):
        raise _refused("--engine", asked["engine"], _PLANS)
    if asked.get("objective", ("time",)) != ("time",):
        raise _refused("--objective", ",".join(asked["objective"]), _PLANS)
    kept = {name: asked[name] for name in ("optimizer", "top", "budget_s") if name in asked}
    return api.plan_traced(module, cluster, global_batch=asked["global_batch"], **kept)


def _cut_layers(module: TracedModule, pp: int) -> int:
    """Return the layers between the first and the last, which the cuts of a pipeline count."""
    most = max(len(module.layers) - 2, 1)
    if pp > most:
        rule = f"{module.name} can be cut into {number_of(len(module.layers), 'layer')}"
        raise SpecError(f"pp {pp}", key="--pp", value=pp, rule=rule, fix=f"Use at most {most}")
    return most


def _within(plan: Plan, num_layers: int) -> Plan:
    """Return the plan of a chain that may be shorter than three layers."""
    if num_layers > 2:
        return plan
    group = plan.groups[0]
    stages = tuple(replace(stage, layers=((0, num_layers),)) for stage in group.stages)
    return replace(plan, groups=(replace(group, stages=stages),))


def _reject_unknown(values: dict[str, Any], known: set[str]) -> None:
    for name, value in values.items():
        if name not in known and value not in (None, False, (), "none"):
            raise _refused(flag_of(name), str(value), known)


def _refused(flag: str, value: str, known: set[str]) -> SpecError:
    rule = f"A traced module takes {', '.join(sorted(map(flag_of, known - _ARGUMENTS)))}"
    what = f"{flag} is not taken for a traced module"
    return SpecError(what, key=flag, value=value, rule=rule, fix="Leave it out")
