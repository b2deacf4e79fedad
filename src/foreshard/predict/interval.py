"""Intervals around a predicted step time: split-conformal quantiles of residuals that shipped with us.

A residual is log(measured / predicted) of a run whose family was left out of the fit. Residuals are grouped
by class: the kind of model and kernels, and what kernel times rest on (`EVIDENCE`), each with residuals of
its own. The half width of an interval is the finite-sample quantile of the absolute residual of its class
(the sign of one family's shift says nothing about the next family), wider when the query is far from every
run of the class. `data/residuals.json` is written by `scripts/accuracy.py --residuals`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshard.catalog.shipped import shipped
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan

if TYPE_CHECKING:
    from foreshard.predict.batch import PlannedRun

LEVEL = 0.9
"""Level of `step_time_interval_s`."""
LEVELS = (0.5, 0.8, LEVEL, 0.95)
"""Levels of shipped quantiles; each interval lies inside the next."""
HOST_BOUND = 0.05  # share of host time from which an uncertain host floor moves the step
MIN_CLASS = 19  # smallest class: its 95 % quantile is still one of its residuals
_NARROW = ("fp8", "mxfp8", "nvfp4")
EVIDENCE = ("fitted", "table", "architecture", "learned", "datasheet", "unseen")
"""What a step rests on: kernels of the device by formulas or by a measured table, kernels of relatives,
curves learned over the datasheets of others, or the datasheet alone, where runs of the framework on the
architecture were in a fit; unseen where none was.
"""
SURER = {
    "table": ("fitted",),
    "architecture": ("fitted",),
    "learned": ("fitted",),
    "datasheet": ("fitted", "architecture"),
    "unseen": ("fitted", "architecture", "datasheet"),
}
"""Evidence that an interval is no narrower than."""
TRAINED = frozenset(("volta", "ampere", "ada", "hopper", "blackwell", "cdna3"))
"""Architectures with training runs among the residuals; kernels alone are measured on more."""
_TRACED_DEVICES = 8  # most devices of a measured network


def conformal_quantile(scores: ArrayLike, level: float) -> float:
    """Return the score that a new exchangeable score stays below with probability at least `level`.

    The ceil((n + 1) level)-th smallest of the n scores of held-out rows; infinite when n is too small.

    Source
    ------
    Vovk, Gammerman, Shafer 2005; Lei et al. 2018 (arXiv 1604.04173) section 2.2.

    Examples
    --------
    >>> conformal_quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], 0.9)
    9.0
    """
    ordered = np.sort(np.asarray(scores, float).ravel())
    rank = int(np.ceil((len(ordered) + 1) * level - 1e-9))
    return float(ordered[rank - 1]) if 0 < rank <= len(ordered) else float("inf")


def signed_quantiles(residuals: ArrayLike, level: float = LEVEL) -> tuple[float, float]:
    """Return (low, high) such that a new residual lies between with probability at least `level`.

    Each tail gets half of the miss, so a biased or skewed class gets an uneven interval.
    """
    values = np.asarray(residuals, float).ravel()
    tail = 1.0 - (1.0 - level) / 2.0
    return -conformal_quantile(-values, tail), conformal_quantile(values, tail)


def absolute_bounds(residuals: ArrayLike, level: float = LEVEL) -> tuple[float, float]:
    """Return (-q, q) such that a new absolute residual stays below q with probability at least `level`."""
    half = conformal_quantile(np.abs(np.asarray(residuals, float)), level)
    return -half, half


def neighbour_distance(
    queries: ArrayLike, data: ArrayLike, scale: ArrayLike, *, skip_self: bool = False
) -> NDArray[np.float64]:
    """Return the distance of each query to its nearest data row, root mean square of scaled features.

    With `skip_self` the queries are the data, and no row is its own neighbour.
    """
    a = np.atleast_2d(np.asarray(queries, float)) / np.asarray(scale, float)
    b = np.atleast_2d(np.asarray(data, float)) / np.asarray(scale, float)
    square = np.mean((a[:, None, :] - b[None, :, :]) ** 2, axis=2)
    if skip_self:
        np.fill_diagonal(square, np.inf)
    return np.sqrt(square.min(axis=1))


def widening(distance: ArrayLike, typical: float) -> NDArray[np.float64]:
    """Return the factor on an interval at a distance from the data: 1 up to `typical`, then a logarithm.

    `typical` is the 90 % quantile of distances between data rows; half as wide again per factor e beyond.
    """
    excess = np.maximum(np.asarray(distance, float) / max(typical, 1e-12), 1.0)
    return 1.0 + 0.5 * np.log(excess)


def spread(
    predicted: ArrayLike, bounds: tuple[float, float], factor: ArrayLike = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (low, high) of predictions whose class has these bounds of the log residual.

    `factor`, of `widening`, stretches both ends away from the prediction.
    """
    low, high = bounds
    value, wide = np.asarray(predicted, float), np.asarray(factor, float)
    return value * np.exp(low * wide), value * np.exp(high * wide)


Intervals = dict[float, tuple[float, float]]
"""(low, high) by level, each inside the next."""


def _around(predicted_s: float, bounds: Mapping[float, tuple[float, float]], factor: float) -> Intervals:
    """Return the intervals of a prediction whose log residual has these bounds by level."""
    ends = {level: spread(predicted_s, own, factor) for level, own in bounds.items()}
    return {level: (float(low), float(high)) for level, (low, high) in ends.items()}


def _farther(query: Sequence[float], points: ArrayLike, scale: ArrayLike, typical: float) -> float:
    """Return the factor on the interval of a query by its distance to the nearest of some points."""
    return float(widening(neighbour_distance([query], points, scale), typical)[0])


def features_of(model: Model, plan: Plan) -> tuple[float, ...]:
    """Return what a query is compared by, on a log2 scale.

    Parameters, hidden width, sequence, tokens of a rank, tp, pp, devices.
    """
    group = plan.groups[0]
    stage = group.stages[0]
    tokens = group.micro_batch / stage.inner_dp * plan.seq_len / stage.cp
    sizes = (
        model.num_params,
        model.hidden,
        plan.seq_len,
        tokens,
        stage.tp,
        len(group.stages),
        len(plan.ranks),
    )
    return tuple(float(np.log2(max(float(size), 1.0))) for size in sizes)


def interval_evidence(evidence: str, architectures: Iterable[str]) -> str:
    """Return what an interval rests on, of `EVIDENCE`: unseen where no run of the framework there was fitted.

    Kernels of a device may be measured while none of the constants between kernels and a step was.
    """
    return evidence if evidence in EVIDENCE and TRAINED.issuperset(architectures) else "unseen"


def kind_of(model: Model) -> str:
    """Return the kind of a model: lora, moe or dense."""
    if any(block.lora_targets for block in model.blocks):
        return "lora"
    return "moe" if any(block.num_experts for block in model.blocks) else "dense"


def class_of(
    model: Model,
    plan: Plan,
    framework: Framework,
    parts: Mapping[str, float],
    *,
    evidence: str = "fitted",
    fidelity: str = "zero-shot",
) -> tuple[str, ...]:
    """Return the classes of a prediction, the narrowest first.

    Separate attention kernels rest on other constants than flash attention, and a step whose host time shows
    is a class of its own. `evidence` is of `EVIDENCE`; other words say what of the framework or the devices
    no fit has seen. Without residuals of its evidence a class takes those of a datasheet, never those of
    something surer.
    """
    kind = kind_of(model)
    if kind == "dense" and parts.get("host", 0.0) >= HOST_BOUND * sum(parts.values()):
        kind = "host"
    if fidelity != "zero-shot":
        return (f"{fidelity}:{kind}", fidelity, "all")
    attention = "unfused" if framework.attention == "unfused" else "flash"
    width = "narrow" if plan.precision in _NARROW else "wide"
    path = (kind, attention, width)
    wider = [":".join(path[:n]) for n in range(len(path), 0, -1)] + ["all"]
    if evidence == "fitted":
        return (f"{wider[0]}:fitted", *wider)
    ends = dict.fromkeys((evidence if evidence in EVIDENCE else "unseen", "datasheet"))
    return tuple(f"{name}:{end}" for name in wider for end in ends)


@cache
def residual_classes() -> Mapping[str, Mapping[str, Any]]:
    """Return the shipped classes: bounds of the log residual by level, and the points of their runs."""
    data = shipped("residuals.json")
    return {
        name: entry | {"points": points_of(name, data["points"])} for name, entry in data["classes"].items()
    }


def points_of(name: str, points: Mapping[str, Sequence[Sequence[float]]]) -> list[Sequence[float]]:
    """Return the points of a class: those stored under its own name and under narrower ones.

    Runs predicted as if their device had not been measured are the same points as those of the class without
    evidence, and are not stored again.
    """
    wanted = name.rpartition(":")[0] if name.rpartition(":")[2] in SURER else name
    wanted = "" if wanted == "all" else wanted
    if name == "datasheet":  # the fidelity
        wanted = name
    inside = [own for own in points if own == wanted or not wanted or own.startswith(f"{wanted}:")]
    return [point for own in inside for point in points[own]]


def step_intervals(
    case: PlannedRun,
    step_time_s: float,
    parts: Mapping[str, float],
    *,
    evidence: str = "fitted",
    fidelity: str = "zero-shot",
) -> Intervals:
    """Return the intervals of a predicted step time, by level, from the narrowest class there is."""
    if fidelity == "zero-shot" and is_trained_here(case, evidence):
        return _intervals_of_steps(case, step_time_s)
    names = class_of(case.model, case.plan, case.framework, parts, evidence=evidence, fidelity=fidelity)
    return class_intervals(names, features_of(case.model, case.plan), step_time_s, residual_classes())


def class_intervals(
    names: Sequence[str],
    features: Sequence[float],
    predicted_s: float,
    classes: Mapping[str, Mapping[str, Any]],
) -> Intervals:
    """Return (low, high) of one prediction by level, from the first of its classes that the table has."""
    entry = next((classes[name] for name in names if name in classes), None)
    assert entry is not None, f"residuals.json has none of the classes {', '.join(names)}"
    factor = 1.0
    if entry.get("points"):
        factor = _farther(features, entry["points"], entry["scale"], entry["typical"])
    return _around(predicted_s, {float(level): ends for level, ends in entry["bounds"].items()}, factor)


@cache
def _steps() -> tuple[Mapping[str, Any], ...]:
    """Return residuals of training steps on one device, in no fit (`bench/bench_device.py --residuals`)."""
    return tuple(shipped("step_residuals.json")["cases"])


def is_trained_here(case: PlannedRun, evidence: str) -> bool:
    """Return whether a framework is in no fit, but steps of it were trained on the architectures of a plan.

    DDP with experts was not: it runs them in 32 bit, which is not what is predicted.
    """
    trained = {(step["framework"], step["kind"], step["architecture"]) for step in _steps()}
    own = case.framework.name, kind_of(case.model)
    return evidence == "unseen" and all((*own, device.arch) in trained for device in case.cluster.devices)


def _intervals_of_steps(case: PlannedRun, step_time_s: float) -> Intervals:
    """Return the intervals of a step by those trained on one device, by level.

    The quantiles of all such steps, and of those with experts or adapters where the model has them, whichever
    are wider; of too few steps for a quantile their largest residual. Sizes and numbers of devices away from
    the steps widen them.
    """
    own = kind_of(case.model)
    alike = [step for step in _steps() if step["kind"] == own]
    whole = residual_classes()["all"]
    points = [step["features"] for step in alike or _steps()]
    factor = _farther(features_of(case.model, case.plan), points, whole["scale"], whole["typical"])
    sizes = [[abs(step["residual"]) for step in steps] for steps in (_steps(), alike)]
    halves = {
        level: max(min(conformal_quantile(own, level), max(own, default=0.0)) for own in sizes)
        for level in LEVELS
    }
    return _around(step_time_s, {level: (-half, half) for level, half in halves.items()}, factor)


def calibrated_intervals(
    case: PlannedRun,
    step_time_s: float,
    parts: Mapping[str, float],
    *,
    residuals: Sequence[float],
    points: Sequence[Sequence[float]],
) -> Intervals:
    """Return the intervals of a step by constants fitted to measured steps of the cluster, by level.

    From `MIN_CLASS` steps on they are the quantiles of their residuals, each by constants fitted to the
    others, else those of shipped runs corrected by one measured step. They widen with the distance to the
    nearest measured step, in the units that distances between all shipped runs are measured in.
    """
    whole = residual_classes()["all"]
    factor = _farther(features_of(case.model, case.plan), points, whole["scale"], whole["typical"])
    few = step_intervals(case, step_time_s, parts, fidelity="calibrated")
    return _by_left_out(step_time_s, residuals, few, factor)


def _by_left_out(step_time_s: float, residuals: Sequence[float], few: Intervals, factor: float) -> Intervals:
    """Return the quantiles of steps left out, or `few` where those are too few, times a factor."""
    found = few
    if len(residuals) >= MIN_CLASS:
        found = _around(step_time_s, {level: absolute_bounds(residuals, level) for level in LEVELS}, 1.0)
    return {
        level: tuple(step_time_s * (end / step_time_s) ** factor for end in ends)  # type: ignore[misc]
        for level, ends in found.items()
    }


@cache
def _traced_residuals(reads_images: bool, trained: bool) -> tuple[float, ...]:
    """Return residuals of classic networks, in no fit but that of grouped convolutions (RegNet).

    One for each network, device, precision, layout and number of devices, by
    `scripts/accuracy_networks.py --residuals`. Those of a forward alone are of networks that read images
    (`scripts/accuracy_timm.py --forward-only --residuals`); others have those of training.
    """
    if reads_images and not trained:
        return tuple(case["residual"] for case in shipped("forward_residuals.json")["cases"])
    cases = shipped("network_residuals.json")["cases"]
    return tuple(case["residual"] for case in cases if case["images"] is reads_images)


@cache
def _traced_differences(reads_images: bool) -> tuple[float, ...]:
    """Return what residuals of a network on a device differ by in other layouts or on more devices.

    Such is the error of a prediction that is scaled to a measured step of another run.
    """
    alike: dict[tuple[str, ...], list[float]] = {}
    for case in shipped("network_residuals.json")["cases"]:
        if case["images"] is reads_images:
            alike.setdefault(tuple(case["case"][:4]), []).append(case["residual"])
    return tuple(one - other for found in alike.values() for one, other in permutations(found, 2))


def traced_intervals(
    step_time_s: float,
    *,
    evidence: str,
    num_devices: int,
    reads_images: bool,
    trained: bool = True,
    calibrated: bool = False,
) -> Intervals:
    """Return the intervals of a traced module's step, by level; `calibrated` to one measured step.

    They are by networks that read images, trained or forward alone, or by all others: words, tables and
    sound, whose kernels are less alike. Two distances widen them. More than the 8 devices of the measured
    networks: by half the logarithm of the doublings over those three. A device whose kernels were not
    measured: as it widens the intervals of language models, of which more ran on other devices.
    """
    doublings = math.log2(max(num_devices, 1)) / math.log2(_TRACED_DEVICES)
    table = residual_classes()
    chains = ([f"dense:flash:wide:{end}" for end in (rests, "datasheet")] for rests in ("fitted", evidence))
    known, own = (
        next(table[name]["bounds"][str(LEVEL)][1] for name in chain if name in table) for chain in chains
    )
    factor = float(widening(doublings, 1.0)) * own / known
    residuals = _traced_differences(reads_images) if calibrated else _traced_residuals(reads_images, trained)
    return _around(step_time_s, {level: absolute_bounds(residuals, level) for level in LEVELS}, factor)


def traced_features(
    parameter_bytes: float, flops: float, samples: float, devices: float
) -> tuple[float, ...]:
    """Return what a step of a traced module is compared by, on a log2 scale.

    Of the bytes of its parameters, FLOPs of a sample, samples that a device takes at once, and devices.
    """
    return tuple(math.log2(max(size, 1.0)) for size in (parameter_bytes, flops, samples, devices))


def calibrated_traced_intervals(
    step_time_s: float,
    features: Sequence[float],
    few: Intervals,
    *,
    residuals: Sequence[float],
    points: Sequence[Sequence[float]],
) -> Intervals:
    """Return the intervals of a traced module's step by terms fitted to measured steps, by level.

    As `calibrated_intervals`, with `few` in place of shipped runs; distances are in doublings, and typical is
    what nine of ten measured steps lie from the next, at least one.
    """
    scale = [1.0] * len(features)
    apart = neighbour_distance(points, points, scale, skip_self=True)
    typical = max(1.0, float(np.quantile(apart, LEVEL))) if len(points) > 1 else 1.0
    return _by_left_out(step_time_s, residuals, few, _farther(features, points, scale, typical))
