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
from foreshard.cli.options.values import Amount, Count
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
@click.option(
    "--engine", type=click.Choice(["analytical", "graph", "event"]), default="graph", help="What predicts."
)
@click.option("--costs", metavar="SOURCE|FILE", default="formula", help="Cost source.")
@click.option("--exclude-calibration", metavar="FAMILY", help="Use constants fitted without this family.")
@click.option(
    "--max-mape", type=Amount(), help="Exit 5 when the mean error, skipped rows as 1.0, is above this."
)
@click.option(
    "--max-networks",
    type=Count(),
    help="Of tables of networks, trace so many, spread evenly over their names (default all).",
)
@click.option(
    "--by-system",
    is_flag=True,
    help="Of collectives: every system by constants fitted without it, by closed form and NCCL's estimate.",
)
@click.pass_context
def command(
    ctx: click.Context, files: tuple[str, ...], max_mape: float | None, by_system: bool, **options: Any
) -> None:
    """Predict every row of tables of measurements (.csv, .csv.gz) and score the predictions.

    A bare file name that is not here is looked for in FORESHARD_MEASURED (default ../shared/measured/dev).
    """
    from foreshard import api
    from foreshard.validation.validate import check_mape

    if by_system:
        from foreshard.validation.collective_systems import collective_systems

        found = collective_systems(map(find, files))
        give({"schema_version": 1} | found, lambda: _systems(found))
        return
    result = api.validate(map(find, files), workers=os.cpu_count() or 1, told=say, **options)
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
    return str(known) if os.path.exists(known) else name


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
    held = summary["intervals"]
    if held["by_level"]:
        rests_on = [
            (name, str(scores["rows"]), _cell(scores, "coverage"), _cell(scores, "relative_width_median"))
            for name, scores in held["by_evidence"].items()
        ]
        levels = [(quantity.percent(float(k), 0), quantity.percent(v)) for k, v in held["by_level"].items()]
        columns = ("predictions rest on", ">rows", ">inside", ">median width")
        tables.append(table("90 % intervals", columns, rests_on))
        tables.append(table("", (">level", ">inside"), levels))
    reasons = Counter(outcome["reason"] for outcome in result["rows"] if outcome["status"] == "skipped")
    if reasons:
        skipped = [(count, reason) for reason, count in reasons.most_common()]
        tables.append(table("Skipped", (">rows", "reason"), skipped))
    return Screen(tables=tuple(tables))


def _systems(found: dict[str, Any]) -> Screen:
    """Return the errors of systems left out, and why rows are skipped."""
    rows = [_system(one["system"], str(one["nodes"]), one["models"]) for one in found["systems"]]
    rows.append(_system("all", "", found["pooled"]["models"]))
    columns = ["system", ">nodes", ">rows", ">skipped"]
    for model in found["pooled"]["models"]:
        columns += [f">{model}, median", ">p90", ">bias"]
    columns.append(">90 % holds")
    skipped = [
        (model, entry["rows"], entry["reason"], ", ".join(entry["systems"]))
        for model, entries in found["skipped"].items()
        for entry in entries
    ]
    why = table("Skipped", ("model", ">rows", "reason", "systems"), skipped)
    return Screen(tables=(table("Each system left out of the fit", tuple(columns), rows), why))


def _system(name: str, nodes: str, models: dict[str, Any]) -> tuple[str | None, ...]:
    first = next(iter(models.values()))
    cells = [_cell(scores, key) for scores in models.values() for key in ("median_ape", "p90_ape", "bias")]
    held = _cell(first, "coverage")  # of the closed form: NCCL's estimate has no interval
    return (name, nodes, str(first["rows"]), str(first["skipped"]), *cells, held)
