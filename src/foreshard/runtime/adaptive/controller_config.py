"""The options of `run --policy`, checked, and the policy that they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.control.budgets.queues import Queues
from foreshard.control.controller import Controller
from foreshard.control.estimation.estimates import Estimates
from foreshard.control.orders import reading_of
from foreshard.control.policies import BASELINE_POLICIES, LastMeasured
from foreshard.control.search.pricing import largest_micro_batch
from foreshard.control.slots import MP_OVER_DP, Chain, WorkerPipeline
from foreshard.errors import SpecError
from foreshard.predict.measured.costs import load_costs
from foreshard.runtime.adaptive.budgets import budget_of, check_budgets
from foreshard.runtime.adaptive.pass_times import StepTiming
from foreshard.runtime.adaptive.stage_balancer import StageBalancer
from foreshard.runtime.adaptive.starting_costs import StartingCosts, starting_costs
from foreshard.spec.cluster import Cluster
from foreshard.spec.online import Policy
from foreshard.spec.plan import Group, Plan

_LONGEST_PIPELINE = 4
"""Stages of the longest pipelines that are searched: a decision has to fit between two steps."""
_LEAST_PIECES = 64
"""Pieces that the batch is shared out in, if it has as many samples: shares are then 1.6 % apart."""


class RunPolicy(Policy, Protocol):
    """A policy as a run uses it."""

    chain: Chain
    plan: Plan
    step: int
    queues: Queues

    @property
    def reconfigurations(self) -> int:
        """Changes of layers, groups or ranks so far."""

    @property
    def estimates(self) -> Estimates | LastMeasured:
        """The cluster as the policy believes it is."""


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """What a policy is built from, the same on every rank.

    `plan` is the run's first, `steps` the horizon over which budgets are to be kept. `costs` is a file of
    measured costs, `model` what the job trains, as `predict` takes it; the bytes of each layer's parameters
    are of use where there is neither. Budgets are as ``--budget`` gives them. With `steers_sums` buckets and
    algorithm of sums that the plan states are changed too: on a clock on which sums overlap.
    """

    plan: Plan
    cluster: Cluster
    steps: int
    log: Path
    policy: str = "lyapunov"
    costs: str | None = None
    model: str | None = None
    budgets: tuple[str, ...] = ()
    parameter_bytes: tuple[float, ...] | None = None
    steers_sums: bool = False

    def check(self) -> None:
        """Raise for what the policy cannot change, and for budgets of what the cluster does not state."""
        for g, group in enumerate(self.plan.groups):
            for s, stage in enumerate(group.stages):
                where = f"groups[{g}].stages[{s}]"
                if len(stage.layers) != 1:
                    raise SpecError(
                        "a stage of several chunks",
                        key=where,
                        rule="A policy changes plans whose stages are one interval of layers",
                        fix="Use --policy static, or another plan",
                    )
                balanced = self.is_wide and not self.is_joint and self.budgets
                if stage.tp > 1 or (len(stage.ranks) > 1 and (self.policy in BASELINE_POLICIES or balanced)):
                    raise SpecError(
                        "a stage of several ranks",
                        key=where,
                        rule="Stages of several data-parallel ranks need --policy lyapunov; in several "
                        "pipelines it changes samples inside stages alone, and keeps no budget",
                        fix="Leave out --budget, use --policy static, or another plan",
                    )
                if self.is_joint and stage.shard_size is not None:
                    raise SpecError(
                        "states sharded over a part of a stage",
                        key=where,
                        rule="Stages that change their ranks shard states over all or none",
                        fix="Leave out shard_size, or use --policy static",
                    )
        check_budgets([budget_of(text) for text in self.budgets], self.cluster)
        self.make_policy(self.starting_costs())

    def starting_costs(self) -> StartingCosts:
        """Return what is known before the first step."""
        return starting_costs(
            self.plan,
            self.cluster,
            costs=None if self.costs is None else load_costs(self.costs),
            model=None if self.model is None else load_model(self.model),
            parameter_bytes=self.parameter_bytes,
        )

    @property
    def grain(self) -> int:
        """Samples that shares are counted in."""
        return max(1, min(self.plan.groups[0].micro_batch, self.plan.global_batch // _LEAST_PIECES))

    @property
    def is_wide(self) -> bool:
        """Whether stages have several ranks."""
        return any(len(stage.ranks) > 1 for group in self.plan.groups for stage in group.stages)

    @property
    def is_joint(self) -> bool:
        """Whether the plan is one pipeline with stages of several ranks."""
        return reading_of(self.plan) == MP_OVER_DP

    @property
    def largest_micro_batch(self) -> int:
        """Samples of the largest micro-batch: what memory was planned for."""
        return max(group.micro_batch for group in self.plan.groups)

    def as_run(self, plan: Plan, known: StartingCosts) -> Plan:
        """Return a plan of the policy with micro-batches that suit its pipelines and fit their ranks."""
        if self.is_wide:
            return plan

        def size(group: Group) -> int:
            stages = [(stage.ranks[0], stage.layers[0]) for stage in group.stages]
            cuts = (0, *(stop for _, (_, stop) in stages))
            pipeline = WorkerPipeline(workers=tuple(rank for rank, _ in stages), cuts=cuts)
            most = largest_micro_batch(known.sizes, pipeline, group.share, self.largest_micro_batch)
            return known.passes.best_size(stages, group.share, most)

        return replace(plan, groups=tuple(replace(group, micro_batch=size(group)) for group in plan.groups))

    def make_policy(self, known: StartingCosts) -> RunPolicy:
        """Return a policy that has seen nothing."""
        most, budgets = self.largest_micro_batch, tuple(budget_of(text) for text in self.budgets)
        passing = most  # samples that pass a rank at once: what the plan's widest stage splits
        if self.is_joint:
            passing = max(1, most // max(len(stage.ranks) for stage in self.plan.groups[0].stages))
        chain, state, plan = known.chain(passing), known.state, self.plan
        if self.is_wide and not self.is_joint:
            return StageBalancer(chain, state, plan)
        if not self.is_joint:
            plan = replace(
                plan, groups=tuple(replace(group, micro_batch=self.grain) for group in plan.groups)
            )
        longest = min(_LONGEST_PIPELINE, self.cluster.num_devices)
        if not known.knows_layers:  # what passes between layers is unknown: no pipeline gets longer
            longest = max(len(group.stages) for group in plan.groups)
        if self.policy in BASELINE_POLICIES:
            return BASELINE_POLICIES[self.policy](chain, state, plan, budgets=budgets, max_stages=longest)
        return Controller(
            chain,
            state,
            plan,
            budgets=budgets,
            horizon=self.steps,
            max_stages=longest,
            timed=StepTiming(known.passes, chain, most, plan.global_batch),
            steers_sums=self.steers_sums,
        )


def config_of(
    options: Mapping[str, Any],
    plan: Plan,
    cluster: Cluster | None,
    *,
    steps: int,
    out: Path,
    parameter_bytes: Sequence[float] | None = None,
    steers_sums: bool = False,
) -> ControllerConfig:
    """Return the configuration that the options of a run describe, as its ranks receive them.

    They are policy, costs, model and budgets, and the cluster by name where the test bed does not give it.
    """
    return ControllerConfig(
        plan=plan,
        cluster=cluster or load_cluster(options["cluster"]),
        steps=steps,
        log=out / "controller.jsonl",
        policy=options["policy"],
        costs=options["costs"],
        model=options["model"],
        budgets=tuple(options["budgets"]),
        parameter_bytes=None if parameter_bytes is None else tuple(parameter_bytes),
        steers_sums=steers_sums,
    )
