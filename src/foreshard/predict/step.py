"""Predict one step: check the request, price it, add memory, money, energy and an interval."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.kernels import kernel_evidence
from foreshard.catalog.training import TrainingConstants, training_constants
from foreshard.cost.energy import WAITING_POWER, energy_j
from foreshard.cost.money import money
from foreshard.errors import SpecError
from foreshard.predict.analytical import step_times
from foreshard.predict.batch import Case, build_batch
from foreshard.predict.interval import step_interval
from foreshard.predict.memory import plan_memory
from foreshard.spec.checks import check_plan
from foreshard.spec.cluster import Cluster
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import TIME_PARTS, Prediction
from foreshard.spec.timeline import Timeline

CATALOG_VERSION = "2026.11"
ENGINES = ("analytical", "graph")
FIDELITIES = ("datasheet", "zero-shot", "calibrated")


def predict(model: Model, cluster: Cluster, plan: Plan, **options: Any) -> Prediction:
    """Return the predicted step of a plan; options as in :func:`predict_timeline`."""
    return predict_timeline(model, cluster, plan, **options)[0]


def predict_timeline(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    *,
    framework: Framework | None = None,
    engine: str = "graph",
    costs: str = "formula",
    fidelity: str = "zero-shot",
    tokens: float | None = None,
    usd_per_device_hour: float | None = None,
    observed_step_s: float | None = None,
    constants: TrainingConstants | None = None,
    timeline: bool = True,
    checked: bool = True,
) -> tuple[Prediction, Timeline | None]:
    """Return the predicted step and, from the graph engine, when each task runs.

    Parameters
    ----------
    model, cluster, plan
    framework : Framework, optional
        Default: the one the plan names.
    engine : {'graph', 'analytical'}
    costs : {'formula'}
    fidelity : {'zero-shot', 'datasheet'}
        'datasheet' uses no fitted constant.
    tokens : float, optional
        Tokens of the whole run, for its total cost.
    usd_per_device_hour : float, optional
        Overrides catalog prices.
    observed_step_s : float, optional
        One measured step of this very run; the prediction is scaled to it (fidelity 'calibrated').
    constants : TrainingConstants, optional
        Instead of the shipped ones, as leave-out validation does.
    timeline : bool
    checked : bool
        False skips the rules of `spec.checks`: measured runs may break what a new plan must keep.

    Raises
    ------
    SpecError
        For an invalid plan or an unknown engine, cost source or fidelity.
    """
    started = time.perf_counter()
    _known("--engine", engine, ENGINES)
    _known("--costs", costs, ("formula",))
    _known("--fidelity", fidelity, FIDELITIES[:2])
    if checked:
        check_plan(plan, model, cluster)
    framework = framework or load_framework(plan.framework)
    if constants is None:
        constants = TrainingConstants.ideal() if fidelity == "datasheet" else training_constants()
    case = Case(model=model, cluster=cluster, plan=plan, framework=framework)
    parts, events = _times(case, engine, constants, fidelity, timeline)
    learned: tuple[str, ...] = ()
    if observed_step_s is not None:
        parts, learned = _corrected(parts, observed_step_s)
        fidelity = "calibrated"
    prediction = _assemble(
        case, parts, engine=engine, costs=costs, fidelity=fidelity, learned=learned, tokens=tokens,
        usd_per_device_hour=usd_per_device_hour, started=started,
    )  # fmt: skip
    return prediction, events


def _known(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(f"unknown {value!r}", key=key, value=value, rule=f"must be one of {', '.join(choices)}")


def _times(
    case: Case, engine: str, constants: TrainingConstants, fidelity: str, timeline: bool
) -> tuple[dict[str, float], Timeline | None]:
    """Return the parts of the step from one engine."""
    batch = build_batch([case], constants, fidelity=fidelity)
    if engine == "analytical":
        step = step_times(batch)
        longest = int(step.total.argmax())
        return {name: float(step.parts[name][longest]) for name in TIME_PARTS}, None
    from foreshard.predict.graph import graph_times

    return graph_times(case, batch, timeline=timeline)


def _corrected(parts: dict[str, float], observed_s: float) -> tuple[dict[str, float], tuple[str, ...]]:
    """Scale every part so that they sum to the measured step."""
    if not (isinstance(observed_s, int | float) and 0 < observed_s < 1e9):
        raise SpecError(
            f"{observed_s!r} is not a step time", key="--observed-step-s", value=observed_s,
            rule="must be seconds above 0",
        )  # fmt: skip
    ratio = observed_s / sum(parts.values())
    text = (
        f"one measured step of {observed_s:.4g} s: this cluster takes {ratio:.3f} of the time predicted "
        "without it; every part is scaled alike"
    )
    return {name: value * ratio for name, value in parts.items()}, (text,)


def _evidence(case: Case) -> str:
    ranks = case.plan.ranks
    found = {kernel_evidence(d, case.plan.precision) for d in {case.cluster.device_of(r).name: case.cluster.device_of(r) for r in ranks}.values()}  # noqa: E501
    for weakest in ("datasheet", "architecture", "fitted"):
        if weakest in found:
            return weakest
    return "datasheet"


def _mean(case: Case, value: Any) -> float:
    groups: dict[int, int] = {}
    start, bounds = 0, []
    for index, group in enumerate(case.cluster.nodes):
        bounds.append((start, start + group.num_devices, index))
        start += group.num_devices
    for rank in case.plan.ranks:
        for low, high, index in bounds:
            if low <= rank < high:
                groups[index] = groups.get(index, 0) + 1
    return sum(n * value(case.cluster.nodes[i].device) for i, n in groups.items())


def _bottleneck(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def _assemble(
    case: Case,
    parts: dict[str, float],
    *,
    engine: str,
    costs: str,
    fidelity: str,
    learned: tuple[str, ...],
    tokens: float | None,
    usd_per_device_hour: float | None,
    started: float,
) -> Prediction:
    """Join time parts, memory, money and energy into one Prediction."""
    model, cluster, plan = case.model, case.cluster, case.plan
    step_s = sum(parts.values())
    memory, _ = plan_memory(case)
    evidence = _evidence(case)
    interval = step_interval(case, step_s, parts, evidence=evidence, fidelity=fidelity)
    num_devices = len(plan.ranks)
    peak = _mean(case, lambda device: device.peak(plan.precision))
    peak16 = _mean(case, lambda device: device.peak_flops_per_s.get("bf16", 0.0))
    flops = model.flops_per_token(plan.seq_len, False) * plan.tokens
    causal = model.flops_per_token(plan.seq_len, True) * plan.tokens
    redone = parts["recompute"] / max(parts["compute"], 1e-12)
    tdp = _mean(case, lambda device: device.tdp_w) / num_devices
    return Prediction(
        step_time_s=step_s,
        step_time_interval_s=interval,
        interval=0.9,
        tokens_per_s=plan.tokens / step_s,
        samples_per_s=plan.global_batch / step_s,
        tokens_per_s_per_device=plan.tokens / step_s / num_devices,
        mfu=flops / (step_s * peak),
        mfu_causal=causal / (step_s * peak),
        mfu_bf16=flops / (step_s * peak16) if peak16 else None,
        hfu=flops * (1.0 + redone) / (step_s * peak),
        time_breakdown_s=parts,
        memory=memory,
        cost=money(cluster, step_s, plan.tokens, tokens=tokens, usd_per_device_hour=usd_per_device_hour),
        energy_j_per_step=energy_j(tdp, num_devices, parts),
        goodput=None,
        bottleneck=_bottleneck(parts),
        plan=plan,
        model=model.name,
        cluster=cluster.name,
        framework=case.framework.label,
        engine=engine,
        costs=costs,
        fidelity=fidelity,
        evidence=evidence,
        assumptions=(*learned, *_assumptions(case)),
        catalog_version=CATALOG_VERSION,
        predict_s=time.perf_counter() - started,
    )


def _assumptions(case: Case) -> tuple[str, ...]:
    """Return what was assumed to answer, in plain sentences."""
    framework = case.framework
    said = [
        *case.cluster.assumptions,
        *case.model.assumptions,
        f"framework {framework.label}: attention {framework.attention}, "
        f"{8 * framework.grad_bytes}-bit main gradients, "
        f"tensor overlap {'on' if framework.tp_overlap else 'off'}, "
        f"gradient overlap {'on' if framework.grad_overlap else 'off'}",
        "no data loading, checkpointing, evaluation or failures in the step",
        f"energy: devices at their power limit while computing, {WAITING_POWER:.0%} of it while waiting",
    ]
    if any(block.num_experts for block, _ in case.model.block_kinds()):
        said.append("experts: tokens spread over ranks as unevenly as in the measured runs")
    return tuple(said)
