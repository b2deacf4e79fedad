"""What steers a run, as the command line gives it, and what it is built from."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from foreshard.control.controller import Controller
from foreshard.control.orders import reading_of
from foreshard.control.slots import J_PER_KWH, MP_OVER_DP, Chain, State
from foreshard.errors import SpecError
from foreshard.lab.lab import Lab, load_lab
from foreshard.predict.measured.costs import MeasuredCosts, load_costs
from foreshard.runtime.adaptive.baseline_policies import RIVALS, BaselinePolicy
from foreshard.runtime.adaptive.budgets import budget_of, check_budgets
from foreshard.runtime.adaptive.layer_times import PassTimes
from foreshard.runtime.adaptive.stage_balancer import StageBalancer
from foreshard.runtime.adaptive.step_timing import StepTiming
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan

POLICIES = ("static", "lyapunov", *RIVALS)
_LONGEST_PIPELINE = 4
_PIECES = 64
"""Pieces that the batch is shared out in at least, if it has as many samples."""
_LATE_STEPS = 1
"""Steps that run the old plan after an order: it is announced in the next vote."""


def chain_of(costs: MeasuredCosts, cluster: Cluster, micro_batch: int) -> Chain:
    """Return the measured layers as the controller knows them, on devices of nominal speed."""
    ranks = range(cluster.num_devices)
    return Chain(
        layer_s=PassTimes(costs, cluster).layer_s(micro_batch),
        boundary_bytes=np.array([2 * one.boundary_bytes_per_sample for one in costs.layers[:-1]]),
        sync_bytes=np.array([one.parameter_bytes for one in costs.layers]),
        state_bytes=np.array([2 * one.parameter_bytes + one.state_bytes for one in costs.layers]),
        saved_bytes=np.array([one.saved_bytes_per_sample for one in costs.layers]),
        memory_bytes=np.array([cluster.device_of(rank).capacity_bytes for rank in ranks]),
    )


def stated_of(costs: MeasuredCosts, cluster: Cluster, lab: Lab | None = None) -> State:
    """Return the cluster as it is stated before anything is measured, and what the lab's ranks draw."""
    count = cluster.num_devices
    rate, latency_s = np.full((count, count), np.inf), np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            if a != b:
                ends = cluster.node_group_of(a), cluster.node_group_of(b)
                rate[a, b] = min(end.nic_bytes_per_s for end in ends)
                latency_s[a, b] = max(end.nic_latency_s for end in ends)
    usd = [cluster.node_group_of(rank) for rank in range(count)]

    def drawn(field: str) -> np.ndarray:
        found = getattr(lab, field) if lab is not None else ()
        return np.array([one or 0.0 for one in found or (None,) * count])

    return State(
        speed=np.array([1.0 / costs.slow_of(cluster.device_of(rank).name) for rank in range(count)]),
        available=np.ones(count, dtype=bool),
        bandwidth_bytes_per_s=rate,
        latency_s=latency_s,
        usd_per_h=np.array([(node.usd_per_h or 0.0) / node.per_node for node in usd]),
        busy_w=drawn("busy_w"),
        idle_w=drawn("idle_w"),
        usd_per_byte=np.zeros((count, count)),
        kg_per_j=drawn("kg_per_kwh") / J_PER_KWH,
    )


@cache
def passes_of(costs: str, lab: str) -> PassTimes:
    """Return the passes of two files."""
    return PassTimes(load_costs(costs), load_lab(lab).cluster())


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """What a controller is built from, the same on every rank.

    Attributes
    ----------
    plan : Plan
        The run's first.
    costs, lab : str
        Files.
    budgets : tuple of str
        As ``--budget`` gives them.
    steps : int
        Of the run: the horizon over which budgets are to be kept.
    log : Path
    policy : str
        Of `POLICIES`, but static.
    """

    plan: Plan
    costs: str
    lab: str
    budgets: tuple[str, ...]
    steps: int
    log: Path
    policy: str = "lyapunov"

    def check(self) -> None:
        """Raise for what the controller cannot steer."""
        for g, group in enumerate(self.plan.groups):
            for s, stage in enumerate(group.stages):
                where = f"groups[{g}].stages[{s}]"
                if len(stage.layers) != 1:
                    raise SpecError(
                        "a stage of several chunks",
                        key=where,
                        rule="What steers knows stages of one piece",
                        fix="Use --policy static, or another plan",
                    )
                dealt = self.is_wide and not self.is_joint and self.budgets
                if stage.tp > 1 or (len(stage.ranks) > 1 and (self.policy in RIVALS or dealt)):
                    raise SpecError(
                        "a stage of several ranks",
                        key=where,
                        rule="Where stages have several data-parallel ranks, only --policy lyapunov steers; "
                        "in several pipelines samples inside stages alone, and no budget is kept",
                        fix="Leave out --budget, use --policy static, or another plan",
                    )
                if self.is_joint and stage.shard_size is not None:
                    raise SpecError(
                        "states sharded over a part of a stage",
                        key=where,
                        rule="Stages that change their ranks shard states over all or none",
                        fix="Leave out shard_size, or use --policy static",
                    )
        check_budgets([budget_of(text) for text in self.budgets], load_lab(self.lab), self.lab)
        self.controller()

    @property
    def grain(self) -> int:
        """Samples that shares are counted in."""
        return max(1, min(self.plan.groups[0].micro_batch, self.plan.global_batch // _PIECES))

    @property
    def is_wide(self) -> bool:
        """Whether stages have several ranks."""
        return any(len(stage.ranks) > 1 for group in self.plan.groups for stage in group.stages)

    @property
    def is_joint(self) -> bool:
        """Whether the plan is one pipeline with stages of several ranks; in more only samples are dealt."""
        return reading_of(self.plan) == MP_OVER_DP

    @property
    def most(self) -> int:
        """Samples of the largest micro-batch: what memory was planned for."""
        return max(group.micro_batch for group in self.plan.groups)

    @property
    def _passing(self) -> int:
        """Samples that pass a rank at once, as the search sees them: what the plan's widest stage splits."""
        if not self.is_joint:
            return self.most
        return max(1, self.most // max(len(stage.ranks) for stage in self.plan.groups[0].stages))

    def as_run(self, plan: Plan) -> Plan:
        """Return a plan of the controller with micro-batches that suit its pipelines."""
        if self.is_wide:
            return plan
        passes = passes_of(self.costs, self.lab)

        def size(group: Group) -> int:
            stages = [(stage.ranks[0], stage.layers[0]) for stage in group.stages]
            return passes.best_size(stages, group.share, self.most)

        return replace(plan, groups=tuple(replace(group, micro_batch=size(group)) for group in plan.groups))

    def controller(self) -> Controller | BaselinePolicy | StageBalancer:
        """Return a controller that has seen nothing, or the rule that takes its place."""
        costs, lab = load_costs(self.costs), load_lab(self.lab)
        cluster = lab.cluster()
        chain = chain_of(costs, cluster, self._passing)
        stated = stated_of(costs, cluster, lab)
        if self.is_wide and not self.is_joint:
            return StageBalancer(chain, stated, self.plan)
        fine = (
            self.plan
            if self.is_joint
            else replace(
                self.plan, groups=tuple(replace(group, micro_batch=self.grain) for group in self.plan.groups)
            )
        )
        budgets = tuple(budget_of(text) for text in self.budgets)
        longest = min(_LONGEST_PIPELINE, cluster.num_devices)
        if self.policy in RIVALS:
            return RIVALS[self.policy](chain, stated, fine, budgets=budgets, max_stages=longest)
        return Controller(
            chain,
            stated,
            fine,
            budgets=budgets,
            horizon=self.steps,
            max_stages=longest,
            late_steps=_LATE_STEPS,
            timed=StepTiming(PassTimes(costs, cluster), chain, self.most, self.plan.global_batch),
        )


def wheel_of(told: str, plan: Plan, out: Path) -> ControllerConfig:
    """Return the wheel from what a worker is told."""
    data = json.loads(told)
    return ControllerConfig(
        plan=plan,
        costs=data["costs"],
        lab=data["lab"],
        budgets=tuple(data["budgets"]),
        steps=data["steps"],
        log=out / "controller.jsonl",
        policy=data.get("policy", "lyapunov"),
    )
