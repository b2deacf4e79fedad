"""`foreshard comm import FILE [CLUSTER]`: what nccl-tests printed, beside the prediction."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from foreshard import quantity
from foreshard.cli.comm.inputs import MAX_LOG_BYTES
from foreshard.cli.options.answer import give, write_text
from foreshard.cli.options.sources import verb_command
from foreshard.cli.options.values import Word
from foreshard.comm.prediction import NAMES, predict_collective
from foreshard.errors import SpecError
from foreshard.report.screen import Screen, table
from foreshard.spec.codec import read_text

if TYPE_CHECKING:
    from foreshard.comm.refit import MeasuredRun
    from foreshard.interop.nccl_tests import NcclTestRun


@verb_command("import")
@click.argument("file", metavar="FILE")
@click.argument("cluster", metavar="[CLUSTER]", required=False)
@click.option("--collective", type=Word(*NAMES), help="What ran, where the file does not say.")
@click.option(
    "--fit",
    metavar="OUT.toml",
    help="Refit the constants of collectives, and write CLUSTER with them as a cluster file.",
)
@click.option(
    "--fit-nccl",
    metavar="OUT.toml",
    help="Refit the constants of NCCL's own model, and write them for comm predict --library OUT.toml.",
)
@click.option(
    "--algorithm",
    metavar="ALGORITHM/PROTOCOL",
    help="With --fit-nccl: what ran (NCCL_ALGO, NCCL_PROTO), where it was fixed.",
)
@click.option(
    "--also", multiple=True, metavar="FILE", help="Fit this output too (again for each); it says what ran."
)
def command(
    file: str,
    cluster: str | None,
    collective: str | None,
    fit: str | None,
    fit_nccl: str | None,
    algorithm: str | None,
    also: tuple[str, ...],
) -> None:
    """Read FILE, the output of a program of nccl-tests; with CLUSTER, predict every row of it.

    With --fit, the constants are refitted to the rows, and every verb that takes a cluster takes the file
    that is written: predict and plan then count with what was measured. With --fit-nccl, NCCL's own
    latencies and bandwidth limits are refitted, as far as the rows tell them. Which algorithm ran at which
    size is what NCCL logged in FILE (NCCL_DEBUG_SUBSYS=TUNING), --algorithm, or the pick of NCCL's model.

    \b
    foreshard comm import all_reduce.log
    foreshard comm import all_reduce.log 2x8xh100-sxm --collective all-reduce --json
    foreshard comm import all_reduce.log 2x8xh100-sxm --also all_to_all.log --fit measured.toml
    foreshard comm import all_reduce.log 1x8xh100-sxm --fit-nccl nccl.toml
    """  # noqa: D301 - a lone backslash-b keeps the lines below apart in --help
    from foreshard.interop.nccl_tests import read_nccl_tests

    _check_fits(fit, fit_nccl, algorithm, also)
    run = read_nccl_tests(read_text(file, max_bytes=MAX_LOG_BYTES), file)
    name = collective or run.collective
    fitted = of_nccl = None  # what is said of the files of constants
    others = [(read_nccl_tests(read_text(path, max_bytes=MAX_LOG_BYTES), path), path) for path in also]
    if fit is not None:
        text, fitted = _fit(run, name, cluster, others)
        write_text(fit, text)
    if fit_nccl is not None:
        from foreshard.cli.comm.nccl_fit import fit_constants

        text, of_nccl = fit_constants(run, name, cluster, file, others, algorithm)
        write_text(fit_nccl, text)
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
        "fit": None if fitted is None else fitted | {"file": fit},
        "fit_nccl": None if of_nccl is None else of_nccl | {"file": fit_nccl},
    }
    give(data, lambda: _screen(data))


def _check_fits(fit: str | None, fit_nccl: str | None, algorithm: str | None, also: tuple[str, ...]) -> None:
    """Refuse what only a fit reads."""
    if algorithm is not None and fit_nccl is None:
        key, value, rule = (
            "--algorithm",
            algorithm,
            "It says of which algorithm --fit-nccl fits the constants",
        )
    elif also and fit is None and fit_nccl is None:
        key, value, rule = "--also", also[0], "More outputs are read for a fit"
    else:
        return
    fix = f"Add {'--fit-nccl OUT.toml' if key == '--algorithm' else '--fit OUT.toml'}, or leave it out"
    raise SpecError(f"{key} without a fit", key=key, value=value, rule=rule, fix=fix)


def _fit(
    run: NcclTestRun, name: str | None, cluster: str | None, others: list[tuple[NcclTestRun, str]]
) -> tuple[str, dict[str, Any]]:
    """Return a cluster file with constants refitted to all runs, and what is said of it."""
    from foreshard import api
    from foreshard.catalog.cluster_file import cluster_text
    from foreshard.comm.refit import refit

    if cluster is None:
        rule, fix = "A fit needs the cluster that was measured", "Give it behind FILE, such as 2x8xh100-sxm"
        raise SpecError("constants are those of a cluster", key="CLUSTER", rule=rule, fix=fix)
    where = api.load_cluster(cluster)
    runs = [_measured(run, name, where.num_devices, "FILE")]
    runs += [_measured(other, other.collective, where.num_devices, path) for other, path in others]
    found = refit(where, runs)
    latency_s = found.constants.get("nic_latency_s")
    kept = {key: value for key, value in found.constants.items() if key != "nic_latency_s"}
    groups = tuple(
        replace(
            group,
            collectives=tuple((dict(group.collectives) | kept).items()),
            nic_latency_s=group.nic_latency_s if latency_s is None else latency_s,
        )
        for group in where.nodes
    )
    summary = {
        "constants": dict(found.constants),
        "factors": dict(found.factors),
        "median_error_before": found.median_error_before,
        "median_error": found.median_error,
    }
    return cluster_text(replace(where, nodes=groups)), summary


def _measured(run: NcclTestRun, name: str | None, devices: int, file: str) -> MeasuredRun:
    """Return the rows of a run that move something."""
    from foreshard.comm.refit import MeasuredRun

    if name is None:
        raise _unnamed(file)
    rows = [row for row in run.rows if row.size_bytes > 0 and row.time_s > 0.0]
    ranks = 2 if name == "send" else run.num_ranks or devices
    return MeasuredRun(
        collective=name,
        num_ranks=ranks,
        num_bytes=np.array([row.size_bytes for row in rows], dtype=float),
        time_s=np.array([row.time_s for row in rows], dtype=float),
    )


def _unnamed(file: str | None = None) -> SpecError:
    return SpecError(
        "the file does not say which collective ran",
        file=file,
        key="--collective",
        rule="A prediction is one of a collective",
        fix="Give --collective all-reduce, or what it was",
    )


def _predictions(run: NcclTestRun, collective: str | None, cluster: str) -> list[float | None]:
    """Return the predicted time of every row, None where nothing moves."""
    from foreshard import api

    if collective is None:
        raise _unnamed()
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
    if data["fit"] is not None:
        before, after = (
            quantity.percent(data["fit"][key]) for key in ("median_error_before", "median_error")
        )
        moved = ", ".join(f"{name} x {value:.3g}" for name, value in data["fit"]["factors"].items())
        notes.append(f"Refitted: median error {before} before, {after} after ({moved})")
        notes.append(f"{data['fit']['file']} is a cluster file for predict, plan and comm predict")
    if data["fit_nccl"] is not None:
        from foreshard.cli.comm.nccl_fit import notes_of

        notes += notes_of(data["fit_nccl"])
    columns = (">size", ">time", ">algbw GB/s", ">busbw GB/s", ">predicted")
    return Screen(header=(ran,), tables=(table("", columns, rows),), notes=tuple(notes))
