"""A step predicted from measured costs: the program of `lowering`, executed and read rank by rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

from foreshard.catalog.training import Calibration
from foreshard.cost.money import money
from foreshard.errors import SpecError
from foreshard.predict.interval import calibrated_traced_intervals, traced_features, traced_intervals
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.lowering import MeasuredStep, lower_measured
from foreshard.predict.measured.memory import measured_memory
from foreshard.predict.measured.noise import step_distribution
from foreshard.predict.step import (
    ENGINES,
    calibrated_words,
    check_noise,
    observed_words,
    scaled_parts,
    weakest_evidence,
)
from foreshard.sim import contention, critical_path
from foreshard.sim.contention import Phases, SharedNetwork
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import check_amount, one_of
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import TIME_PARTS, Prediction
from foreshard.spec.variation import Noise
from foreshard.units import number_of

TRACED_FRAMEWORK = "ddp"
"""What runs a traced module."""
COVERAGE = 0.9  # of the interval: between the 5th and the 95th percentile
_FORMULA_ASSUMPTIONS = (
    "operations as traced, each a kernel of its own that the host launches: nothing is fused or compiled",
    "in 16 bit: activations and products in 16, parameters, gradients and optimizer in 32 (mixed precision)",
    "gradients are summed in buckets of 25 MiB while the backward goes on, as DistributedDataParallel does",
    "memory: of parameters, gradients, optimizer and activations; not what the process takes besides",
    "interval: errors of classic networks on 1 to 8 devices, whatever the module is; wider on more devices "
    "and on devices whose kernels were not measured",
    "reading data is not timed",
    "a token is a sample",
)
_SHARDED_ASSUMPTIONS = (
    "zero 3: each layer of the chain is gathered by itself, for forward and backward of every micro-batch, "
    "the next one while it computes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Where the step goes on one rank, in seconds; `end_s` is their sum."""

    rank: int
    compute_s: float
    recompute_s: float
    host_s: float
    tensor_s: float
    waiting_s: float
    sync_s: float
    optimizer_s: float
    end_s: float


def predict_measured(
    costs: MeasuredCosts,
    cluster: Cluster,
    plan: Plan,
    *,
    tokens: float | None = None,
    engine: str = "graph",
    noise: Noise | None = None,
    observed_step_s: float | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Return the prediction of a step.

    Parameters
    ----------
    costs : MeasuredCosts
    cluster : Cluster
        Its devices were measured, or are stated to be slower by `costs.slow`.
    plan : Plan
        Cuts layers 0 to len(costs.layers).
    tokens : float, optional
        Of the whole run.
    engine : {'graph', 'event'}
    noise : Noise, optional
        How ranks differ; the step becomes a distribution, its time the mean (event engine).
    observed_step_s : float, optional
        One measured step of this plan, by which costs by formulas are corrected: all parts are scaled alike.
    calibration : Calibration, optional
        Measured steps that the terms of costs by formulas were fitted to.

    Raises
    ------
    SpecError
        For amounts that are no numbers above 0, a plan or noise that the costs cannot price, or an engine
        without tasks.
    """
    started = time.perf_counter()
    check_amount("--tokens", tokens)
    check_amount("--observed-step-s", observed_step_s)
    (step, times), distribution = executed(costs, cluster, plan, engine), None
    check_noise(noise, engine)
    critical = max(_rank_times(step, times), key=lambda r: (r.end_s, -r.rank))
    step_s = alike_s = times.makespan_s
    if noise is not None:
        distribution = step_distribution(step, noise, alike_s)
        step_s = distribution.mean_s
    parts = dict.fromkeys(TIME_PARTS, 0.0) | {
        "compute": critical.compute_s,
        "recompute": critical.recompute_s,
        "tensor_comm": critical.tensor_s,
        "bubble": critical.waiting_s,
        "data_comm": critical.sync_s,
        "optimizer": critical.optimizer_s,
        "host": critical.host_s + alike_s - critical.end_s,
        "straggler": step_s - alike_s,
    }
    fidelity = "zero-shot" if costs.by_formula else "calibrated"
    learned: tuple[str, ...] = ()
    bounds = calibration
    if calibration is not None:
        fidelity, learned = "calibrated", calibrated_words(calibration, TRACED_FRAMEWORK)
    if observed_step_s is not None:
        before = _intervals(costs, cluster, plan, step_s, calibration=calibration)[COVERAGE]
        learned += (observed_words(step_s, before, observed_step_s),)
        bounds = None  # a step of this very plan says more
        fidelity, step_s = "calibrated", float(observed_step_s)
        parts = scaled_parts(parts, step_s)
    samples_per_s = plan.global_batch / step_s
    tokens_per_s = samples_per_s * costs.tokens_per_sample
    total = tokens / tokens_per_s if tokens else None
    used = _utilisation(costs, cluster, plan, step_s, costs.precision) or 0.0
    calibrated = observed_step_s is not None
    intervals = _intervals(costs, cluster, plan, step_s, calibrated=calibrated, calibration=bounds)
    return Prediction(
        step_time_s=step_s,
        step_time_interval_s=intervals[COVERAGE],
        step_time_intervals_s=intervals,
        interval=COVERAGE,
        tokens_per_s=tokens_per_s,
        samples_per_s=samples_per_s,
        tokens_per_s_per_device=tokens_per_s / len(plan.ranks),
        mfu=used,
        mfu_causal=used,
        mfu_bf16=_utilisation(costs, cluster, plan, step_s, "bf16"),
        hfu=used,
        time_breakdown_s=parts,
        memory=measured_memory(costs, cluster, plan),
        cost=money(
            cluster.in_use(plan.ranks),
            step_s,
            plan.global_batch * costs.tokens_per_sample,
            tokens=tokens,
            num_devices=len(plan.ranks),
        ),
        energy_j_per_step=None,
        goodput=None,
        run_time_s=total,
        bottleneck=f"{max(parts, key=lambda part: parts[part])} on rank {critical.rank}",
        plan=plan,
        model=costs.model,
        cluster=cluster.name,
        framework=plan.framework if costs.by_formula else "foreshard",
        step_time_distribution=distribution,
        engine=engine,
        costs="formula" if costs.by_formula else costs.path,
        cost_sources={"formula" if costs.by_formula else "measured": 1.0},
        fidelity=fidelity,
        assumptions=(*learned, *_assumptions(costs, cluster, plan)),
        evidence=_evidence(costs, cluster, plan),
        predict_s=time.perf_counter() - started,
    )


def _intervals(
    costs: MeasuredCosts,
    cluster: Cluster,
    plan: Plan,
    step_s: float,
    *,
    calibrated: bool = False,
    calibration: Calibration | None = None,
) -> dict[float, tuple[float, float]]:
    """Return the intervals of a step by level.

    Of traced modules by the steps of a calibration, without one by published runs; else by the profile.
    """
    if not costs.by_formula:
        return {COVERAGE: (step_s * costs.spread[0], step_s * costs.spread[1])}
    found = traced_intervals(
        step_s,
        evidence=_evidence(costs, cluster, plan),
        num_devices=len(plan.ranks),
        reads_images=costs.reads_images,
        trained=costs.trained,
        calibrated=calibrated or calibration is not None,
    )
    if calibration is None:
        return found
    features = step_features(costs, plan)
    return calibrated_traced_intervals(
        step_s, features, found, residuals=calibration.residuals, points=calibration.points
    )


def step_features(costs: MeasuredCosts, plan: Plan) -> tuple[float, ...]:
    """Return what a step of a traced module is compared to measured ones by (`traced_features`)."""
    num_bytes = sum(layer.parameter_bytes for layer in costs.layers)
    samples = float(plan.groups[0].micro_batch)
    return traced_features(num_bytes, costs.flops_per_sample, samples, float(len(plan.ranks)))


def executed(
    costs: MeasuredCosts, cluster: Cluster, plan: Plan, engine: str = "graph"
) -> tuple[MeasuredStep, critical_path.TaskTimes]:
    """Return the tasks of a step and when they run: by the longest path, or from event to event.

    Raises
    ------
    SpecError
        As of `predict_measured`.
    """
    _check(costs, cluster, plan)
    _check_engine(engine)
    _check_schedules(plan)
    step = lower_measured(costs, cluster, plan)
    if engine == "graph":
        return step, critical_path.run(step.program)
    return step, contention.run(step.program, Phases.alone(step.program), SharedNetwork()).times


def _check_engine(engine: str) -> None:
    if engine == "analytical":
        raise SpecError(
            "the analytical engine has no tasks",
            key="--engine",
            value=engine,
            rule="Measured and traced layers are executed in the order of the schedule",
            fix="Use --engine graph or --engine event",
        )
    one_of(engine, ENGINES, key="--engine", name="engine", exact=True)


def _check_schedules(plan: Plan) -> None:
    if any(group.schedule == "dualpipe" for group in plan.groups):
        raise SpecError(
            "schedule dualpipe with measured costs",
            key="schedule",
            value="dualpipe",
            rule="It keeps two copies of every layer, whose gradients measured and traced layers do not sum",
            fix="Use dualpipev or zbv, which keep one",
        )


def _utilisation(
    costs: MeasuredCosts, cluster: Cluster, plan: Plan, step_s: float, precision: str
) -> float | None:
    """Return FLOPs over the peaks of the devices; None where either is not known."""
    devices = [cluster.device_of(rank) for rank in plan.ranks]
    if not costs.flops_per_sample or not all(device.supports(precision) for device in devices):
        return None
    peak = sum(device.peak(precision) for device in devices)
    return costs.flops_per_sample * plan.global_batch / (step_s * peak)


def _evidence(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> str:
    """Return what the seconds rest on: timed layers, or the weakest of the devices' kernel curves."""
    if not costs.by_formula:
        return f"layers timed on {costs.machine or 'this machine'}"
    return weakest_evidence((cluster.device_of(rank) for rank in plan.ranks), costs.precision)


def step_seconds(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> float:
    """Return the time of a step alone."""
    return critical_path.run(lower_measured(costs, cluster, plan).program).makespan_s


def rank_times(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> list[RankTimes]:
    """Return where the step goes on every rank of the plan."""
    step = lower_measured(costs, cluster, plan)
    return _rank_times(step, critical_path.run(step.program))


def _rank_times(step: MeasuredStep, times: critical_path.TaskTimes) -> list[RankTimes]:
    found = []
    for rank, tasks in sorted(step.ranks.items()):
        done_s = float(times.end_s[list(tasks.gradients.values())].max())
        busy_s = sum(tasks.work_s.values())
        synced_s, end_s = float(times.start_s[tasks.optimizer]), float(times.end_s[tasks.optimizer])
        waiting_s, sync_s = done_s - busy_s, synced_s - done_s
        if abs(waiting_s) < 1e-12 * done_s:  # rounding of sums is not time
            waiting_s = 0.0
        if tasks.alone:  # a stage alone waits for nothing but its values
            waiting_s, sync_s = 0.0, sync_s + waiting_s
        found.append(
            RankTimes(
                rank=rank,
                **tasks.work_s,
                waiting_s=waiting_s,
                sync_s=sync_s,
                optimizer_s=end_s - synced_s,
                end_s=end_s,
            )
        )
    return found


def _assumptions(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    if costs.by_formula:
        sharded = any(stage.zero >= 3 for group in plan.groups for stage in group.stages)
        degrees = {stage.tp for group in plan.groups for stage in group.stages}
        of_parts = [note for tp in sorted(degrees) for note in costs.part_notes.get(tp, ())]
        of_shards = _SHARDED_ASSUMPTIONS if sharded else ()
        return (*cluster.assumptions, *_FORMULA_ASSUMPTIONS, *costs.notes, *of_parts, *of_shards)
    slow = {name: factor for name, factor in costs.slow.items() if factor != 1.0}
    low, high = costs.spread
    links = costs.links.between(apart=cluster.num_nodes > 1)
    said = [
        f"seconds of the {costs.clock} clock, layers timed one after another",
        "MFU is not known: measured devices have no stated peak",
        f"interval: how rounds and passes of the profile differ ({low:.3f} to {high:.3f} of the prediction)",
        "memory: of parameters, gradients, optimizer and activations; not what the process takes besides",
        "links as the cluster states them"
        if links is None
        else f"links as measured; sizes are {100 * links.relative_error:.0f} % off the fit (median)",
        *(cluster.assumptions if links is None else ()),
    ]
    if any(group.sp and stage.tp > 1 for group in plan.groups for stage in group.stages):
        said.append("sp: work and memory of layers as timed without it; messages between stages in parts")
    if plan.precision != costs.precision:
        said.append(f"layers as profiled in {costs.precision}, not in the plan's {plan.precision}")
    if slow:
        said.append("devices stated as slower: " + ", ".join(f"{k} x{v:g}" for k, v in sorted(slow.items())))
    return tuple(said)


def _check(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> None:
    """Raise SpecError for a plan whose stages were not measured."""

    def wrong(what: str, key: str, value: int, rule: str, fix: str | None = None) -> SpecError:
        return SpecError(what, file=costs.path, key=key, value=value, rule=rule, fix=fix)

    layers, measured, most = plan.groups[0].num_layers, len(costs.layers), max(plan.ranks)
    if layers != measured:
        what = f"the plan splits {layers} layers, {measured} were measured"
        rule = "A plan holds every layer of the model"
        raise wrong(what, "groups.stages.layers", layers, rule, f"Cut 0..{measured}")
    degrees = sorted({stage.tp for group in plan.groups for stage in group.stages} - {1})
    if len(degrees) > 1:
        what = f"tp {' and '.join(map(str, degrees))} in one plan"
        rule = "Measured costs price stages of one tp above 1, beside stages of tp 1"
        raise wrong(what, "groups.stages.tp", degrees[-1], rule)
    if most >= cluster.num_devices:
        what = f"the plan uses rank {most}, the cluster has {number_of(cluster.num_devices, 'device')}"
        raise wrong(what, "ranks", most, "Ranks are 0 to N - 1")
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            key = f"groups[{g}].stages[{s}]"
            if stage.cp * stage.ep > 1:
                rule = "Measured costs price stages of data- and tensor-parallel ranks"
                raise wrong("cp or ep above 1", key, stage.cp * stage.ep, rule)
            if stage.zero >= 3 and stage.inner_dp > 1:
                if not costs.by_formula:
                    rule = "Measured costs do not price the gathering of values"
                    raise wrong("zero 3", f"{key}.zero", stage.zero, rule, "Use zero 0, 1 or 2")
                if len(group.stages) > 1 or len(plan.groups) > 1:
                    rule = "The gathering of values is priced for one stage that all ranks share"
                    fix = "Use zero 0, 1 or 2, or no pipeline and one group"
                    raise wrong("zero 3 beside other stages", f"{key}.zero", stage.zero, rule, fix)
