"""`foreshard comm import FILE [CLUSTER]`: what nccl-tests printed, beside the prediction."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Word
from foreshard.comm.prediction import NAMES, predict_collective
from foreshard.errors import SpecError
from foreshard.report.screen import Screen, table
from foreshard.spec.codec import read_text

if TYPE_CHECKING:
    from foreshard.interop.nccl_tests import NcclTestRun

_MAX_BYTES = 2**26  # a log of NCCL at its most talkative


@verb_command("import")
@click.argument("file", metavar="FILE")
@click.argument("cluster", metavar="[CLUSTER]", required=False)
@click.option("--collective", type=Word(*NAMES), help="What ran, where the file does not say.")
def command(file: str, cluster: str | None, collective: str | None) -> None:
    """Read FILE, the output of a program of nccl-tests; with CLUSTER, predict every row of it.

    \b
    foreshard comm import all_reduce.log
    foreshard comm import all_reduce.log 2x8xh100-sxm --collective all-reduce --json
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.interop.nccl_tests import read_nccl_tests

    run = read_nccl_tests(read_text(file, max_bytes=_MAX_BYTES), file)
    name = collective or run.collective
    predicted = _predictions(run, name, cluster) if cluster is not None else [None] * len(run.rows)
    errors = [
        abs(time / row.time_s - 1.0)
        for row, time in zip(run.rows, predicted, strict=True)
        if time is not None and row.time_s > 0
    ]
    rows = [asdict(row) | {"predicted_s": time} for row, time in zip(run.rows, predicted, strict=True)]
    data = {
        "schema_version": 1,
        "collective": name,
        "num_ranks": run.num_ranks,
        "num_hosts": run.num_hosts,
        "device": run.device,
        "rows": rows,
        "skipped": run.num_skipped,
        "median_error": median(errors) if errors else None,
    }
    give(data, lambda: _screen(data))


def _predictions(run: NcclTestRun, collective: str | None, cluster: str) -> list[float | None]:
    """Return the predicted time of every row, None where nothing moves."""
    from foreshard import api

    if collective is None:
        raise SpecError(
            "the file does not say which collective ran",
            key="--collective",
            rule="A prediction is one of a collective",
            fix="Give --collective all-reduce, or what it was",
        )
    where = api.load_cluster(cluster)
    ranks = 2 if collective == "send" else run.num_ranks
    return [
        predict_collective(collective, row.size_bytes, where, ranks).time_s if row.size_bytes else None
        for row in run.rows
    ]


def _screen(data: dict[str, Any]) -> Screen:
    rows = [
        (
            quantity.size(row["size_bytes"]),
            quantity.seconds(row["time_s"]),
            quantity.digits(row["algbw_bytes_per_s"] / 1e9),
            quantity.digits(row["busbw_bytes_per_s"] / 1e9),
            quantity.seconds(row["predicted_s"]),
        )
        for row in data["rows"]
    ]
    ran = f"{data['collective'] or 'a collective'} over {data['num_ranks'] or 'unknown'} ranks"
    notes = [f"{data['skipped']} lines have other columns and are left out"] if data["skipped"] else []
    if data["median_error"] is not None:
        notes.append(f"Median error of the prediction: {quantity.percent(data['median_error'])}")
    columns = (">size", ">time", ">algbw GB/s", ">busbw GB/s", ">predicted")
    return Screen(header=(ran,), tables=(table("", columns, rows),), notes=tuple(notes))
