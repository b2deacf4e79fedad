"""A step of a traced module: the plan that degrees and options mean, and its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshard.errors import SpecError
from foreshard.spec.degrees import plan_from_degrees
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.catalog.training import Calibration
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.device import Device
    from foreshard.spec.plan import Plan
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.traced_module import TracedModule
    from foreshard.spec.variation import Noise

STATED_DEGREES = ("tp", "dp", "pp", "micro_batch", "global_batch", "schedule", "optimizer", "recompute")
"""What may be stated of a plan in words."""
FRAMEWORK = "ddp"
"""Whose rules and options a traced module is trained by."""
_PASSES = ("forward_s", "backward_s")


def predict_traced(
    module: TracedModule,
    cluster: Cluster,
    plan: Plan,
    *,
    fidelity: str = "zero-shot",
    engine: str = "graph",
    noise: Noise | None = None,
    tokens: float | None = None,
    speeds: Mapping[str, float] | None = None,
    observed_step_s: float | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Return the prediction of a step of a traced module.

    Parameters
    ----------
    module : TracedModule
    cluster : Cluster
    plan : Plan
        Cuts the chain of traced layers. Its tensor parallelism is one that the module was traced for.
    fidelity : {'zero-shot', 'datasheet'}
    engine : {'graph', 'event'}
    noise : Noise, optional
        How ranks differ (event engine).
    tokens : float, optional
        Of the whole run, each a sample.
    speeds : mapping, optional
        Parts of the step that are so many times as fast, a question of what if.
    observed_step_s : float, optional
        One measured step of this plan, which corrects the prediction.
    calibration : Calibration, optional
        Of steps of traced modules (`catalog.training.load_calibration`).
    """
    from foreshard.predict.measured.engine import predict_measured as predicted
    from foreshard.predict.measured.traced import costs_under

    slower = None
    if calibration is not None:
        from foreshard.predict.step import check_calibration

        check_calibration(calibration, plan, cluster, fidelity)
        slower = calibration.of_operations
    costs = costs_under(module, cluster, plan, fidelity=fidelity, speeds=speeds, slower=slower)
    asked = {"tokens": tokens, "observed_step_s": observed_step_s}
    return predicted(costs, cluster, plan, engine=engine, noise=noise, calibration=calibration, **asked)


def plan_of(module: TracedModule, cluster: Cluster, values: Mapping[str, Any]) -> Plan:
    """Return the plan that stated degrees and options mean.

    Raises
    ------
    SpecError
        For more stages than the chain has layers.
    """
    stated = {name: values[name] for name in STATED_DEGREES if values.get(name) is not None}
    stated = _whole_share(cluster, stated)
    made = plan_from_degrees(
        _cut_layers(module, stated.get("pp", 1)),
        cluster.num_devices,
        zero=values.get("zero") or 0,
        seq_len=1,
        sp=False,
        precision=module.precision,
        framework=FRAMEWORK,
        **stated,
    )
    return _within(made, len(module.layers))


def _whole_share(cluster: Cluster, stated: dict[str, Any]) -> dict[str, Any]:
    """Return what is stated, with a device's share of a stated batch as the micro-batch if none is.

    So loops that accumulate no gradients train; a pipeline needs several micro-batches.
    """
    if stated.get("micro_batch") or not stated.get("global_batch") or stated.get("pp", 1) > 1:
        return stated
    replicas = stated.get("dp") or max(cluster.num_devices // stated.get("tp", 1), 1)
    share, rest = divmod(stated["global_batch"], replicas)
    return stated if rest or share < 1 else stated | {"micro_batch": share}


def _cut_layers(module: TracedModule, pp: int) -> int:
    """Return the layers between the first and the last, which the cuts of a pipeline count."""
    most = max(len(module.layers) - 2, 1)
    if pp > most:
        chain = number_of(len(module.layers), "layer")
        what = f"{number_of(pp, 'stage')} of {module.name}, a chain of {chain}"
        rule = "--pp gives every stage a layer beside the first and the last of the chain"
        fix = f"Use at most {most}, or give --plan, whose stages may hold any layers"
        raise SpecError(what, key="--pp", value=pp, rule=rule, fix=fix)
    return most


def _within(plan: Plan, num_layers: int) -> Plan:
    """Return the plan of a chain that may be shorter than three layers."""
    if num_layers > 2:
        return plan
    group = plan.groups[0]
    stages = tuple(replace(stage, layers=((0, num_layers),)) for stage in group.stages)
    return replace(plan, groups=(replace(group, stages=stages),))


def pass_seconds(module: TracedModule, device: Device, samples: int) -> tuple[float, float]:
    """Return the seconds of a forward on one device, and of a forward with its backward.

    Parameters
    ----------
    module : TracedModule
    device : Device
    samples : int
        That it takes at once.

    Raises
    ------
    SpecError
        If the device has no rate for the module's precision.
    """
    from foreshard.predict.measured.traced import traced_costs
    from foreshard.predict.tasks.host import joined_s

    costs = traced_costs(module, [device], micro_batches=[samples])
    whole = (0, len(module.layers))
    device_s = np.array([costs.work_s(device.name, whole, name, samples) for name in _PASSES]).cumsum()
    host_s = costs.launches_s(device.name, samples)[-1].cumsum()
    forward_s, both_s = joined_s(device_s, host_s, costs.host_sharpness).tolist()
    return forward_s, both_s
