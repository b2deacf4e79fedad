"""A running plan in the terms of the search: what it can plan anew, which options run, and their prices."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np

from foreshard.errors import SpecError
from foreshard.planner.problem import Problem
from foreshard.planner.request import checked_request
from foreshard.planner.stage_options import Ranks, StageKind, joint_options
from foreshard.planner.stage_prices import offered, price_stages
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Plan, Stage


def healthy_problem(model: Model, cluster: Cluster, plan: Plan) -> Problem:
    """Return the prices that re-planning starts from: of every stage of the space and those that run.

    Of joint stages that run every split. Joint stages are there turned too, with no room for a micro-batch:
    they say what their other ranks take.
    """
    request = checked_request(
        model, cluster, global_batch=plan.global_batch, seq_len=plan.seq_len, framework=plan.framework,
        precision=plan.precision, optimizer=plan.optimizer,
    )  # fmt: skip
    vendor = cluster.device_of(plan.ranks[0]).vendor
    use = tuple(
        g for g, nodes in enumerate(cluster.nodes)
        if nodes.device.supports(plan.precision) and nodes.device.vendor == vendor
    )  # fmt: skip
    own = kinds_of(cluster, plan)
    own += [kind for kind in joint_options(request, use) if any(_same_ranks(kind, one) for one in own)]
    turned = [kind.turned for kind in offered(request, use, own) if kind.beside]
    priced = price_stages(request, use, extra=[*own, *turned], every=True)
    if not turned:
        return priced
    rooms = priced.max_in_flight.copy()
    rooms[[priced.names.index(kind) for kind in turned]] = 0
    return replace(priced, max_in_flight=rooms)


def _same_ranks(one: StageKind, other: StageKind) -> bool:
    """Return whether two stages differ in samples and recompute rule at most."""
    ranks = [tuple((part.node_group, part.inner_dp) for part in kind.parts) for kind in (one, other)]
    return ranks[0] == ranks[1] and one.tp == other.tp


def check_running(plan: Plan) -> None:
    """Raise for a plan with schedules or stages that the search does not know.

    Raises
    ------
    SpecError
        Naming what it is.
    """
    for group in plan.groups:
        if group.schedule != "1f1b":
            raise _unable(f"schedule {group.schedule}", group.schedule, "pipelines run 1f1b")
        for stage in group.stages:
            for name, value, usual in (
                ("intervals of layers on a stage", len(stage.layers), 1),
                ("etp", stage.etp, 1),
                ("offload", stage.offload, "none"),
                ("shard_size", stage.shard_size, None),
            ):
                if value != usual:
                    raise _unable(f"{name} {value}", value, f"{name} is {str(usual).lower()}")


def kinds_of(cluster: Cluster, plan: Plan) -> list[StageKind]:
    """Return the options that the stages of a running plan are, equal ones once."""
    stages = ((group, stage) for group in plan.groups for stage in group.stages)
    return list(dict.fromkeys(kind_of(cluster, plan, group, stage) for group, stage in stages))


def kind_of(cluster: Cluster, plan: Plan, group: Group, stage: Stage) -> StageKind:
    """Return the option that a running stage is.

    Raises
    ------
    SpecError
        When its ranks take samples otherwise than by node group, of two at most.
    """
    # The engine takes the others to wait for the ranks of most samples over peak, the first of equals.
    own, *others = sorted(
        _parts_of(cluster, group, stage),
        key=lambda part: -part.micro_batch / cluster.nodes[part.node_group].device.peak(plan.precision),
    )
    return StageKind(
        node_group=own.node_group, tp=stage.tp, inner_dp=own.inner_dp, micro_batch=own.micro_batch,
        recompute=stage.recompute, zero=stage.zero, ep=stage.ep, cp=stage.cp,
        beside=others[0] if others else None,
    )  # fmt: skip


def _parts_of(cluster: Cluster, group: Group, stage: Stage) -> list[Ranks]:
    """Return the ranks of a stage by node group, and the samples each of them takes."""
    width, split = stage.inner_dp, stage.tp * stage.cp
    shares = stage.rank_shares or (group.micro_batch / width,) * width
    ends = np.cumsum([nodes.num_devices for nodes in cluster.nodes])
    where = np.searchsorted(ends, stage.ranks, side="right").reshape(width, split)
    rows = zip(where[:, 0].tolist(), shares, strict=True)
    parts = [
        Ranks(node_group=g, inner_dp=len(list(some)), micro_batch=int(share))
        for (g, share), some in groupby(rows)
    ]
    groups = [part.node_group for part in parts]
    whole = all(float(share).is_integer() and share >= 1 for share in shares)
    if len(parts) > 2 or groups != sorted(set(groups)) or not whole or (where != where[:, :1]).any():
        raise _unable(
            f"a stage on ranks {', '.join(map(str, stage.ranks[:8]))} with samples {list(shares)[:8]}",
            list(shares)[:8],
            "ranks of a stage are of one node group, or of two in their order; within each all take as many "
            "whole samples",
        )
    return parts


def _unable(what: str, value: object, rule: str) -> SpecError:
    return SpecError(
        f"a plan that cannot be re-planned: {what}", key="plan", value=value, rule=rule, fix="Plan anew"
    )
