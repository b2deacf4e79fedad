"""What is asked of the planner, and checks of it that need no search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.kernels import Tables
from foreshard.catalog.offers import as_chosen, running_level
from foreshard.catalog.stacks import check_attention, of_model, running, with_attention
from foreshard.catalog.training import Calibration, TrainingConstants, training_constants
from foreshard.errors import LimitError, SpecError
from foreshard.planner.choices import Choices, choices
from foreshard.planner.grid.ray_sweep import check_executor
from foreshard.planner.grid.space import GridRequest
from foreshard.planner.ranking import OBJECTIVES, Limits, ranked
from foreshard.planner.result import Ranked
from foreshard.predict.run_setup import RunSetup, as_priced
from foreshard.predict.step import ENGINES, checked_costs, checked_network
from foreshard.spec.cluster import Cluster, NodeGroup
from foreshard.spec.codec import check_amount, one_of, whole
from foreshard.spec.framework import Framework, Overrides
from foreshard.spec.model import Model
from foreshard.spec.plan import (
    ALGORITHMS,
    AUTO,
    MAX_SEQ_LEN,
    OF_FRAMEWORK,
    OPTIMIZERS,
    PRECISIONS,
    Plan,
    checked_buckets,
    checked_of_framework,
    no_best_buckets,
)
from foreshard.spec.prediction import Prediction

MARGIN = 0.95
"""Least probability that a plan fits its memory, where nothing else is asked for."""


def _nothing_refused(plan: Plan) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A search: what to train, on what, what to make small, and how long to look.

    choices : which values degrees and options of plans may have
    comm : what the plans hide otherwise than the framework does by default; `framework` has it too
    best_buckets : the engine asked for chooses the bucket size of each plan that it times
    overall_s : seconds that all searches may take of which this one is a part
    memory_margin : the least probability of fitting that plans are asked for; `headroom` applies it
    beat_s : plans of this step time or more are of no interest, and no reason is looked for why there is none
    known_s : the best step known from elsewhere: no bound has to be above it, slower plans are still shown
    tool, refusals : a tool that is to train the plan, and why it cannot train one, nothing where it can; then
        only equal replicas are searched, as tools lay them out
    """

    model: Model
    cluster: Cluster
    global_batch: int
    seq_len: int
    objectives: tuple[str, ...] = ("time",)
    limits: Limits = field(default_factory=Limits)
    tokens: float | None = None
    max_devices: int | None = None
    framework: Framework
    precision: str = "bf16"
    comm: Mapping[str, bool] = field(default_factory=dict)
    optimizer: str = "adamw"
    attention: str | None = None
    fp8_recipe: str | None = None
    dispatcher: str | None = None
    overrides: Overrides = field(default_factory=Overrides)
    compile: bool | None = None
    engine: str = "graph"
    network: str = "closed-form"
    costs: str | Tables = "auto"
    calibration: Calibration | None = None
    best_buckets: bool = False
    chooses_later: bool = False  # plans are timed once more, so neighbours of the best are kept
    top: int = 5
    budget_s: float = 60.0
    usd_per_device_hour: float | None = None
    executor: str = "local"
    choices: Choices = field(default_factory=Choices)
    memory_margin: float = 0.0
    beat_s: float = math.inf
    known_s: float = math.inf
    overall_s: float = 0.0
    tool: str | None = None
    refusals: Callable[[Plan], tuple[str, ...]] = _nothing_refused

    @property
    def priced_framework(self) -> Framework:
        """Return what plans run: where each gets its best buckets, its own until the engine has chosen."""
        if self.best_buckets and self.engine != "analytical":
            return replace(self.framework, bucket_bytes=0)
        return self.framework

    def stated(self, plan: Plan) -> Plan:
        """Return a plan with the algorithm and the bucket size asked for; the best size comes later."""
        own = None if self.best_buckets else self.framework.bucket_bytes or None
        sums = self.framework.collectives
        chosen = {name: getattr(self, name) for name in OF_FRAMEWORK}
        return replace(plan, collectives=sums, buckets=own, **chosen)

    @property
    def setup(self) -> RunSetup:
        """Return what all plans of the search share."""
        return RunSetup(
            model=self.model,
            framework=self.framework,
            precision=self.precision,
            seq_len=self.seq_len,
            optimizer=self.optimizer,
            costs=self.costs,
        )

    def grid_on(self, cluster: Cluster, *, objective: str | None = None) -> GridRequest:
        """Return the search of the grid on equal nodes; for energy, with the limits as seconds of a step."""
        objective = objective or self.objectives[0]
        rate = self.usd_per_device_hour
        most = math.inf
        if objective == "energy":
            most = self.limits.step_s(
                tokens=self.tokens,
                tokens_per_step=self.global_batch * self.seq_len,
                usd_per_h=cluster.usd_per_h if rate is None else rate * cluster.num_devices,
            )
        return GridRequest(
            model=self.model,
            cluster=cluster,
            framework=self.framework,
            constants=self.constants,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            precision=self.precision,
            optimizer=self.optimizer,
            comm=self.comm,
            choices=self.choices,
            objective=objective,
            max_step_s=most,
            costs=self.costs,
        )

    def ranked(self, predictions: Sequence[Prediction]) -> tuple[tuple[Ranked, ...], LimitError | None]:
        """Return the plans to show or to time again, best first, and the error if none keeps the limits."""
        return ranked(predictions, self.objectives, self.limits, self.top, neighbours=self.chooses_later)

    def none_of(self, reasons: Counter[str]) -> LimitError:
        """Return the error where the tool can train none of the fastest plans, for these reasons of each."""
        words = "; ".join(f"{reason} ({number} of them)" for reason, number in reasons.most_common(3))
        return LimitError(
            f"{self.tool} can train none of the fastest plans: {words}",
            key="--to",
            value=self.tool,
            rule="A plan for a tool is one that it trains as predicted",
            fix="State what it has, as --tp 1 or --recompute full, or leave --to out",
        )

    @property
    def constants(self) -> TrainingConstants:
        """Return the fitted constants that price every plan."""
        return training_constants() if self.calibration is None else self.calibration.training


def checked_request(
    model: Model,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int | None = None,
    objective: tuple[str, ...] | str = ("time",),
    max_usd: float | None = None,
    max_hours: float | None = None,
    tokens: float | None = None,
    max_devices: int | None = None,
    framework: str = "megatron-core",
    precision: str = "bf16",
    optimizer: str = "adamw",
    engine: str = "graph",
    network: str | None = None,
    costs: str | Tables = "auto",
    calibration: Calibration | None = None,
    top: int = 5,
    budget_s: float = 60.0,
    usd_per_device_hour: float | None = None,
    executor: str = "local",
    collectives: str = AUTO,
    buckets: int | str | None = None,
    memory_margin: float = MARGIN,
    tool: str | None = None,
    refusals: Callable[[Plan], tuple[str, ...]] = _nothing_refused,
    **stated: Any,
) -> PlanRequest:
    """Return the request, or raise SpecError naming the flag that is wrong.

    `stated` are `OF_FRAMEWORK`, and choices of the plans to search, as `planner.choices.choices` takes them.
    """
    stated_objectives = objective if isinstance(objective, tuple | list) else (objective,)
    objectives = tuple(
        one_of(name, OBJECTIVES, key="--objective", name="objective") for name in stated_objectives
    )
    for flag, limit in (("--max-usd", max_usd), ("--max-hours", max_hours)):
        if limit is not None and tokens is None:
            raise SpecError(
                "a limit on the run without its length",
                key=flag,
                value=limit,
                rule="Time and price of a run follow from its tokens",
                fix="Give --tokens",
            )
    for flag, value in (
        ("--max-usd", max_usd),
        ("--max-hours", max_hours),
        ("--tokens", tokens),
    ):
        check_amount(flag, value)
    check_amount("--budget-s", budget_s, optional=False)
    if tool is not None and len(in_fewest_groups(cluster).nodes) > 1:
        raise SpecError(
            f"{tool} on nodes that differ",
            key="--to",
            value=tool,
            rule="It gives every replica the same layers and samples",
            fix="Plan the nodes of one kind, or leave --to out",
        )
    framework = running_level(framework, stated.get("zero"))
    declared = of_model(load_framework(framework), model)
    chosen = checked_of_framework({name: stated.pop(name, None) for name in OF_FRAMEWORK})
    if "attention" in chosen:
        check_attention(chosen["attention"], cluster.devices)
        declared = with_attention(declared, chosen["attention"])
    made = PlanRequest(
        model=model,
        cluster=in_fewest_groups(cluster),
        global_batch=whole(global_batch, key="--global-batch", name="global-batch"),
        seq_len=whole(seq_len or model.max_seq_len, 1, MAX_SEQ_LEN, key="--seq", name="seq"),
        objectives=objectives,
        limits=Limits(max_usd=max_usd, max_hours=max_hours),
        tokens=tokens,
        max_devices=None
        if max_devices is None
        else whole(max_devices, key="--max-devices", name="max-devices"),
        **chosen,
        framework=replace(
            declared,
            collectives=one_of(collectives, ALGORITHMS, key="--collectives", name="collectives"),
            bucket_bytes=_bucket_bytes(buckets, engine),
        ),
        best_buckets=buckets == AUTO,
        precision=one_of(precision, PRECISIONS, key="--dtype", name="dtype"),
        optimizer=one_of(optimizer, OPTIMIZERS, key="--optimizer", name="optimizer"),
        engine=one_of(engine, ENGINES, key="--engine", name="engine"),
        network=checked_network(network, engine),
        costs=checked_costs(costs),
        calibration=calibration,
        top=whole(top, key="--top", name="top"),
        budget_s=budget_s,
        usd_per_device_hour=usd_per_device_hour,
        executor=check_executor(executor),
        choices=choices(stated, load_framework(framework)),
        memory_margin=memory_margin,
        tool=tool,
        refusals=refusals,
    )
    running_as = as_chosen(made.framework, made, model=model, devices=cluster.devices)
    priced = as_priced(model, running_as, made.precision)
    return replace(made, model=priced, framework=running(running_as, cluster.devices))


def _bucket_bytes(buckets: int | str | None, engine: str) -> int:
    """Return the bucket size that the search prices plans with, 0 for the framework's own buckets.

    Where each plan gets its best size later, plans are priced with the smallest: closed forms have no
    start-up of each bucket, so that none is faster, and their bound holds for all.
    """
    if buckets is None:
        return 0
    if buckets != AUTO:
        return checked_buckets(buckets)
    if engine == "analytical":
        raise no_best_buckets()
    return 1


def in_fewest_groups(cluster: Cluster) -> Cluster:
    """Return a cluster with equal nodes in a row as one group: however it was written, it is one problem.

    Groups with device links across nodes stay as they are: where such a domain ends would change.
    """
    found: list[NodeGroup] = []
    for group in cluster.nodes:
        alike = bool(found) and replace(found[-1], count=group.count) == group
        if alike and group.nvlink_domain <= group.per_node:
            found[-1] = replace(group, count=found[-1].count + group.count)
        else:
            found.append(group)
    return replace(cluster, nodes=tuple(found))
