"""Policies on a changing cluster as a screen: which keep the budgets, how far each is from the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foreshard import quantity
from foreshard.report.screen import Box, Screen, Table, listing, without_empty
from foreshard.simulate.evaluation import FIXED, KEPT, STAGES, Evaluation, half_width
from foreshard.units import number_of


def online_screen(found: Evaluation) -> Screen:
    """Return what `foreshard simulate` shows."""
    scenario, first = found.scenario, found.rounds[0]
    seeds = number_of(len(found.rounds), "path")
    devices = number_of(found.cluster.num_devices, "device")
    header = (
        f"{scenario.name or scenario.file}: {scenario.model} on {devices}",
        f"{seeds} of {found.slots} slots, {scenario.batches} batches each; decisions know "
        + ("the present slot" if scenario.sees_now else "the previous batch")
        + f"; {first.path['changes_per_1000']:.0f} changes per 1000 slots",
    )
    return Screen(header=header, boxes=_boxes(found), tables=(policies_table(found),), notes=_notes(found))


def _boxes(found: Evaluation) -> tuple[Box, ...]:
    bound = found.times("bound")
    excess = max(played.bound.least_excess for played in found.rounds)
    note = f"clairvoyant, {excess:.1%} above the budgets: none keeps them" if excess else "clairvoyant"
    boxes = [Box(title="bound", value=f"{quantity.seconds(float(bound.mean()))} a batch", note=note)]
    if "lyapunov" in found.policies:
        gap = float((found.times("lyapunov") / bound - 1.0).mean())
        over = float(found.violations("lyapunov").max())
        boxes.append(
            Box(
                title="lyapunov",
                value=f"{100 * gap:.1f} % over the bound",
                note=budget_words(over),
                alarm=over > KEPT,
            )
        )
        boxes += _cut(found)
    return tuple(boxes)


def budget_words(over: float) -> str:
    """Return whether budgets are kept, of the largest excess of a mean over one."""
    if over > KEPT:
        return f"budget exceeded by {100 * over:.2f} %"
    return f"budget kept, {100 * over:.2f} % above" if over > 0.0 else "budget kept"


def kept_words(over: float) -> str:
    """Return the same for a cell of a table."""
    return "kept" if over <= KEPT else f"broken, +{100 * over:.0f} %"


def _cut(found: Evaluation) -> list[Box]:
    """Return the cut against equal shares, of ours and of the bound."""
    if "equal-share" not in found.policies:
        return []
    equal = found.times("equal-share")
    ours = float((1.0 - found.times("lyapunov") / equal).mean())
    ideal = float((1.0 - found.times("bound") / equal).mean())
    if ideal <= 0.0:
        return []
    note = f"{ours / ideal:.3f} of the bound's {100 * ideal:.1f} %"
    return [Box(title="cut against equal-share", value=f"{100 * ours:.1f} %", note=note)]


def _equal_budget(found: Evaluation) -> tuple[str, ...]:
    """Return sentences on equal shares that keep the budgets."""
    if "lyapunov" not in found.policies:
        return ()
    fixed_sets = {"equal": "the best devices of every state"}
    if FIXED in found.policies:
        fixed_sets[FIXED] = "the best fixed devices"
    notes = []
    for name, devices in fixed_sets.items():
        cut = found.cut("lyapunov", name)
        if not cut.feasible:
            notes.append(f"Equal shares on {devices} in hindsight do not keep the budgets.")
            continue
        part = "too small a gain to compare" if cut.part is None else f"{cut.part:.3f} of it"
        notes.append(
            f"Equal shares in budget on {devices} in hindsight: {quantity.seconds(cut.equal_s)} a batch. "
            f"The bound cuts {100 * cut.ideal:z.1f} % of it, lyapunov {100 * cut.ours:z.1f} %: {part}."
        )
    return tuple(notes)


def policies_table(found: Evaluation) -> Table:
    """Return a row for each policy, those that keep the budgets first, fastest first."""

    def over(name: str) -> float:
        return float(found.violations(name).max())

    def mean(name: str, of: Callable[[Any], float]) -> float:
        return sum(of(played.runs[name]) for played in found.rounds) / len(found.rounds)

    def spread(name: str) -> str:
        width = half_width(found.times(name))  # one path has none
        return "" if width is None else f"± {100 * width / found.times(name).mean():.2f} %"

    columns: dict[str, Callable[[str], object]] = {
        "policy": lambda name: name,
        ">batch": lambda name: quantity.seconds(float(found.times(name).mean())),
        ">95 %": spread,
        ">over bound": lambda name: quantity.gain(
            float((found.times(name) / found.times("bound") - 1.0).mean())
        ),
        ">budget": lambda name: kept_words(over(name)),
        ">reconfigurations": lambda name: f"{mean(name, lambda run: run.reconfigurations):.0f}",
        ">rebalances": lambda name: f"{mean(name, lambda run: run.reshares):.0f}",
        ">devices": lambda name: f"{mean(name, lambda run: float(run.used.mean())):.1f}",
    }

    def place(name: str) -> tuple[bool, float, str]:
        return over(name) > KEPT, float(found.times(name).mean()), name

    order = sorted(found.policies, key=place)
    return without_empty(listing("Policies", order, columns, spare=(">devices", ">rebalances")))


def _notes(found: Evaluation) -> tuple[str, ...]:
    notes = [*_equal_budget(found), f"The bound covers {found.bounded}, with free changes."]
    if STAGES in found.policies:
        notes.append(f"{STAGES} also cuts layers between devices, so the bound does not hold for it.")
    for i, budget in enumerate(found.scenario.budget):
        limit = sum(part.budgets[i].limit for part in found.rounds) / len(found.rounds)
        of = f", {budget.share:g} of what {budget.of} spends" if budget.of else ""
        notes.append(f"Budget {budget.name}: {quantity.digits(limit)} {budget.kind} per {budget.per}{of}.")
    return tuple(notes)
