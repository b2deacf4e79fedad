"""Predict one step: check the request, price it, add memory, money, energy and an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from foreshard.catalog.devices import catalog_version
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.kernels import COSTS, Tables, kernel_evidence
from foreshard.catalog.stacks import check_attention, not_measured
from foreshard.catalog.training import Calibration, TrainingConstants, training_constants
from foreshard.comm.jobs.job import TrainingJob
from foreshard.cost.money import money
from foreshard.errors import SpecError
from foreshard.predict.analytical.engine import slowest_parts, step_times
from foreshard.predict.assumptions import assumptions
from foreshard.predict.batch import Batch, PlannedRun, build_batch
from foreshard.predict.explanation import PART_WORDS, explanations
from foreshard.predict.goodput import run_efficiency
from foreshard.predict.graph.edits import check_speeds, words_of
from foreshard.predict.interval import (
    LEVEL,
    calibrated_intervals,
    interval_evidence,
    is_trained_here,
    step_intervals,
)
from foreshard.predict.memory import plan_memory
from foreshard.predict.rates import devices_of, rates_of
from foreshard.predict.tasks.sources import source_shares, sources_text
from foreshard.spec.checks import check_plan
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import check_amount, one_of
from foreshard.spec.device import Device
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import CollectiveTimes, Prediction
from foreshard.spec.timeline import Timeline
from foreshard.spec.variation import Noise, Reliability, StepDistribution
from foreshard.units import number_of

ENGINES = ("analytical", "graph", "event")
NETWORKS = ("closed-form", "flow")
FIDELITIES = ("datasheet", "zero-shot", "calibrated")
MAX_GRAPH_OPS = 2_000_000
"""Forwards and backwards the graph engine takes on: about 10 s and 2 GB."""

_PHASES_OF_LAYER = 12
"""Most phases of a layer, both passes: computation, exposed and hidden transfers of two classes."""


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
    network: str | None = None,
    costs: str | Tables = "auto",
    fidelity: str = "zero-shot",
    noise: Noise | None = None,
    host_thread: bool = False,
    reliability: Reliability | None = None,
    tokens: float | None = None,
    usd_per_device_hour: float | None = None,
    observed_step_s: float | None = None,
    speeds: Mapping[str, float] | None = None,
    other_jobs: tuple[TrainingJob, ...] = (),
    bursts: bool = False,
    constants: TrainingConstants | None = None,
    calibration: Calibration | None = None,
    timeline: bool = True,
    checked: bool = True,
) -> tuple[Prediction, Timeline | None]:
    """Return the predicted step and, from the graph engine, when each task runs.

    Parameters
    ----------
    model, cluster, plan
    framework : Framework, optional
        Default: the one the plan names.
    engine : {'graph', 'analytical', 'event'}
    network : {'closed-form', 'flow'}, optional
        'flow': all transfers of the step share links and NICs in one flow simulation, the default of the
        event engine; 'closed-form': each takes its own time, the default of the others.
    costs : {'auto', 'formula', 'learned'} or KernelTables
        Where kernel times come from: fitted formulas; learned corrections where they are better on devices
        left out; 'auto' takes these only on devices that no constant of the formulas was fitted on.
    fidelity : {'zero-shot', 'datasheet'}
        'datasheet' uses no fitted constant.
    noise : Noise, optional
        How ranks differ: the step becomes a distribution, its time the mean (event engine).
    host_thread : bool
        Launches run on a thread of the host, ahead of the device, not as parts of each pass (event engine).
    reliability : Reliability, optional
        What interrupts the run; its goodput is predicted.
    tokens : float, optional
        Tokens of the whole run, for its total cost.
    usd_per_device_hour : float, optional
        Overrides catalog prices.
    observed_step_s : float, optional
        One measured step of this very run; the prediction is scaled to it (fidelity 'calibrated').
    speeds : mapping of str to float, optional
        What if these parts of a step, or classes of kernels, were so many times as fast (engine graph,
        closed-form).
    other_jobs : tuple of TrainingJob
        On other ranks of the cluster; links and NICs that both use carry theirs too (network flow).
    bursts : bool
        Other jobs send phase after phase, beginning with the step, rather than evenly (event engine).
    constants : TrainingConstants, optional
        Instead of the shipped ones, as leave-out validation does.
    calibration : Calibration, optional
        Constants moved to measured steps of these devices (fidelity 'calibrated').
    timeline : bool
    checked : bool
        False skips the rules of `spec.checks`: measured runs may break what a new plan must keep.

    Raises
    ------
    SpecError
        For an invalid plan or an unknown engine, cost source or fidelity.
    """
    started = time.perf_counter()
    engine = one_of(engine, ENGINES, key="--engine", name="engine")
    network = checked_network(network, engine)
    check_noise(noise, engine)
    _check_options(
        plan, engine, network, host_thread=host_thread, speeds=speeds, jobs=other_jobs, bursts=bursts
    )
    check_speeds(speeds or {})
    checked_costs(costs, fidelity)
    fidelity = one_of(fidelity, FIDELITIES[:2], key="--fidelity", name="fidelity")
    check_amount("--tokens", tokens)
    check_amount("--usd-per-device-hour", usd_per_device_hour, zero=True)
    check_amount("--observed-step-s", observed_step_s)
    if checked:
        check_plan(plan, model, cluster)
    if plan.attention is not None:
        check_attention(plan.attention, cluster.devices)
    framework = framework or load_framework(plan.framework)
    if calibration is not None:
        check_calibration(calibration, plan, cluster, fidelity)
        constants = calibration.training
    if constants is None:
        constants = TrainingConstants.ideal() if fidelity == "datasheet" else training_constants()
    case = PlannedRun(
        model=model,
        cluster=cluster,
        plan=plan,
        framework=framework,
        costs=costs,
        other_jobs=other_jobs,
        bursts=bursts,
    )
    batch = build_batch([case], constants, fidelity=fidelity)
    found = _times(case, batch, engine, network, timeline, noise, speeds, host_thread)
    prediction = _assemble(
        case,
        batch,
        found,
        engine=engine,
        network=network,
        fidelity=fidelity,
        reliability=reliability,
        tokens=tokens,
        usd_per_device_hour=usd_per_device_hour,
        observed_step_s=observed_step_s,
        calibration=calibration,
    )
    notes = []
    if speeds:
        said = ", ".join(f"{words_of(name)} {factor:g} times as fast" for name, factor in speeds.items())
        notes.append(f"what if: {said}")
    if host_thread:
        notes.append("launches run ahead of the device, by at most 1,024 kernels of 5 us on the host")
    if other_jobs:
        how = "in bursts, their iterations begin with the step" if bursts else "evenly over their iterations"
        notes.append(f"other jobs send their bytes {how}: {', '.join(job.name for job in other_jobs)}")
    assumed = (*notes, *prediction.assumptions)
    return replace(prediction, assumptions=assumed, predict_s=time.perf_counter() - started), found.timeline


def check_calibration(calibration: Calibration, plan: Plan, cluster: Cluster, fidelity: str) -> None:
    """Refuse constants of other devices, and any where none may be fitted."""
    if fidelity == "datasheet":
        raise SpecError(
            "calibrated constants at the fidelity of a datasheet",
            key="--costs",
            value=calibration.path,
            rule="--fidelity datasheet uses no fitted constant",
            fix="Leave out one of --costs and --fidelity",
        )
    for name in dict.fromkeys(cluster.device_of(rank).name for rank in plan.ranks):
        if name not in calibration.devices:
            raise SpecError(
                f"no step on {name} was measured",
                file=calibration.path or None,
                key="devices",
                value=name,
                rule=f"The constants are of steps on {', '.join(calibration.devices)}",
                fix="Calibrate on steps of this device too, or leave out --costs",
            )


def _tabled_words(shares: Mapping[str, float], devices: list[str]) -> str:
    """Return how much of a step the measured table gave, in one sentence."""
    if "table" in shares:
        return (
            f"kernels as measured within the sizes of the table ({shares['table']:.0%} of the step), as "
            "much slower in a step as the formula's; beyond them and for other kernels the next source"
        )
    return f"the table has no kernel of this step on {' and '.join(dict.fromkeys(devices))}: it gave nothing"


def calibrated_words(calibration: Calibration, framework: str) -> tuple[str, ...]:
    """Return what was calibrated, in a sentence or two."""
    moved = ", ".join(
        f"{term.name} x{term.factor:.3f} ({term.interval[0]:.3f} to {term.interval[1]:.3f})"
        for term in calibration.terms
        if term.identified
    )
    steps = number_of(len(calibration.residuals), "measured step")
    said = [f"constants calibrated on {steps}: {moved or 'none is identified by them'}"]
    if framework not in calibration.frameworks:
        said.append(f"the calibrated steps ran {', '.join(calibration.frameworks)}, not {framework}")
    return tuple(said)


class _Times(NamedTuple):
    """The parts of a step, when its tasks run, what sharing does to transfers, and how the step varies."""

    parts: dict[str, float]
    timeline: Timeline | None = None
    collectives: tuple[CollectiveTimes, ...] = ()
    distribution: StepDistribution | None = None


def _times(
    case: PlannedRun,
    batch: Batch,
    engine: str,
    network: str,
    timeline: bool,
    noise: Noise | None,
    speeds: Mapping[str, float] | None,
    host_thread: bool,
) -> _Times:
    """Return what one engine finds of a step."""
    if engine == "analytical":
        return _Times(slowest_parts(step_times(batch, joined=True)))
    _check_size(case.plan, engine)
    if engine == "event":
        from foreshard.predict.event.engine import event_times

        return _Times(
            *event_times(
                case, batch, network=network, timeline=timeline, noise=noise, host_thread=host_thread
            )
        )
    from foreshard.predict.graph.engine import graph_times, shared_times

    if network == "flow":
        return _Times(*shared_times(case, batch, timeline=timeline))
    return _Times(*graph_times(case, batch, timeline=timeline, speeds=speeds))


def _check_options(
    plan: Plan,
    engine: str,
    network: str,
    *,
    host_thread: bool,
    speeds: Mapping[str, float] | None,
    jobs: tuple[TrainingJob, ...],
    bursts: bool,
) -> None:
    """Refuse what an engine or a network does not simulate."""
    job = jobs[0].name if jobs else None
    rules = (
        (
            host_thread and engine != "event",
            (f"a thread of the host under the {engine} engine", "--host-thread", None),
            "Launches are tasks beside those of the device in the event engine",
            "Use --engine event, or leave out --host-thread",
        ),
        (
            bool(speeds) and (engine != "graph" or network != "closed-form"),
            (f"speeds of tasks under the {network} {engine} engine", "--engine", engine),
            "What-if speeds are edits of the tasks of the engine graph, each transfer by itself",
            "Use --engine graph and --network closed-form, or leave the speeds out",
        ),
        (
            bool(jobs) and network != "flow",
            ("other jobs where transfers share no network", "--other-jobs", job),
            "The closed forms know one run by itself",
            "Add --network flow",
        ),
        (
            bursts and not jobs,
            ("bursts without other jobs", "--bursts", None),
            "Bursts are those of other jobs",
            "Add --other-jobs FILE, or leave it out",
        ),
        (
            bursts and engine != "event",
            (f"bursts in the {engine} engine", "--bursts", None),
            "Bursts are simulated with every micro-batch, from event to event",
            "Add --engine event",
        ),
        *(
            (
                engine == "analytical" and not closed_form_takes(**{name: value}),
                (f"{name} {value} under the analytical engine", name, value),
                "Its closed form gathers block by block, at most one ahead",
                "Use --engine graph or event",
            )
            for name, value in (("wrap", plan.wrap), ("prefetch", plan.prefetch))
        ),
        *(
            (
                rank in plan.ranks,
                (f"rank {rank} is one of the plan's and of {other.name!r}", "--other-jobs", other.name),
                "A device runs one job",
                "Give a plan file that leaves out its ranks, or the job other ranks",
            )
            for other in jobs
            for rank in other.ranks
        ),
    )
    for wrong, (what, key, value), rule, fix in rules:
        if wrong:
            raise SpecError(what, key=key, value=value, rule=rule, fix=fix)


def check_noise(noise: Noise | None, engine: str) -> None:
    """Refuse noise for an engine whose ranks are alike."""
    if noise is not None and engine != "event":
        raise SpecError(
            f"the {engine} engine has one rank for all that are alike",
            key="--engine",
            value=engine,
            rule="Ranks and steps that differ are simulated by the event engine",
            fix="Use --engine event, or leave out jitter and slow ranks",
        )


def checked_costs(costs: str | Tables, fidelity: str = "zero-shot") -> str | Tables:
    """Return a cost source of kernels, a name or measured tables, or raise SpecError."""
    if not isinstance(costs, str):
        if fidelity == "datasheet":
            what, rule = "measured tables at the fidelity of a datasheet", "It uses no measured kernel"
            raise SpecError(what, key="--costs", rule=rule, fix="Leave out one of --costs and --fidelity")
        return costs
    if costs not in COSTS:
        raise SpecError(
            f"unknown cost source {costs!r}",
            key="--costs",
            value=costs,
            rule=f"A cost source is {', '.join(COSTS)}, or the file that foreshard calibrate writes",
            fix="Give the path of that file, as in ./costs.json",
        )
    if costs == "learned" and fidelity == "datasheet":
        raise SpecError(
            "learned costs at the fidelity of a datasheet",
            key="--costs",
            value=costs,
            rule="--fidelity datasheet uses no fitted constant, and learned costs are fitted",
            fix="Leave out one of --costs and --fidelity",
        )
    return costs


def closed_form_takes(prefetch: Any = None, wrap: Any = None) -> bool:
    """Return whether the closed form of a step knows these units of FSDP: of one block, at most one ahead."""
    return prefetch in (None, 0, 1) and wrap in (None, 1)


def checked_network(network: str | None, engine: str) -> str:
    """Return the name of a network model that the engine has, its default where none is named."""
    if network is None:
        return "flow" if engine == "event" else "closed-form"
    name = one_of(network, NETWORKS, key="--network", name="network")
    if name == "flow" and engine == "analytical":
        raise SpecError(
            "the analytical engine has no tasks whose transfers could share a network",
            key="--network",
            value=network,
            rule="Flows are simulated for the tasks of the engines graph and event",
            fix="Use --engine graph or event, or --network closed-form",
        )
    return name


def graph_takes(plan: Plan, network: str = "closed-form") -> bool:
    """Return whether the program of a plan, or surely that of its flows, fits this machine's memory."""
    if network == "flow":
        from foreshard.sim.contention import MAX_PHASES

        sizes = {(group.num_micro_batches, group.num_layers) for group in plan.groups}
        if sum(_PHASES_OF_LAYER * math.prod(size) for size in sizes) > MAX_PHASES:
            return False
    return _num_ops(plan) <= MAX_GRAPH_OPS


def _num_ops(plan: Plan) -> int:
    """Return the forwards and backwards of a step; equal groups are one program."""
    sizes = {(g.num_micro_batches, len(g.stages), g.num_chunks) for g in plan.groups}
    return sum(2 * math.prod(size) for size in sizes)


def _check_size(plan: Plan, engine: str) -> None:
    num_ops = _num_ops(plan)
    if not graph_takes(plan):
        raise SpecError(
            f"{num_ops:,} forwards and backwards in one step",
            key="--engine",
            value=engine,
            rule=f"The {engine} engine lines up at most {MAX_GRAPH_OPS:,}",
            fix="Use --engine analytical, or a larger --micro-batch",
        )


def scaled_parts(parts: dict[str, float], step_s: float) -> dict[str, float]:
    """Return the parts, scaled alike so that they sum to the step."""
    ratio = step_s / sum(parts.values())
    return {name: value * ratio for name, value in parts.items()}


def observed_words(predicted_s: float, interval: tuple[float, float], observed_s: float) -> str:
    """Return what one measured step says of the prediction without it."""
    low, high = interval
    ratio = observed_s / predicted_s
    verdict = (
        "inside it"
        if low <= observed_s <= high
        else ("outside it: check that model, plan and framework are those of the run")
    )
    return (
        f"one measured step of {observed_s:.4g} s: this cluster takes {ratio:.3f} of the time "
        "predicted without it; every part is scaled alike, a timeline is drawn as predicted; "
        f"the prediction was {predicted_s:.4g} s, 90 % interval {low:.4g} to {high:.4g} s, "
        f"the measurement lies {verdict}"
    )


def weakest_evidence(devices: Iterable[Device], precision: str) -> str:
    """Return the weakest of what kernel times on some devices rest on."""
    found = {kernel_evidence(device, precision) for device in devices}
    return next((weakest for weakest in ("datasheet", "architecture") if weakest in found), "fitted")


def _bottleneck(parts: Mapping[str, float]) -> str:
    """Return the largest part in words, and the largest of what is no work of the model."""
    step = sum(parts.values())
    largest = max(parts, key=lambda name: parts[name])
    text = f"{PART_WORDS[largest]} ({parts[largest] / step:.0%} of the step)"
    rest = {name: value for name, value in parts.items() if name not in ("compute", largest)}
    second = max(rest, key=lambda name: rest[name])
    if largest == "compute" and rest[second] >= 0.05 * step:
        text += f", then {PART_WORDS[second]} ({rest[second] / step:.0%})"
    return text


def _assemble(
    case: PlannedRun,
    batch: Batch,
    found: _Times,
    *,
    engine: str,
    network: str,
    fidelity: str,
    reliability: Reliability | None,
    tokens: float | None,
    usd_per_device_hour: float | None,
    observed_step_s: float | None,
    calibration: Calibration | None,
) -> Prediction:
    """Join time parts, memory, money and energy into one Prediction."""
    plan, parts = case.stated, found.parts
    shares = source_shares(batch, parts)
    devices = [device for device, _ in devices_of(case)]
    kernels = weakest_evidence(devices, plan.precision)
    if any(block.scan_state for block, _ in case.model.block_kinds()):  # no kernel of a scan was measured
        kernels = "datasheet"
    if kernels == "fitted" and "table" in shares:
        kernels = "table"
    kernels = "learned" if "learned" in shares else kernels
    step_s = sum(parts.values())
    unmeasured = not_measured(case.framework, devices)
    evidence = unmeasured or kernels
    known = interval_evidence(evidence, {device.arch for device in devices})
    intervals = step_intervals(case, step_s, parts, evidence=known, fidelity=fidelity)
    learned: tuple[str, ...] = ()
    if fidelity == "zero-shot" and is_trained_here(case, known):
        learned = (f"interval: by steps of {case.framework.name} trained on one device, wider away from it",)
    if calibration is not None:
        learned, fidelity = calibrated_words(calibration, case.framework.label), "calibrated"
        intervals = calibrated_intervals(
            case, step_s, parts, residuals=calibration.residuals, points=calibration.points
        )
    if not isinstance(case.costs, str):
        learned += (_tabled_words(shares, [device.name for device in devices]),)
    if observed_step_s is not None:
        learned += (observed_words(step_s, intervals[LEVEL], float(observed_step_s)),)
        parts, step_s, fidelity = scaled_parts(parts, observed_step_s), float(observed_step_s), "calibrated"
        intervals = step_intervals(case, step_s, parts, evidence=evidence, fidelity=fidelity)
    memory, _ = plan_memory(case)
    num_devices = len(plan.ranks)
    rates, texts = rates_of(case, batch, parts, step_s)
    run = None if reliability is None else run_efficiency(case, step_s, reliability)
    paid_tokens = tokens if tokens is None or run is None else tokens / run.goodput
    return Prediction(
        step_time_s=step_s,
        step_time_interval_s=intervals[LEVEL],
        step_time_intervals_s=intervals,
        interval=LEVEL,
        tokens_per_s=plan.tokens / step_s,
        samples_per_s=plan.global_batch / step_s,
        tokens_per_s_per_device=plan.tokens / step_s / num_devices,
        **rates,
        time_breakdown_s=parts,
        memory=memory,
        cost=money(
            case.cluster.in_use(plan.ranks),
            step_s,
            plan.tokens,
            tokens=paid_tokens,
            usd_per_device_hour=usd_per_device_hour,
            num_devices=num_devices,
        ),
        goodput=None if run is None else run.goodput,
        run=run,
        run_time_s=None if paid_tokens is None else paid_tokens * step_s / plan.tokens,
        bottleneck=_bottleneck(parts),
        plan=plan,
        model=case.model.name,
        cluster=case.cluster.name,
        framework=case.framework.label,
        engine=engine,
        network=network,
        collectives=found.collectives,
        step_time_distribution=found.distribution,
        costs=" and ".join(shares),
        cost_sources=shares,
        fidelity=fidelity,
        evidence=evidence,
        assumptions=(*learned, *assumptions(case, goodput=run is not None)),
        explain=explanations(case, batch, parts, engine=engine, measured=observed_step_s is not None)
        | texts
        | {"cost_sources": sources_text(shares, case.costs)},
        catalog_version=catalog_version(),
    )
