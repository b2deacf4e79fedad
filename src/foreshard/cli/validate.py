"""`foreshard validate FILE...`: predict measured runs and score the predictions."""

from __future__ import annotations

import os
from collections import Counter
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
@click.option("--engine", type=click.Choice(["analytical", "graph"]), default="graph", help="What predicts.")
@click.option("--costs", metavar="SOURCE", default="formula", help="Cost source.")
@click.option("--exclude-calibration", metavar="FAMILY", help="Use constants fitted without this family.")
@click.option(
    "--max-mape", type=Amount(), help="Exit 5 when the mean error, skipped rows as 1.0, is above this."
)
@click.pass_context
def command(ctx: click.Context, files: tuple[str, ...], max_mape: float | None, **options: Any) -> None:
    """Predict every row of tables of measurements (.csv, .csv.gz) and score the predictions.

    A bare file name that is not here is looked for in FORESHARD_MEASURED (default ../shared/measured/dev).
    """
    from foreshard import api
    from foreshard.validation.validate import check_mape

    result = api.validate(map(find, files), **options)
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


def _cell(scores: dict[str, Any], key: str) -> str | None:
    value = scores.get(key)
    if value is None or key in ("rows", "skipped"):
        return None if value is None else str(value)
    return f"{value:.2f}" if key == "kendall_tau" else quantity.percent(value)


def _screen(result: dict[str, Any]) -> Screen:
    summary = result["summary"]
    families = [*sorted(summary["by_family"].items()), ("all", summary["overall"])]
    rows = [(name, *(_cell(scores, key) for key in _SCORES)) for name, scores in families]
    tables = [table("", ("family", *(f">{key.replace('_', ' ')}" for key in _SCORES)), rows)]
    reasons = Counter(outcome["reason"] for outcome in result["rows"] if outcome["status"] == "skipped")
    if reasons:
        skipped = [(count, reason) for reason, count in reasons.most_common()]
        tables.append(table("Skipped", (">rows", "reason"), skipped))
    return Screen(tables=tuple(tables))
