"""Rules that a plan keeps before ranks start for it; those of models and clusters are in `spec.checks`."""

from __future__ import annotations

from collections.abc import Iterator

from foreshard.errors import SpecError
from foreshard.graph.schedules import stage_order
from foreshard.runtime.state.layout import layout_of
from foreshard.spec.plan import Group, Plan, Stage


def check_sound(plan: Plan, *, file: str | None = None) -> None:
    """Raise at the first rule that the plan breaks whatever the model is.

    Parameters
    ----------
    plan : Plan
    file : str, optional
        Where it was read.

    Raises
    ------
    SpecError
    """
    try:
        layout_of(plan)
        _ranks_once(plan)
        _samples_once(plan)
        for g, group in enumerate(plan.groups):
            _layers_once(group, f"groups[{g}]", plan.groups[0])
            for where, stage in _stages(g, group):
                _rank_shares_split(stage, group.micro_batch, where)
            _ordered(group)
    except SpecError as error:
        error.file = error.file or file
        raise


def _stages(g: int, group: Group) -> Iterator[tuple[str, Stage]]:
    return ((f"groups[{g}].stages[{s}]", stage) for s, stage in enumerate(group.stages))


def _ranks_once(plan: Plan) -> None:
    seen: dict[int, str] = {}
    for g, group in enumerate(plan.groups):
        for where, stage in _stages(g, group):
            for rank in stage.ranks:
                if rank in seen:
                    raise SpecError(
                        f"rank {rank} is used twice, first in {seen[rank]}",
                        key=f"{where}.ranks",
                        value=rank,
                        rule="Every rank is at most in one place",
                        fix=f"Leave rank {rank} out of one of the two",
                    )
                seen[rank] = where


def _samples_once(plan: Plan) -> None:
    total = sum(group.share for group in plan.groups)
    if total != plan.global_batch:
        raise SpecError(
            f"shares sum to {total}, the global batch is {plan.global_batch}",
            key="groups.share",
            value=total,
            rule="Every sample is taken once per step",
            fix=f"Make the shares sum to {plan.global_batch}",
        )


def _layers_once(group: Group, where: str, first: Group) -> None:
    chunks = {len(stage.layers) for stage in group.stages}
    if len(chunks) > 1:
        raise SpecError(
            "stages of one group differ in virtual stages",
            key=f"{where}.stages.layers",
            value=str(sorted(chunks)),
            fix=f"Give each stage {max(chunks)} intervals",
            rule="Every stage of a group has the same number of layer intervals",
        )
    reached = 0
    for start, stop in _passed(group):
        if start != reached:
            raise SpecError(
                f"layer {reached} is not next: the interval is [{start}, {stop}]",
                key=f"{where}.stages.layers",
                value=start,
                fix=f"Start the interval at {reached}",
                rule="Stages cover every layer in order, chunk by chunk, each once",
            )
        reached = stop
    last = max(stop for _, stop in _passed(first))
    if reached != last:
        raise SpecError(
            f"layers end at {reached}, those of groups[0] at {last}",
            key=f"{where}.stages.layers",
            value=reached,
            rule="Every group holds every layer",
            fix=f"End the last interval at {last}",
        )


def _passed(group: Group) -> list[tuple[int, int]]:
    """Return the intervals in the order in which a sample passes them."""
    return [stage.layers[chunk] for chunk in range(group.num_chunks) for stage in group.stages]


def _rank_shares_split(stage: Stage, micro_batch: int, where: str) -> None:
    shares = stage.rank_shares
    parts = stage.inner_dp
    if shares is not None and (len(shares) != parts or sum(shares) != micro_batch):
        what = f"{parts} ranks" if stage.tp == 1 else f"{parts} times {stage.tp} ranks"
        raise SpecError(
            f"{list(shares)} does not split micro_batch {micro_batch} over {what}",
            key=f"{where}.rank_shares",
            value=str(list(shares)),
            rule="One entry per data-parallel rank, sums to micro_batch",
            fix=f"Give {parts} numbers that sum to {micro_batch}",
        )


def _ordered(group: Group) -> None:
    """Raise if the schedule has no order for so many stages, chunks and micro-batches."""
    stage_order(
        group.schedule,
        num_stages=len(group.stages),
        num_micro_batches=group.num_micro_batches,
        num_chunks=group.num_chunks,
    )
