"""Choices as plans and plans as structures; what a change of plan is called."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from foreshard.control.slots import DP_OVER_MP, MP_OVER_DP, Choice, Structure, WorkerPipeline
from foreshard.errors import SpecError
from foreshard.predict.measured.memory import counts_of
from foreshard.spec.plan import Group, Plan, Stage

KINDS = ("keep", "re-bucket", "re-route", "re-share", "re-cut", "regroup", "idle", "activate")


def structure_of(plan: Plan, reading: str | None = None) -> Structure:
    """Return the structure of a plan; ranks are workers.

    Parameters
    ----------
    plan : Plan
        Pipelines with one rank per stage, or one pipeline with stages of several data-parallel ranks.
    reading : {'dp_over_mp', 'mp_over_dp'}, optional
        The one that the plan has by itself; a single pipeline with one rank per stage has both.

    Raises
    ------
    SpecError
        For stages of several intervals or with other parallelism, and what the reading does not have.
    """
    reading = reading_of(plan) if reading is None else reading
    if reading == MP_OVER_DP:
        if len(plan.groups) > 1:
            raise SpecError(
                f"{len(plan.groups)} pipelines",
                key="plan.groups",
                value=len(plan.groups),
                rule="Read as stages of several ranks, a plan is one pipeline",
                fix="Leave the reading out",
            )
        (group,) = plan.groups
        for stage in group.stages:
            if min(counts_of(stage, group.micro_batch)) < 1:
                raise SpecError(
                    f"{len(stage.ranks)} ranks share {group.micro_batch} samples",
                    key="plan.groups",
                    value=list(stage.ranks),
                    fix="Write larger micro-batches, or data parallelism as groups",
                    rule="Every stage is one rank, or several that all have samples of a micro-batch",
                )
        return Structure(
            groups=tuple(WorkerPipeline(workers=stage.ranks, cuts=_span(stage)) for stage in group.stages),
            reading=MP_OVER_DP,
        )
    groups = []
    for group in plan.groups:
        spans = [_span(stage) for stage in group.stages]
        if any(len(stage.ranks) > 1 for stage in group.stages):
            raise _not_controlled(max(group.stages, key=lambda stage: len(stage.ranks)))
        cuts = (spans[0][0], *(stop for _, stop in spans))
        groups.append(WorkerPipeline(workers=tuple(stage.ranks[0] for stage in group.stages), cuts=cuts))
    return Structure(groups=tuple(groups))


def reading_of(plan: Plan) -> str:
    """Return the reading of a plan: stages of several ranks in its only pipeline, or pipelines."""
    wide = any(len(stage.ranks) > 1 for stage in plan.groups[0].stages)
    return MP_OVER_DP if wide and len(plan.groups) == 1 else DP_OVER_MP


def shares_of(plan: Plan, reading: str | None = None) -> tuple[int, ...]:
    """Return the shares of a plan, as :attr:`Choice.shares`."""
    if (reading_of(plan) if reading is None else reading) == MP_OVER_DP:
        (group,) = plan.groups
        return tuple(n for stage in group.stages for n in counts_of(stage, group.micro_batch))
    return tuple(group.share for group in plan.groups)


def _span(stage: Stage) -> tuple[int, int]:
    """Return the layers of a stage of one piece, data-parallel if of several ranks."""
    if len(stage.layers) != 1 or (len(stage.ranks) > 1 and stage.inner_dp != len(stage.ranks)):
        raise _not_controlled(stage)
    return stage.layers[0]


def _not_controlled(stage: Stage) -> SpecError:
    return SpecError(
        "a plan that is not controlled",
        key="plan.groups",
        value=list(stage.ranks),
        rule="Every stage is one rank with one interval of layers, or all are data-parallel ranks of one "
        "pipeline",
        fix="Write data parallelism as groups",
    )


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
        wide, at = [], 0
        for group in structure.groups:
            parts = choice.shares[at : at + len(group.workers)]
            at += len(group.workers)
            layers = ((group.cuts[0], group.cuts[1]),)
            shares = parts if len(parts) > 1 else None
            wide.append(replace(stage, ranks=group.workers, layers=layers, rank_shares=shares))
        pipelines = [(batch or running.global_batch, tuple(wide))]
    else:
        shared = zip(structure.groups, choice.shares, strict=True)
        pipelines = [(int(share), _stages(stage, group)) for group, share in shared]
    groups = tuple(
        Group(share=share, micro_batch=size, schedule=first.schedule, sp=first.sp, stages=stages)
        for share, stages in pipelines
    )
    return replace(running, groups=groups)


def _stages(stage: Stage, group: WorkerPipeline) -> tuple[Stage, ...]:
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
            {g.workers: share for g, share in zip(choice.structure.groups, choice.shares, strict=True)}
            for choice in (old, new)
        ]
        return "keep" if shares[0] == shares[1] else "re-share"
    return "keep" if old.shares == new.shares else "re-share"


def check_shares(choice: Choice, *, batch: int, micro_batch: int) -> None:
    """Raise AssertionError where samples are lost or somebody has none."""
    shares, groups = choice.shares, choice.structure.groups
    assert min(shares) > 0, "a group without samples"
    if choice.structure.reading == DP_OVER_MP:
        assert sum(shares) == batch, "samples are lost"
        assert all(group.cuts[0] == 0 and group.cuts[-1] == groups[0].cuts[-1] for group in groups), "layers"
        return
    at = 0
    for before, group in zip((None, *groups), groups, strict=False):
        assert sum(shares[at : at + len(group.workers)]) == micro_batch, "samples are lost"
        assert before is None or before.cuts[1] == group.cuts[0], "layers are missing"
        at += len(group.workers)
