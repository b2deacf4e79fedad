"""`foreshard validate FILE...`: predict measured runs and score the predictions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import give, say
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Amount
from foreshard.errors import AccuracyError
from foreshard.report.screen import Screen, table

_SCORES = (
    "rows",
    "skipped",
    "mape",
    "median_ape",
    "p90_ape",
    "bias",
    "coverage",
    "kendall_tau",
    "memory_median_ape",
)


@verb_command("validate")
@click.argument("files", nargs=-1, required=True)
@click.option("--engine", type=click.Choice(["analytical", "graph"]), default="graph", help="Default graph.")
@click.option("--costs", metavar="SOURCE", default="formula", help="Cost source (default formula).")
@click.option("--exclude-calibration", metavar="FAMILY", help="Use constants fitted without this family.")
@click.option(
    "--max-mape", type=Amount(), help="Exit 5 when the mean error, skipped rows as 1.0, is above this."
)
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    engine: str,
    costs: str,
    exclude_calibration: str | None,
    max_mape: float | None,
) -> None:
    """Predict every row of tables of measurements (.csv, .csv.gz) and score the predictions.

    A bare file name that is not here is looked for in FORESHARD_MEASURED (default ../shared/measured/dev).
    """
    from foreshard import api
    from foreshard.validation.validate import check_mape

    found = [find(name) for name in files]
    result = api.validate(found, engine=engine, costs=costs, exclude_calibration=exclude_calibration)
    give({"schema_version": 1} | result, lambda: _screen(result))
    if max_mape is not None:
        try:
            check_mape(result, max_mape)
        except AccuracyError as error:
            say(f"foreshard: {error}")
            ctx.exit(error.exit_code)


def find(name: str) -> str:
    """Return the path of a table: as given, else in the folder of measurements."""
    if os.path.exists(name) or os.path.basename(name) != name:
        return name
    from foreshard.validation.tables import measured_folder

    known = Path(measured_folder()) / name
    return str(known) if known.exists() else name


def _screen(result: dict[str, Any]) -> Screen:
    def row(name: str, scores: dict[str, Any]) -> list[str]:
        cells = [name]
        for key in _SCORES:
            value = scores.get(key)
            if value is None or key in ("rows", "skipped"):
                cells.append(quantity.UNKNOWN if value is None else str(value))
            else:
                cells.append(f"{value:.2f}" if key == "kendall_tau" else quantity.percent(value))
        return cells

    summary = result["summary"]
    rows = [row(name, scores) for name, scores in sorted(summary["by_family"].items())]
    columns = ("family", *(f">{key.replace('_', ' ')}" for key in _SCORES))
    reasons: dict[str, int] = {}
    for one in result["rows"]:
        if one["status"] == "skipped":
            reasons[one["reason"]] = reasons.get(one["reason"], 0) + 1
    skipped = sorted(reasons.items(), key=lambda item: -item[1])
    tables = [table("", columns, [*rows, row("all", summary["overall"])])]
    if skipped:
        tables.append(table("Skipped", (">rows", "reason"), [(count, reason) for reason, count in skipped]))
    return Screen(tables=tuple(tables))
