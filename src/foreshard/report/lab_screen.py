"""A lab as a screen (its ranks, its links, what changes when), and policies simulated in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from foreshard import quantity
from foreshard.report.screen import Box, Screen, listing, without_empty
from foreshard.report.simulation_table import KEPT, budget_words, kept_words

_CLOCKS = {
    "wall": "the wall's: namespaces, shaped links and capped cores",
    "cpu": "virtual: processor time times the slow factor",
    "table": "virtual: of a table",
}


def lab_screen(lab: Mapping[str, Any], missing: str | None) -> Screen:
    """Return the screen of a lab, given as `lab --json` prints it."""
    ranks: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "rank": lambda rank: rank["rank"],
        "device": lambda rank: rank["device"],
        ">slow": lambda rank: f"{rank['slow']:g}",
        ">memory": lambda rank: _stated(quantity.size, rank["memory_bytes"]),
        ">per hour": lambda rank: quantity.usd(rank["usd_per_h"]),
    }
    changes: dict[str, Callable[[Mapping[str, Any]], object]] = {
        ">step": lambda change: change["at_step"],
        "rank": lambda change: "all" if change["rank"] is None else change["rank"],
        ">slow": lambda change: _stated("{:g}".format, change["slow"]),
        ">bandwidth": lambda change: _stated(quantity.rate, change["bandwidth_bytes_per_s"]),
        ">latency": lambda change: quantity.seconds(change["latency_s"]),
        "": lambda change: {None: None, True: "joins", False: "is lost"}[change["there"]],
    }
    tables = [without_empty(listing("", lab["ranks"], ranks))]
    if lab["changes"]:
        tables.append(without_empty(listing("changes", lab["changes"], changes)))
    notes = [f"Clock: {_CLOCKS[lab['clock']]}."]
    if missing is not None:
        notes.append(f"This machine cannot enforce it: {missing}.")
    network = lab["network"]
    rate, latency = network["bandwidth_bytes_per_s"], network["latency_s"]
    links = f"links {quantity.rate(rate)}, {quantity.seconds(latency)}"
    return Screen(header=(lab["name"], links), tables=tuple(tables), notes=tuple(notes))


def _stated(write: Callable[[float], str], value: float | None) -> str | None:
    return None if value is None else write(value)


def simulated_lab_screen(name: str, policies: Mapping[str, Mapping[str, Any]]) -> Screen:
    """Return what `foreshard simulate LAB.toml` shows: policies within budget first, fastest first."""
    steps = max(policy["steps"] for policy in policies.values())
    order = sorted(
        policies.items(), key=lambda item: (item[1]["violation"] > KEPT, item[1]["mean_step_time_s"])
    )
    columns: dict[str, Callable[[tuple[str, Mapping[str, Any]]], object]] = {
        "policy": lambda item: item[0],
        ">step": lambda item: quantity.seconds(item[1]["mean_step_time_s"]),
        ">budget": lambda item: kept_words(item[1]["violation"]) if item[1]["budget"] else "none",
        ">reconfigurations": lambda item: item[1]["reconfigurations"],
        ">rebalances": lambda item: item[1]["reshares"],
    }
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
    return Screen(
        header=(f"{name}: {steps} steps, simulated with measured costs",),
        boxes=tuple(boxes),
        tables=(listing("Policies", order, columns),),
        notes=("A step takes what 'predict --costs' says; a change of plan takes the time of what moves.",),
    )
