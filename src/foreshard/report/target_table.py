"""Whole runs to a target as a table: one row for each global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from foreshard import quantity
from foreshard.advise.to_target import BatchRun, TargetRuns
from foreshard.report.screen import Screen, Table, listing, without_empty


def with_target(screen: Screen, found: TargetRuns[Any] | None) -> Screen:
    """Return the screen of the best batch with the runs at all batches before its tables."""
    if found is None:
        return screen
    return replace(
        screen, tables=(target_table(found), *screen.tables), notes=(*found.notes(), *screen.notes)
    )


def target_table(found: TargetRuns[Any]) -> Table:
    """Return a row for each batch; the best one carries the mark in the first column."""
    columns: dict[str, Callable[[BatchRun], object]] = {
        "best": lambda run: "yes ->" if run is found.chosen and not run.why else "",
        ">global batch": lambda run: run.global_batch,
        ">steps": lambda run: f"{run.steps:,}",
        ">samples": lambda run: quantity.count(run.samples),
        ">step": lambda run: quantity.seconds(run.step_time_s),
        ">run": lambda run: quantity.seconds(run.time_s),
        ">price": lambda run: quantity.usd(run.usd),
        ">energy": lambda run: quantity.joules(run.energy_j),
        "": lambda run: run.why or ("" if run.known else "outside the known batches"),
    }
    title = f"To the target, by global batch (least {found.objective} is best)"
    return without_empty(listing(title, found.runs, columns, spare=(">samples", ">energy", ">step")))
