"""A lab as a screen (its ranks, its links, what changes when), and policies simulated in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreshard import quantity
from foreshard.quantity import usd
from foreshard.report.screen import Box, Screen, table, without_empty
from foreshard.report.simulation_table import KEPT, budget_words, kept_words
from foreshard.units import format_bytes, format_rate, format_seconds

_CLOCKS = {
    "wall": "the wall's: namespaces, shaped links and capped cores",
    "cpu": "virtual: processor time times the slow factor",
    "table": "virtual: of a table",
}


def lab_screen(lab: Mapping[str, Any], missing: str | None) -> Screen:
    """Return the screen of a lab, given as `lab --json` prints it."""
    network = lab["network"]
    ranks = [
        (
            rank["rank"],
            rank["device"],
            f"{rank['slow']:g}",
            _memory(rank["memory_bytes"]),
            usd(rank["usd_per_h"]),
        )
        for rank in lab["ranks"]
    ]
    changes = [
        (change["at_step"], "all" if change["rank"] is None else change["rank"], *_change_cells(change))
        for change in lab["changes"]
    ]
    tables = [without_empty(table("", ("rank", "device", ">slow", ">memory", ">per hour"), ranks))]
    if changes:
        head = (">step", "rank", ">slow", ">bandwidth", ">latency", "")
        tables.append(without_empty(table("changes", head, changes)))
    notes = [f"Clock: {_CLOCKS[lab['clock']]}."]
    if missing is not None:
        notes.append(f"This machine cannot enforce it: {missing}.")
    links = f"links {format_rate(network['bandwidth_bytes_per_s'])}, {format_seconds(network['latency_s'])}"
    return Screen(header=(lab["name"], links), tables=tuple(tables), notes=tuple(notes))


def _memory(size_bytes: float | None) -> str | None:
    return None if size_bytes is None else format_bytes(size_bytes)


def _change_cells(change: Mapping[str, Any]) -> tuple[str | None, ...]:
    slow, rate, latency = change["slow"], change["bandwidth_bytes_per_s"], change["latency_s"]
    return (
        None if slow is None else f"{slow:g}",
        None if rate is None else format_rate(rate),
        None if latency is None else format_seconds(latency),
        {None: None, True: "joins", False: "is lost"}[change["there"]],
    )


def simulated_lab_screen(name: str, policies: Mapping[str, Mapping[str, Any]]) -> Screen:
    """Return what `foreshard simulate LAB.toml` shows: policies within budget first, fastest first."""
    steps = max(one["steps"] for one in policies.values())
    rows = sorted(
        (one["violation"] > KEPT, one["mean_step_time_s"], policy, one) for policy, one in policies.items()
    )
    cells = [
        (policy, quantity.seconds(mean_s), _kept(one), one["reconfigurations"], one["reshares"])
        for _, mean_s, policy, one in rows
    ]
    boxes = []
    if "lyapunov" in policies:
        ours = policies["lyapunov"]
        boxes.append(
            Box(
                title="lyapunov",
                value=f"{quantity.seconds(ours['mean_step_time_s'])} a step",
                note=budget_words(ours["violation"]) if ours["budget"] else "",
                alarm=ours["violation"] > KEPT,
            )
        )
    columns = ("policy", ">step", ">budget", ">reconfigurations", ">rebalances")
    return Screen(
        header=(f"{name}: {steps} steps, simulated with measured costs",),
        boxes=tuple(boxes),
        tables=(table("Policies", columns, cells),),
        notes=("A step takes what 'predict --costs' says; a change of plan takes the time of what moves.",),
    )


def _kept(one: Mapping[str, Any]) -> str:
    return kept_words(one["violation"]) if one["budget"] else "none"
