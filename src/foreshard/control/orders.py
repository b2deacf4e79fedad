"""Choices as plans and plans as structures; what a change of plan is called."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from foreshard.control.slots import DP_OVER_MP, MP_OVER_DP, Choice, Pipeline, Structure
from foreshard.errors import SpecError
from foreshard.spec.plan import Group, Plan, Stage

KINDS = ("keep", "re-share", "re-cut", "regroup", "idle", "activate")


def structure_of(plan: Plan) -> Structure:
    """Return the structure of a plan of pipelines with one rank per stage; ranks are workers.

    Raises
    ------
    SpecError
        For stages of several ranks or several intervals.
    """
    groups = []
    for group in plan.groups:
        for stage in group.stages:
            if len(stage.ranks) != 1 or len(stage.layers) != 1:
                raise SpecError(
                    "a plan that is not controlled", key="plan.groups", value=list(stage.ranks),
                    rule="Every stage is one rank with one interval of layers",
                    fix="Write data parallelism as groups",
                )  # fmt: skip
        cuts = (group.stages[0].layers[0][0], *(stage.layers[0][1] for stage in group.stages))
        groups.append(Pipeline(workers=tuple(stage.ranks[0] for stage in group.stages), cuts=cuts))
    return Structure(groups=tuple(groups))


def plan_of(
    running: Plan, choice: Choice, *, batch: int | None = None, micro_batch: int | None = None
) -> Plan:
    """Return the plan of a choice; options that it says nothing about are those of the running plan.

    `mp_over_dp` becomes one group whose stages split micro-batches by `rank_shares`, and needs the batch.
    """
    first, structure = running.groups[0], choice.structure
    stage = replace(first.stages[0], rank_shares=None, tp=1, cp=1, ep=1, etp=1)
    size = micro_batch or first.micro_batch
    if structure.reading == MP_OVER_DP:
        stages, at = [], 0
        for group in structure.groups:
            parts = choice.shares[at : at + len(group.workers)]
            at += len(group.workers)
            layers = ((group.cuts[0], group.cuts[1]),)
            shares = parts if len(parts) > 1 else None
            stages.append(replace(stage, ranks=group.workers, layers=layers, rank_shares=shares))
        whole = Group(
            share=batch or running.global_batch, stages=tuple(stages), micro_batch=size,
            schedule=first.schedule, sp=first.sp,
        )  # fmt: skip
        return replace(running, groups=(whole,))
    groups = tuple(
        Group(
            share=int(share), micro_batch=size, schedule=first.schedule, sp=first.sp,
            stages=_stages(stage, group),
        )
        for group, share in zip(structure.groups, choice.shares, strict=True)
    )  # fmt: skip
    return replace(running, groups=groups)


def _stages(stage: Stage, group: Pipeline) -> tuple[Stage, ...]:
    return tuple(
        replace(stage, ranks=(worker,), layers=(span,))
        for worker, span in zip(group.workers, pairwise(group.cuts), strict=True)
    )


def change_of(old: Choice, new: Choice) -> str:
    """Return the name of the largest change."""
    before, after = old.structure, new.structure
    if not set(after.workers) <= set(before.workers):
        return "activate"
    if set(after.workers) != set(before.workers):
        return "idle"
    if before.reading != after.reading or {g.workers for g in before.groups} != {
        g.workers for g in after.groups
    }:
        return "regroup"
    if {(g.workers, g.cuts) for g in before.groups} != {(g.workers, g.cuts) for g in after.groups}:
        return "re-cut"
    if after.reading == DP_OVER_MP:
        shares = [
            {g.workers: share for g, share in zip(one.structure.groups, one.shares, strict=True)}
            for one in (old, new)
        ]
        return "keep" if shares[0] == shares[1] else "re-share"
    return "keep" if old.shares == new.shares else "re-share"
