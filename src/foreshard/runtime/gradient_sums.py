"""How a run sums gradients: what its plan states, unless its flags say otherwise, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from foreshard.comm.compression.methods import compression_method
from foreshard.comm.schedules.selection import BACKEND, all_reduce_selection
from foreshard.errors import SpecError
from foreshard.runtime.engine.bucket_urgency import KEY, bucket_urgency
from foreshard.runtime.state.layout import shares_updates
from foreshard.spec.plan import AUTO, Plan

_ALGORITHM_OF = {AUTO: None, "ring": "ring", "tree": "double-tree"}
"""The schedule that a run executes for the `collectives` of a plan; None is the backend's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSums:
    """How gradients are summed, and who says so.

    Attributes
    ----------
    collectives : str or None
        As `schedule_selection` reads it; None for the backend's all-reduce.
    compress : str or None
        As `compression_method` reads it; None for sums of all that ranks have.
    bucket_bytes : int or None
        From which on a bucket is full; None for the runtime's own size.
    file : str or None
        The plan file, where it and no flag names the collectives.
    """

    collectives: str | None = None
    compress: str | None = None
    bucket_bytes: int | None = None
    file: str | None = None


def gradient_sums(
    plan: Plan,
    collectives: str | None = None,
    compress: str | None = None,
    bucket_bytes: float | None = None,
    *,
    file: str | None = None,
) -> GradientSums:
    """Return the sums that flags name, and where they name none those of the plan, which lies in a file.

    Examples
    --------
    >>> from foreshard.spec.plan_file import parse_plan
    >>> groups = [{"share": 4, "stages": [{"ranks": [0], "layers": [[0, 2]]}]}]
    >>> table = {"global_batch": 4, "seq_len": 1, "groups": groups, "collectives": "tree", "buckets": 4096}
    >>> gradient_sums(parse_plan(table)).collectives
    'double-tree'
    >>> gradient_sums(parse_plan(table), "backend", bucket_bytes=1e6).bucket_bytes
    1000000
    """
    by_plan = collectives is None and plan.collectives != AUTO
    size = plan.buckets if bucket_bytes is None else bucket_bytes
    return GradientSums(
        collectives=_ALGORITHM_OF[plan.collectives] if collectives is None else collectives,
        compress=compress,
        bucket_bytes=None if size is None else int(size),
        file=file if by_plan else None,
    )


def check_sums(plan: Plan, sums: GradientSums, *, virtual: bool = False, resumes: bool = False) -> None:
    """Raise SpecError for unknown names, and plans, clocks and starts that do not sum gradients so."""
    collectives, compress = sums.collectives, sums.compress
    if collectives is not None and all_reduce_selection(collectives) is None:
        collectives = None
    method = None if compress is None else compression_method(compress)
    if collectives is None and method is None:
        return
    kept = [
        (g, s)
        for g, group in enumerate(plan.groups)
        for s, stage in enumerate(group.stages)
        if stage.zero >= 2 and shares_updates(stage)
    ]
    by_plan = sums.file is not None and method is None
    leave_out = f"add --collectives {BACKEND}" if by_plan else "leave it out"
    if virtual:
        what, rule = "a lab in virtual time", "Its clock reckons with a ring of modelled links"
        fix = f'{leave_out.capitalize()}, or use foreshard lab with clock = "wall"'
    elif kept:
        what = f"groups[{kept[0][0]}].stages[{kept[0][1]}] shards gradients (zero 2 or 3)"
        rule = "Sharded gradients are reduced to their keepers by the backend"
        fix = f"Use zero 0 or 1, or {leave_out}"
    elif method is not None and plan.precision == "fp16":
        what, rule = "compression in fp16", "What a step leaves out has the loss scale of that step"
        fix = "Use --dtype bf16 or fp32"
    elif method is not None and resumes:
        what, rule = "compression of a resumed run", "Checkpoints do not hold what compression has left out"
        fix = "Start anew, or resume without --compress"
    elif method is not None and collectives is not None and method.name != "powersgd":
        named = "--collectives" if sums.file is None else f"collectives {plan.collectives} of {sums.file}"
        what, rule = f"{method.name} with {named}", f"{method.name} gathers, by the backend; it sums nothing"
        fix = f"Leave out --compress, use powersgd:RANK, or add --collectives {BACKEND}"
    else:
        return
    if by_plan:
        raise SpecError(what, file=sums.file, key="collectives", value=plan.collectives, rule=rule, fix=fix)
    key, value = ("--collectives", collectives) if method is None else ("--compress", compress)
    raise SpecError(what, key=key, value=value, rule=rule, fix=fix)


def check_order(plan: Plan, sums: GradientSums, order: str | None) -> None:
    """Raise SpecError for orders that do not exist, and plans and sums to which they do not apply."""
    if order is None or bucket_urgency(order) is None:
        return
    selected = sums.collectives is not None and all_reduce_selection(sums.collectives) is not None
    if not selected and sums.compress is None:
        what, rule = "sums by the backend", "The backend keeps the order in which sums start"
        fix = "Add --collectives ring, or another algorithm"
    elif len(plan.groups) == 1 and all(len(s.ranks) == s.tp for s in plan.groups[0].stages):
        what, rule = "a plan in which every layer is on one rank", "Ranks with the same layers sum gradients"
        fix = "Leave it out"
    else:
        return
    raise SpecError(what, key=KEY, value=order, rule=rule, fix=fix)


def check_warm_up(sums: GradientSums, steps: int) -> None:
    """Raise SpecError for steps before a compression that there is none of."""
    if steps and sums.compress is None:
        rule = "It says for how many steps gradients are not compressed yet"
        fix = "Add --compress METHOD, or leave it out"
        raise SpecError("no compression", key="--compress-after", value=steps, rule=rule, fix=fix)
