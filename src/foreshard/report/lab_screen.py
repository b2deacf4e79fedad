"""A lab as a screen: its ranks, its links, what changes when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreshard.quantity import usd
from foreshard.report.screen import Screen, table, without_empty
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
        (change["at_step"], "all" if change["rank"] is None else change["rank"], *_told(change))
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


def _told(change: Mapping[str, Any]) -> tuple[str | None, ...]:
    slow, rate, latency = change["slow"], change["bandwidth_bytes_per_s"], change["latency_s"]
    return (
        None if slow is None else f"{slow:g}",
        None if rate is None else format_rate(rate),
        None if latency is None else format_seconds(latency),
        {None: None, True: "joins", False: "is lost"}[change["there"]],
    )
