"""A run to predict as the user states it, before it is a Plan, so that one thing in it can be changed.

A Request holds either degree flags or a plan file's Plan, never both. Changes (`advise.change`), advice
and reports all start from one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import as_chosen, cpu_offload, offers_of, running_level, switched, with_units
from foreshard.catalog.prices import Prices
from foreshard.catalog.stacks import check_attention
from foreshard.catalog.training import Calibration, TrainingConstants, training_constants
from foreshard.errors import SpecError
from foreshard.option_names import unknown_option
from foreshard.spec.adapters import with_adapters
from foreshard.spec.checks import check_plan
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import one_of
from foreshard.spec.degrees import plan_from_degrees
from foreshard.spec.framework import Framework
from foreshard.spec.model import Model
from foreshard.spec.plan import (
    ALGORITHMS,
    AUTO,
    COMM_OPTIONS,
    OF_FRAMEWORK,
    PRECISIONS,
    Plan,
    checked_buckets,
    checked_of_framework,
    checked_prefetch,
    checked_wrap,
    no_best_buckets,
)
from foreshard.spec.prediction import MEMORY_PARTS, Prediction
from foreshard.spec.timeline import Timeline
from foreshard.spec.variation import Noise, Reliability

if TYPE_CHECKING:
    from foreshard.catalog.kernels import Tables
    from foreshard.comm.jobs.job import TrainingJob
    from foreshard.predict.batch import PlannedRun

DEGREES = ("dp", "tp", "pp", "cp", "ep", "etp", "vpp")
OPTIONS = (
    "sp",
    "zero",
    "shard_size",
    "micro_batch",
    "global_batch",
    "seq_len",
    "recompute",
    "offload",
    "schedule",
    "precision",
    "optimizer",
    "framework",
    *OF_FRAMEWORK,
    *COMM_OPTIONS,
    "collectives",
    "buckets",
    "prefetch",
    "wrap",
)
_WRITTEN = (
    *("precision", "optimizer", "framework", *OF_FRAMEWORK, "seq_len"),
    *("collectives", "buckets", "prefetch", "wrap"),
)
"""Options that a plan has one field for."""
ASKED = (
    "engine",
    "network",
    "costs",
    "calibration",
    "fidelity",
    "noise",
    "host_thread",
    "reliability",
    "tokens",
    "usd_per_device_hour",
    "observed_step_s",
    "speeds",
    "other_jobs",
    "bursts",
)
"""What a request asks of the predictor, besides the run."""
COSTS = ("formula", "learned")
"""Sources of kernel times that are compared; auto takes one of them."""
CPU = "cpu"
"""Value of offload that means what the framework offloads under that name."""
SPLIT_EVENLY = (
    "the cluster mixes devices and flags split the work evenly: every stage and rank takes the same "
    "share, the fast wait for the slow; a plan file (--plan) can give groups their own shares"
)
_FLAGS = {"seq_len": "--seq", "precision": "--dtype", "overrides": "--set"}


def flag_of(name: str) -> str:
    """Return the flag of a degree or option.

    Examples
    --------
    >>> flag_of("seq_len"), flag_of("micro_batch")
    ('--seq', '--micro-batch')
    """
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def check_beside(plan: Plan | None, choices: Mapping[str, Any]) -> None:
    """Raise SpecError for degrees and options beside a plan, which states them itself."""
    stated = sorted(name for name, value in choices.items() if value is not None)
    if plan is not None and stated:
        what = f"a plan and {', '.join(map(flag_of, stated))} together"
        rule = "A plan file states degrees and options itself"
        fix = "Leave out the plan or the degrees and options"
        raise SpecError(what, key=flag_of(stated[0]), value=choices[stated[0]], rule=rule, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A run to predict: model, cluster, and how it is trained.

    `choices` holds the degrees and options that were stated, by their names in `DEGREES` and `OPTIONS`;
    what is not in it takes the default. With `plan`, read from `plan_file`, `choices` is empty. `lora` is
    RANK[:TARGET(+TARGET)*]: adapters on `model`, whose own weights are then frozen. `speeds` makes parts of
    the step so many times as fast, a question of what if. `other_jobs` run on other ranks of the cluster, and
    send evenly or in `bursts`.
    `prices` hold for what a change brings; the cluster has them already.
    """

    model: Model
    cluster: Cluster
    choices: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    plan_file: str | None = None
    lora: str | None = None
    engine: str = "graph"
    network: str | None = None
    costs: str | Tables = "auto"
    calibration: Calibration | None = None
    fidelity: str = "zero-shot"
    noise: Noise | None = None
    host_thread: bool = False
    reliability: Reliability | None = None
    tokens: float | None = None
    usd_per_device_hour: float | None = None
    observed_step_s: float | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)
    other_jobs: tuple[TrainingJob, ...] = ()
    bursts: bool = False
    prices: Prices | None = None

    def __post_init__(self) -> None:
        """Raise for a plan together with options that the plan already states."""
        check_beside(self.plan, self.choices)
        unknown = sorted(set(self.choices) - {*DEGREES, *OPTIONS})
        if unknown:
            raise unknown_option(unknown[0], (*DEGREES, *OPTIONS, *ASKED))

    @property
    def trained(self) -> Model:
        """The model as it is trained: with its adapters, if any."""
        if self.lora is not None:
            return with_adapters(self.model, self.lora)
        if self.plan is not None and self.plan.lora is not None:
            return with_adapters(self.model, self.plan.lora, key="lora", file=self.plan_file)
        return self.model

    @property
    def framework(self) -> Framework:
        """The framework that trains: the plan's, the one that was stated, or the default."""
        if self.plan is not None:
            return load_framework(self.plan.framework)
        stated = self.choices.get("framework") or "megatron-core"
        return load_framework(running_level(stated, self.choices.get("zero")))

    @property
    def switched(self) -> str:
        """The framework that the flags of the stated level switch to, in a sentence; empty where none."""
        stated, zero = self.choices.get("framework") or "megatron-core", self.choices.get("zero")
        return "" if self.plan is not None else switched(stated, zero)

    @property
    def constants(self) -> TrainingConstants:
        """Return the constants that price the run."""
        if self.fidelity == "datasheet":
            return TrainingConstants.ideal()
        return training_constants() if self.calibration is None else self.calibration.training

    @property
    def trial_engine(self) -> str:
        """The engine to try many changes with: closed forms, or graph where they do not know FSDP's units."""
        from foreshard.predict.step import closed_form_takes

        stated = (
            self.choices if self.plan is None else {"prefetch": self.plan.prefetch, "wrap": self.plan.wrap}
        )
        return "analytical" if closed_form_takes(stated.get("prefetch"), stated.get("wrap")) else "graph"

    def planned_run(self, plan: Plan | None = None) -> PlannedRun:
        """Return the run that the engines price, of another plan where one is given."""
        from foreshard.predict.batch import PlannedRun

        plan = plan or self.to_plan()
        return PlannedRun(
            model=self.trained,
            cluster=self.cluster,
            plan=plan,
            framework=load_framework(plan.framework),
            costs=self.costs,
            other_jobs=self.other_jobs,
            bursts=self.bursts,
        )

    def to_plan(self) -> Plan:
        """Return the plan the request means: the plan file's, or the one its degrees and options spell.

        Raises
        ------
        SpecError
            When a degree or option does not fit the model or the cluster.
        """
        if self.plan is not None:
            return self.plan if self.lora is None else replace(self.plan, lora=self.lora)
        choices = {name: value for name, value in self.choices.items() if value is not None}
        comm = {name: choices.pop(name) for name in COMM_OPTIONS if name in choices}
        _check_overlaps(comm, self.model)
        algorithm, buckets = choices.pop("collectives", "auto"), choices.pop("buckets", None)
        one_of(algorithm, ALGORITHMS, key="--collectives", name="collectives", exact=True)
        prefetch, wrap = choices.pop("prefetch", None), choices.pop("wrap", None)
        prefetch = None if prefetch is None else checked_prefetch(prefetch)
        wrap = None if wrap is None else checked_wrap(wrap)
        of_framework = checked_of_framework({name: choices.pop(name, None) for name in OF_FRAMEWORK})
        choices.setdefault("seq_len", self.model.max_seq_len)
        choices.setdefault("precision", self.cluster.default_precision())
        _check_narrow_gather(comm, choices["precision"])
        if self.switched or "framework" in choices:
            framework = self.framework
            choices["framework"] = framework.label if self.switched else choices["framework"]
            choices.setdefault("zero", framework.default_zero)
            choices.setdefault("sp", offers_of(framework).cuts_sequences and choices.get("tp", 1) != 1)
            if isinstance(choices.setdefault("recompute", framework.default_recompute), str):
                choices["recompute"] = framework.recompute(choices["recompute"])
        if choices.get("offload") == CPU:
            choices["offload"] = cpu_offload(load_framework(choices.get("framework", "megatron-core")))
        if choices.get("vpp", 1) > 1 and choices.get("pp", 1) == 1:
            what = f"vpp {choices['vpp']} without a pipeline"
            rule = "Virtual stages divide the stages of a pipeline"
            fix = "Add --pp, or leave out --vpp"
            raise SpecError(what, key="--vpp", value=choices["vpp"], rule=rule, fix=fix)
        schedule = str(choices.get("schedule"))
        if schedule == "interleaved" and choices.get("pp", 1) != 1 and choices.get("vpp", 1) == 1:
            what, rule = "interleaved stages of one part each", "Of one part a stage, it is 1f1b"
            fix = "Give --vpp 2 or more, or --schedule 1f1b"
            raise SpecError(what, key="--schedule", value=schedule, rule=rule, fix=fix)
        made = plan_from_degrees(self.model.num_layers, self.cluster.num_devices, **choices)
        made = replace(made, comm=comm, lora=self.lora, collectives=algorithm, **of_framework)
        made = replace(made, prefetch=prefetch, wrap=wrap)
        return self._with_buckets(made, buckets)

    def _with_buckets(self, plan: Plan, buckets: Any) -> Plan:
        """Return the plan with a bucket size, the best one for 'auto', None for the framework's."""
        if buckets != AUTO:
            return plan if buckets is None else replace(plan, buckets=checked_buckets(buckets))
        from foreshard.predict.graph.bucket_choice import with_best_buckets
        from foreshard.predict.step import checked_network, graph_takes

        check_plan(plan, self.trained, self.cluster)
        network = checked_network(self.network, self.engine)
        if self.engine == "analytical" or not graph_takes(plan, network):
            raise no_best_buckets()
        return with_best_buckets(
            self.planned_run(plan),
            self.constants,
            fidelity=self.fidelity,
            network=network,
        )

    def observing(self, step_s: float | None) -> Request:
        """Return the request with another measured step, or none."""
        return replace(self, observed_step_s=step_s)

    def alone(self, plan: Plan) -> Request:
        """Return the request for another plan on the same cluster, as nobody measured it."""
        return replace(self, plan=plan, plan_file=None, choices={}, observed_step_s=None)

    def with_choice(self, name: str, value: Any) -> Request:
        """Return the request with one degree or option set, in the flags or in every group of the plan."""
        if self.plan is None:
            return replace(self, choices={**self.choices, name: value})
        return replace(self, plan=set_in_plan(self.plan, name, value))

    def predict(self, engine: str | None = None) -> Prediction:
        """Return the prediction, under another engine when one is named."""
        from foreshard.predict import predict

        asked = {**self._asked(), "engine": engine or self.engine}
        if asked["engine"] != self.engine:
            # other engines share less, and have one rank for all
            asked |= {"network": None, "noise": None, "host_thread": False, "other_jobs": (), "bursts": False}
        plan = self._checked_plan()
        made: Prediction = predict(self.trained, self.cluster, plan, timeline=False, **asked)
        return self._with_assumptions(made)

    def compare(self) -> tuple[Prediction, ...]:
        """Return the predictions under every engine that takes the plan, and every cost source."""
        from foreshard.predict.step import ENGINES

        engines = ENGINES[ENGINES.index(self.trial_engine) :]
        return tuple(
            replace(self, engine=engine, costs=costs, noise=None, host_thread=False).predict()
            for engine in engines
            for costs in COSTS
        )

    def predict_timeline(self) -> tuple[Prediction, Timeline | None]:
        """Return the prediction and when each task of its step runs, None from an engine without tasks."""
        from foreshard.predict import predict_timeline

        made: Prediction
        made, timeline = predict_timeline(self.trained, self.cluster, self._checked_plan(), **self._asked())
        return self._with_assumptions(made), timeline

    def _checked_plan(self) -> Plan:
        """Return the plan; what is wrong in a plan file names that file."""
        plan = self.to_plan()
        if self.plan_file is not None:
            try:
                framework = load_framework(plan.framework)
            except SpecError as error:
                error.file = self.plan_file
                raise
            check_plan(plan, self.trained, self.cluster, file=self.plan_file)
            if plan.attention is not None:
                check_attention(plan.attention, self.cluster.devices, key="attention", file=self.plan_file)
            devices = self.cluster.devices
            as_chosen(framework, plan, model=self.trained, devices=devices, file=self.plan_file)
            if plan.prefetch is not None or plan.wrap is not None:
                with_units(framework, plan, file=self.plan_file)
        return plan

    def _with_assumptions(self, made: Prediction) -> Prediction:
        """Add the defaults that shaped the plan, and what its options leave as it is."""
        unstated = (*_defaults(self, made.plan), *_left_alone(self, made.plan))
        return replace(made, assumptions=(*made.assumptions, *unstated))

    def stage_memory(self) -> tuple[tuple[dict[str, float], ...], ...]:
        """Return the parts of the peak memory of each stage of each group, bytes."""
        from foreshard.predict.memory import plan_memory

        case = self.planned_run()
        _, parts = plan_memory(case)
        stages = range(len(parts.peak))
        rows = ({name: float(getattr(parts, name)[i]) for name in MEMORY_PARTS} for i in stages)
        return tuple(tuple(next(rows) for _ in group.stages) for group in case.plan.groups)

    def _asked(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ASKED}


def unstated_precision(plan: Plan, choices: Mapping[str, Any]) -> Iterator[str]:
    """Yield the precision that devices without bf16 take where none is stated."""
    if choices.get("precision") is None and plan.precision != "bf16":
        yield f"{plan.precision}, not stated (--dtype): not every device has bf16"


def _defaults(request: Request, plan: Plan) -> Iterator[str]:
    """Yield the defaults of a run stated by flags; a plan file states everything."""
    if request.plan is not None:
        return
    choices = request.choices
    if request.switched:
        yield request.switched
    yield from unstated_precision(plan, choices)
    if choices.get("seq_len") is None:
        yield f"sequence {plan.seq_len}, not stated (--seq): that of the model"
    if choices.get("global_batch") is None:
        yield f"global batch {plan.global_batch}, not stated (--global-batch): dp x pp in whole micro-batches"
    if choices.get("offload") == CPU:
        moved = plan.groups[0].stages[0].offload
        yield f"offload {moved}: what {plan.framework} moves to the host as CPU offload"
    if choices.get("zero") is None:
        level = plan.groups[0].stages[0].zero
        yield f"zero {level}, not stated (--zero): the default of {plan.framework}"
    rule = plan.groups[0].stages[0].recompute
    if choices.get("recompute") is None and rule != "none":
        yield f"recompute {rule}, not stated (--recompute): the default of {plan.framework}"
    if len({node.device.name for node in request.cluster.nodes}) > 1:
        yield SPLIT_EVENLY


def _left_alone(request: Request, plan: Plan) -> Iterator[str]:
    if not any(block.num_experts for block, _ in request.model.block_kinds()):
        return
    if any(stage.tp > 1 and stage.etp == 1 for group in plan.groups for stage in group.stages):
        yield "experts are not cut over tp (etp 1)"


def set_in_plan(plan: Plan, name: str, value: Any) -> Plan:
    """Return the plan with one option changed everywhere; degrees are written into ranks and stay."""
    if name in COMM_OPTIONS:
        return replace(plan, comm={**plan.comm, name: value})
    if name in _WRITTEN:
        return replace(plan, **{name: value})
    if name == "micro_batch":  # as the flag: samples per data-parallel rank
        groups = tuple(replace(group, micro_batch=value * group.stages[0].inner_dp) for group in plan.groups)
        return replace(plan, groups=groups)
    if name in ("schedule", "sp"):
        return replace(plan, groups=tuple(replace(group, **{name: value}) for group in plan.groups))
    if name == "offload" and value == CPU:
        value = cpu_offload(load_framework(plan.framework))
    if name in ("zero", "shard_size", "recompute", "offload"):
        groups = tuple(
            replace(group, stages=tuple(replace(stage, **{name: value}) for stage in group.stages))
            for group in plan.groups
        )
        return replace(plan, groups=groups)
    rule = "A plan file writes degrees, ranks and shares out"
    fix = "State the run with --tp, --pp, ... instead of --plan"
    raise SpecError(f"{name} cannot be changed in a plan file", key=name, value=value, rule=rule, fix=fix)


def stated_degrees(plan: Plan) -> dict[str, int]:
    """Return the degrees of the plan's first stage and its pipeline, as flags would state them."""
    group = plan.groups[0]
    stage = group.stages[0]
    return {
        "dp": stage.inner_dp * len(plan.groups),
        "tp": stage.tp,
        "pp": len(group.stages),
        "cp": stage.cp,
        "ep": stage.ep,
        "etp": stage.etp,
        "vpp": group.num_chunks,
    }


def _check_overlaps(comm: Mapping[str, Any], model: Model) -> None:
    """Raise where tokens on their way to experts are to be hidden in a model that has no such experts."""
    needs = {
        "expert_overlap": ("experts", any(block.num_experts for block, _ in model.block_kinds())),
        "shared_overlap": ("shared experts", any(block.shared_ffn for block, _ in model.block_kinds())),
    }
    for name, (what, there) in needs.items():
        if comm.get(name) is True and not there:
            raise SpecError(
                f"{model.name} has no {what}",
                key=flag_of(name),
                value=True,
                rule=f"It hides the exchange of tokens with experts, and needs {what}",
                fix=f"Leave out {flag_of(name)}",
            )


def _check_narrow_gather(comm: Mapping[str, Any], precision: Any) -> None:
    """Raise where weights are to be gathered in 8 bit though products do not read them so."""
    if comm.get("narrow_gather") is True and precision in PRECISIONS and precision != "fp8":
        raise SpecError(
            f"weights are gathered in 8 bit, but products run in {precision}",
            key="--narrow-gather",
            value=True,
            rule="It gathers weights as products in fp8 read them",
            fix="Add --dtype fp8, or leave out --narrow-gather",
        )
