"""The result of a search as a screen: plans ranked, the chosen one drawn, and why the others lost."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foreshard import quantity
from foreshard.advise.baseline_comparison import beyond
from foreshard.catalog.instances import is_old
from foreshard.report.plan_words import RARER, counted, dated, degrees, distinct_names, priced
from foreshard.report.screen import Box, Screen, Table, listing, spans, table, without_empty
from foreshard.report.summary import assumptions_table, step_box
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import Memory
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.advise.baseline_comparison import ComparedPlanner
    from foreshard.advise.sensitivity import Gain
    from foreshard.planner.rental import RentResult
    from foreshard.planner.result import PlanResult, Ranked

_LINE = 100  # characters of a line of the footer

_SHOWN_STAGES = 24  # rows of the chosen plan on a screen
_CLOSED = 0.01
"""Gap at which a search stops before its budget ends."""


def plan_screen(
    result: PlanResult,
    model: str,
    cluster: Cluster,
    *,
    gains: Sequence[Gain] = (),
    others: Sequence[ComparedPlanner] = (),
    pressed: bool = False,
    explained: bool = False,
) -> Screen:
    """Return the ranked plans, the bound beside the best of them, and the chosen plan drawn.

    `gains` is what other hardware would gain, `others` the other planners; `pressed` says that Ctrl-C ended
    the search, `explained` that the assumptions of the chosen plan are shown, not only counted.
    """
    header = (f"{model} on {cluster.name}",)
    notes = plan_notes(result, cluster, pressed=pressed)
    if not result.plans:
        return Screen(header=header, boxes=(searched_box(result),), notes=notes)
    chosen = result.plans[0]
    tables = [ranked_table(result.plans), drawn(chosen.plan, cluster)]
    if len(result.front) > 1:
        tables.append(front_table(result.front))
    if others:
        tables.append(others_table(others))
        notes += (words,) if (words := beyond(chosen.plan, cluster)) else ()
    if gains:
        tables.append(gains_table(gains, counted(result.plans[0].plan)))
    if explained:
        tables.append(assumptions_table(chosen.prediction))
    elif assumed := len(chosen.prediction.assumptions):
        notes += (f"{number_of(assumed, 'assumption')} (--explain).",)
    return Screen(
        header=header,
        boxes=(step_box(chosen.prediction), bound_box(result), searched_box(result)),
        tables=tuple(tables),
        notes=notes,
        footer=_covered(result.space),
    )


def _covered(space: str) -> tuple[str, ...]:
    """Return what a bound covers, a line or a few for each of its terms."""
    if not space:
        return ()
    terms = [
        textwrap.wrap(term, _LINE, initial_indent="- ", subsequent_indent="  ") for term in space.split("; ")
    ]
    return ("The bound covers:", *(line for term in terms for line in term))


def ranked_table(plans: Sequence[Ranked]) -> Table:
    """Return one row per plan, best first; the chosen one carries the mark in the first column."""
    unit = quantity.memory_unit(max((ranked.prediction.memory.peak_bytes for ranked in plans), default=0.0))
    whole_run = any(ranked.prediction.cost.usd_total is not None for ranked in plans)
    many = counted(plans[0].plan) if plans else "tokens"
    price = ">price" if whole_run or not plans else f">per {priced(plans[0].plan, None)[1]}"
    names = iter(distinct_names([ranked.plan for ranked in plans]))
    columns: dict[str, Callable[[Ranked], object]] = {
        "chosen": lambda ranked: "yes ->" if ranked is plans[0] else "",
        "plan": lambda ranked: next(names),
        ">devices": lambda ranked: len(ranked.plan.ranks),
        ">step": lambda ranked: quantity.seconds(ranked.prediction.step_time_s),
        f">{many}/s": lambda ranked: quantity.count(ranked.prediction.tokens_per_s),
        # 0 where devices have no peak
        ">MFU": lambda ranked: quantity.percent(ranked.prediction.mfu or None),
        f">peak {unit}": lambda ranked: _of_capacity(unit, ranked.prediction.memory),
        ">fits": lambda ranked: quantity.percent(ranked.prediction.memory.fits_probability, 0),
        ">run": lambda ranked: quantity.seconds(ranked.prediction.run_time_s),
        ">device-hours": lambda ranked: quantity.count(ranked.prediction.cost.device_hours),
        ">energy": lambda ranked: quantity.watt_hours(ranked.prediction.energy_j_total),
        price: lambda ranked: quantity.usd(_price(ranked)),
        "why": lambda ranked: ranked.why.removeprefix("chosen: "),  # the first column says so
    }
    spare = (">device-hours", ">energy", ">MFU", f">{many}/s", ">fits", f">peak {unit}", ">devices", ">run")
    return without_empty(listing("Plans, best first", plans, columns, spare=spare))


def _price(ranked: Ranked) -> float | None:
    cost = ranked.prediction.cost
    return priced(ranked.plan, cost.usd_per_1b_tokens)[0] if cost.usd_total is None else cost.usd_total


def drawn(plan: Plan, cluster: Cluster) -> Table:
    """Return the plan as groups of stages: which ranks and devices hold which layers for how many samples."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for g, group in enumerate(plan.groups):
        for s, stage in enumerate(group.stages):
            rows.setdefault(_stage_cells(s, group, stage, cluster), []).append(g)
    ranks = {
        (g, s): stage.ranks for g, group in enumerate(plan.groups) for s, stage in enumerate(group.stages)
    }
    cells = []
    for (stage_number, devices, *rest, samples, split), groups in rows.items():
        numbers = _rank_words([ranks[g, int(stage_number)] for g in groups])
        each = " each" if len(groups) > 1 else ""
        cells.append((spans(groups), stage_number, numbers, devices + each, *rest, samples + each, split))
    title = "The chosen plan"
    if len(cells) > _SHOWN_STAGES:
        title += f", its first {_SHOWN_STAGES} of {len(cells)} kinds of stages"
    columns = (
        "group",
        ">stage",
        "ranks",
        "devices",
        "layers",
        "degrees",
        "recompute",
        ">samples",
        "micro-batch",
    )
    spare = ("recompute", "micro-batch", "degrees")
    return without_empty(table(title, columns, cells[:_SHOWN_STAGES], spare=spare))


def _stage_cells(s: int, group: Group, stage: Stage, cluster: Cluster) -> tuple[str, ...]:
    devices = cluster.device_counts(stage.ranks)
    named = [f"{name} {getattr(stage, name)}" for name in RARER if getattr(stage, name) > 1]
    return (
        str(s),
        " + ".join(f"{count} {name}" for name, count in devices.items()),
        ", ".join(f"{start}-{stop - 1}" if stop - start > 1 else str(start) for start, stop in stage.layers),
        " ".join([f"tp {stage.tp}", f"dp {stage.inner_dp}", *named]),
        "" if stage.recompute == "none" else stage.recompute,
        str(group.share),
        _split(group, stage),
    )


def _split(group: Group, stage: Stage) -> str:
    """Return the samples of a micro-batch, and how many ranks take how many of them: 10 = 2 x 2 + 1 x 6."""
    each = stage.rank_shares or (group.micro_batch // stage.inner_dp,) * stage.inner_dp
    if len(each) == 1 or sum(each) != group.micro_batch:
        return str(group.micro_batch)
    return f"{group.micro_batch} = {' + '.join(f'{count} x {n}' for n, count in Counter(each).items())}"


def _of_capacity(unit: str, memory: Memory) -> str:
    """Return a peak against the capacity of its device."""
    return (
        f"{quantity.memory_in(unit, memory.peak_bytes)} / {quantity.memory_in(unit, memory.capacity_bytes)}"
    )


def _rank_words(ranks: list[tuple[int, ...]]) -> str:
    text = spans(sorted(rank for some in ranks for rank in some))
    return text if len(text) <= 40 else f"{text[:36]} ..."


def front_table(plans: Sequence[Ranked]) -> Table:
    """Return the plans that no other beats in time, cost or energy without losing in another."""
    price = priced(plans[0].plan, None)[1]
    columns: dict[str, Callable[[Ranked], object]] = {
        "plan": lambda ranked: degrees(ranked.plan),
        ">devices": lambda ranked: len(ranked.plan.ranks),
        ">step": lambda ranked: quantity.seconds(ranked.prediction.step_time_s),
        f">{price}": lambda ranked: quantity.usd(
            priced(ranked.plan, ranked.prediction.cost.usd_per_1b_tokens)[0]
        ),
        ">energy per step": lambda ranked: quantity.joules(ranked.prediction.energy_j_per_step),
        "against the fastest": lambda ranked: ranked.why,
    }
    spare = (">energy per step", "against the fastest")
    return without_empty(listing("The trade-off", plans, columns, spare=spare))


def others_table(others: Sequence[ComparedPlanner]) -> Table:
    """Return other planners, their plans timed by the same engine."""
    columns: dict[str, Callable[[ComparedPlanner], object]] = {
        "planner": lambda planner: planner.name,
        ">step": lambda planner: quantity.seconds(planner.step_time_s),
        ">over ours": lambda planner: None if planner.ratio is None else f"{planner.ratio:.2f}x",
        ">above the bound": lambda planner: quantity.percent(planner.gap),
        ">took": lambda planner: quantity.seconds(planner.wall_s),
        "note": lambda planner: planner.note,
    }
    return without_empty(listing("Other planners, timed by the same engine", others, columns))


def gains_table(gains: Sequence[Gain], many: str) -> Table:
    """Return what other hardware would gain, most first; `many` is what throughput counts."""
    columns: dict[str, Callable[[Gain], object]] = {
        "change": lambda gain: gain.change,
        f">{many}/s": lambda gain: quantity.gain(gain.gain),
        ">step": lambda gain: quantity.seconds(gain.step_time_s),
        "note": lambda gain: gain.note,
    }
    return without_empty(listing("What other hardware would gain", gains, columns))


_BOUNDS = {
    "time": ("No plan is faster than", quantity.seconds),
    "cost": ("No step costs less than", quantity.usd),
    "energy": ("No step takes less than", quantity.joules),
}


def bound_box(result: PlanResult) -> Box:
    """Return the bound in the objective and the gap to it."""
    title, words = _BOUNDS[result.objective]
    bound, gap = result.proof, result.gap_to_bound
    if bound is None or gap is None:
        return Box(title=title, value="not known", note="")
    return Box(title=title, value=words(bound.value), note=f"gap {quantity.percent(gap)}")


def searched_box(result: PlanResult | RentResult) -> Box:
    """Return how many plans were looked at, and how."""
    return Box(
        title="Searched",
        value=number_of(result.evaluated + result.pruned, "plan"),
        note=f"{result.evaluated:,} timed, {result.pruned:,} excluded, in {quantity.seconds(result.wall_s)}",
    )


def plan_notes(result: PlanResult, cluster: Cluster, *, pressed: bool = False) -> tuple[str, ...]:
    """Return what binds, what idles, how the bound was reached, and why the search ended."""
    notes = []
    date = result.plans[0].prediction.cost.price_date if result.plans else None
    if date is not None and is_old(date):
        notes.append(f"Prices are of {dated(date)}: --prices FILE or --usd-per-device-hour gives yours.")
    if result.binding:
        notes.append(f"What binds: {result.binding}.")
    several = len(cluster.nodes) > 1
    if several and result.plans and (idle := idle_words(result.plans[0].plan, cluster)):
        notes.append(f"Not used: {idle}.")
    if len(result.ladder) > 1 and result.bounds_time:
        steps = ", ".join(f"{name} {quantity.seconds(value)}" for name, value in result.ladder.items())
        notes.append(f"Bounds, the simplest first: {steps}.")
    notes += [note if note.endswith(".") else f"{note}." for note in result.notes]
    if pressed:
        so_far = "the best plan so far; the bound still holds"
        notes.append(f"Interrupted: {so_far}." if result.plans else "Interrupted before a plan was found.")
    elif result.interrupted and result.plans and result.gap > _CLOSED:
        notes.append("The budget ended the search before the gap closed; --budget-s gives it more.")
    return tuple(notes)


def idle_words(plan: Plan, cluster: Cluster) -> str:
    """Return the devices a plan leaves out, by kind."""
    used, present = cluster.device_counts(plan.ranks), cluster.device_counts(range(cluster.num_devices))
    idle = {name: count - used.get(name, 0) for name, count in present.items()}
    return ", ".join(f"{count} of {present[name]} {name}" for name, count in idle.items() if count)
