"""The plans a search found, as people compare them: ranked, the chosen one marked, why the others lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreshard.report import quantity
from foreshard.report.screen import Box, Screen, Table, spans, table
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import Prediction

if TYPE_CHECKING:
    from foreshard.planner.result import PlanResult, Ranked

_SHOWN_STAGES = 24


def plan_screen(result: PlanResult, model: str, cluster: Cluster) -> Screen:
    """Return the ranked plans, the bound beside the best of them, and the chosen plan drawn."""
    header = (f"{model} on {cluster.name}",)
    if not result.plans:
        return Screen(header=header, boxes=(_searched(result),), notes=_notes(result))
    chosen = result.plans[0]
    return Screen(
        header=header,
        boxes=(_step(chosen.prediction), _bound(result), _searched(result)),
        tables=(ranked_table(result.plans), drawn(chosen.plan, cluster)),
        notes=_notes(result),
    )


def ranked_table(plans: Sequence[Ranked]) -> Table:
    """Return one row per plan, best first; the chosen one carries the mark in the first column."""
    columns = ("chosen", "plan", ">devices", ">step", ">tokens/s", ">MFU", ">peak GiB", ">run", ">price", "why")
    rows = [_row(i, one) for i, one in enumerate(plans)]
    return table("Plans, best first", columns, rows, spare=(">MFU", ">tokens/s", ">peak GiB", ">devices"))


def _row(i: int, one: Ranked) -> tuple[str, ...]:
    prediction = one.prediction
    money = prediction.cost
    price = quantity.usd(money.usd_total)
    if money.usd_total is None and money.usd_per_1b_tokens is not None:
        price = f"{quantity.usd(money.usd_per_1b_tokens)}/1B tokens"
    return (
        "-> yes" if i == 0 else "",
        degrees(one.plan),
        str(len(one.plan.ranks)),
        quantity.seconds(prediction.step_time_s),
        quantity.count(prediction.tokens_per_s),
        quantity.percent(prediction.mfu),
        quantity.gib(prediction.memory.peak_bytes),
        quantity.seconds(prediction.run_time_s),
        price,
        one.why,
    )


def degrees(plan: Plan) -> str:
    """Return what distinguishes a plan from others of the same run, equal groups once."""
    kinds: dict[str, list[int]] = {}
    for group in plan.groups:
        kinds.setdefault(_group_words(group), []).append(group.share)
    if len(kinds) == 1 and len(plan.groups) == 1:
        return next(iter(kinds))
    return " + ".join(f"{len(shares)} x ({words})" for words, shares in kinds.items())


def _group_words(group: Group) -> str:
    stage = group.stages[0]
    words = [f"tp {_values(one.tp for one in group.stages)}", f"pp {len(group.stages)}"]
    words.append(f"dp {_values(one.inner_dp for one in group.stages)}")
    named = (("cp", stage.cp, 1), ("ep", stage.ep, 1), ("etp", stage.etp, 1), ("vpp", group.num_chunks, 1))
    words += [f"{name} {value}" for name, value, usual in named if value != usual]
    words += [f"micro-batch {group.micro_batch / stage.inner_dp:g}", f"zero {stage.zero}"]
    if stage.shard_size is not None:
        words.append(f"shards {stage.shard_size}")
    if group.schedule not in ("1f1b", "interleaved"):
        words.append(group.schedule)
    rules = dict.fromkeys(one.recompute for one in group.stages)
    words += [f"recompute {'/'.join(rules)}"] if set(rules) != {"none"} else []
    words += [f"offload {stage.offload}"] if stage.offload != "none" else []
    return " ".join(words)


def _values(numbers: object) -> str:
    return "/".join(map(str, dict.fromkeys(numbers)))  # type: ignore[call-overload]


def drawn(plan: Plan, cluster: Cluster) -> Table:
    """Return the plan as groups of stages: which ranks and devices hold which layers for how many samples."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            rows.setdefault(_stage_cells(s, group, stage, cluster), []).append(g)
    ranks = {(g, s): stage.ranks for g, group in enumerate(plan.groups) for s, stage in enumerate(group.stages)}
    cells = [
        (spans(groups), *rest[:1], _rank_words([ranks[g, int(rest[0])] for g in groups]), *rest[1:])
        for rest, groups in rows.items()
    ]
    title = "The chosen plan"
    if len(cells) > _SHOWN_STAGES:
        title += f", its first {_SHOWN_STAGES} of {len(cells)} kinds of stages"
    columns = ("group", ">stage", "ranks", "devices", "layers", "degrees", ">samples", ">micro-batch")
    return table(title, columns, cells[:_SHOWN_STAGES], spare=(">micro-batch", "degrees"))


def _stage_cells(s: int, group: Group, stage: Stage, cluster: Cluster) -> tuple[str, ...]:
    names: dict[str, int] = {}
    for rank in stage.ranks:
        name = cluster.device_of(rank).name
        names[name] = names.get(name, 0) + 1
    share = str(group.share)
    if stage.rank_shares is not None and len(set(stage.rank_shares)) > 1:
        share += f" as {':'.join(map(str, stage.rank_shares))}"
    return (
        str(s),
        " + ".join(f"{count} {name}" for name, count in names.items()),
        ", ".join(f"{start}-{stop - 1}" if stop - start > 1 else str(start) for start, stop in stage.layers),
        f"tp {stage.tp}" + (f" cp {stage.cp}" if stage.cp > 1 else "") + f" dp {stage.inner_dp}",
        share,
        str(group.micro_batch),
    )


def _rank_words(ranks: list[tuple[int, ...]]) -> str:
    text = spans(sorted(rank for some in ranks for rank in some))
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _step(prediction: Prediction) -> Box:
    low, high = prediction.step_time_interval_s
    note = f"{quantity.seconds_range(low, high)}, {quantity.percent(prediction.interval, 0)}"
    return Box(title="Step", value=quantity.seconds(prediction.step_time_s), note=note)


def _bound(result: PlanResult) -> Box:
    return Box(
        title="No plan is faster than",
        value=quantity.seconds(result.lower_bound_step_time_s),
        note=f"gap {quantity.percent(result.gap)}",
    )


def _searched(result: PlanResult) -> Box:
    return Box(
        title="Searched",
        value=f"{result.evaluated + result.pruned:,} plans",
        note=f"{result.evaluated:,} timed, {result.pruned:,} excluded, in {quantity.seconds(result.wall_s)}",
    )


def _notes(result: PlanResult) -> tuple[str, ...]:
    notes = []
    if result.binding:
        notes.append(f"What binds: {result.binding}.")
    if result.interrupted:
        notes.append("Interrupted: the best plan so far; the bound holds for all plans.")
    return tuple(notes)
