"""Plans and prices in words: one line of degrees and options, what distinguishes one plan from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from foreshard.catalog.instances import is_old
from foreshard.report.screen import spans
from foreshard.spec.plan import Group, Plan

RARER = ("cp", "ep", "etp")
"""Degrees that are named where they are not 1."""


def counted(plan: Plan) -> str:
    """Return what throughput counts: tokens, or samples where one is no text (an image, a row)."""
    return "samples" if plan.seq_len == 1 else "tokens"


def priced(plan: Plan, usd_per_1b_tokens: float | None) -> tuple[float | None, str]:
    """Return a price and how many tokens or samples it is of."""
    if counted(plan) == "tokens" or usd_per_1b_tokens is None:
        return usd_per_1b_tokens, "1B tokens" if counted(plan) == "tokens" else "1M samples"
    return usd_per_1b_tokens / 1e3, "1M samples"


def dated(price_date: str) -> str:
    """Return the date of a price; an old one, or none, says so.

    Examples
    --------
    >>> dated("2020-Q1")
    '2020-Q1, over a year old'
    """
    old = price_date[:1].isdigit() and is_old(price_date)
    return f"{price_date}, over a year old" if old else price_date


def plan_line(plan: Plan) -> str:
    """Return the plan in one line of degrees and options."""
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    words = []
    if len(plan.groups) > 1:
        words.append(f"{len(plan.groups)} groups on {len(plan.ranks)} ranks, the first:")
    words += _cut(group, _by_stage)
    words += [f"micro-batch {rank_samples(group)}", f"global batch {plan.global_batch}"]
    words += [f"seq {plan.seq_len}"] if counted(plan) == "tokens" else []
    words += [plan.precision, f"zero {stage.zero}", group.schedule]
    if stage.recompute != "none":
        words.append(f"recompute {stage.recompute}")
    if group.sp:
        words.append("sp")
    return "  ".join(words)


def _by_stage(values: Iterable[object]) -> str:
    """Return the degree of all stages, or those of its stages in order."""
    each = list(map(str, values))
    return "/".join(each if len(set(each)) > 1 else each[:1])


def rank_samples(group: Group) -> str:
    """Return the samples of a micro-batch that a rank takes: one number, or those of different ranks."""
    taken = [
        f"{samples:g}"
        for stage in group.stages
        for samples in stage.rank_shares or (group.micro_batch / stage.inner_dp,)
    ]
    return "/".join(dict.fromkeys(taken))


def place_of(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the group and stage a rank is in."""
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            if rank in stage.ranks:
                return g, s
    raise IndexError(f"rank {rank} is not in the plan")


def distinct_names(plans: Sequence[Plan]) -> list[str]:
    """Return what distinguishes each plan: its degrees; of equal ones also shares, cuts and ranks."""
    names = [degrees(plan) for plan in plans]
    for more in (_shares, _cuts, _placed):
        seen = Counter(names)
        names = [
            f"{name} {more(plan)}" if seen[name] > 1 else name
            for name, plan in zip(names, plans, strict=True)
        ]
    return names


def _shares(plan: Plan) -> str:
    return f"shares {':'.join(str(group.share) for group in plan.groups)}"


def _cuts(plan: Plan) -> str:
    cuts = (
        ":".join(str(sum(stop - start for start, stop in stage.layers)) for stage in group.stages)
        for group in plan.groups
    )
    return f"layers {' '.join(dict.fromkeys(cuts))}"


def _placed(plan: Plan) -> str:
    return f"ranks {' '.join(spans(stage.ranks) for group in plan.groups for stage in group.stages)}"


def degrees(plan: Plan) -> str:
    """Return what distinguishes a plan from others of the same run, equal groups once.

    Degrees of each kind of group, then options; kinds that differ in one have a value each: `zero 1 | 2`.
    """
    kinds = Counter((" ".join(_cut(group, _values)), _options(group)) for group in plan.groups)
    cuts = [cut if len(plan.groups) == 1 else f"{count} x ({cut})" for (cut, _), count in kinds.items()]
    words = [" + ".join(cuts)]
    for name, usual, *values in zip(_OPTIONS, _USUAL, *(options for _, options in kinds), strict=True):
        said = values[:1] if len(set(values)) == 1 else values
        if set(values) != {usual}:
            words.append(f"{name} {' | '.join(said)}".strip())
    on = [name for name, value in plan.comm.items() if value]
    words += [f"with {' '.join(on)}"] if on else []
    return " ".join(words)


def _cut(group: Group, write: Callable[[Iterable[object]], str]) -> list[str]:
    """Return how a group is cut over its ranks; `write` joins the degrees of its stages."""
    of = {name: write(getattr(stage, name) for stage in group.stages) for name in ("tp", "inner_dp", *RARER)}
    words = [f"tp {of['tp']}", f"pp {len(group.stages)}", f"dp {of['inner_dp']}"]
    words += [f"{name} {of[name]}" for name in RARER if of[name] != "1"]
    return words + ([f"vpp {group.num_chunks}"] if group.num_chunks > 1 else [])


_OPTIONS = ("micro-batch", "zero", "shards", "", "recompute", "offload")
_USUAL = ("", "", "all", "1f1b", "none", "none")  # left out of the words


def _options(group: Group) -> tuple[str, ...]:
    """Return the values of _OPTIONS."""
    stages = group.stages
    return (
        rank_samples(group),
        _values(stage.zero for stage in stages),
        _values(stage.shard_size for stage in stages if stage.shard_size is not None) or "all",
        "1f1b" if group.schedule == "interleaved" else group.schedule,
        _values(stage.recompute for stage in stages),
        _values(stage.offload for stage in stages),
    )


def _values(values: Iterable[object]) -> str:
    return "/".join(map(str, dict.fromkeys(values)))
