"""`foreshard comm import --fit-nccl`: NCCL's own constants refitted to what nccl-tests printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from foreshard import quantity
from foreshard.comm.nccl.communicator import communicator_of
from foreshard.comm.nccl.constants import ALGORITHMS, PROTOCOLS, releases
from foreshard.comm.nccl.constants_file import constants_text
from foreshard.comm.nccl.refit import Label, NcclRun, labels_of, refit_nccl
from foreshard.errors import SpecError, unknown

if TYPE_CHECKING:
    from foreshard.interop.nccl_tests import NcclTestRun
    from foreshard.spec.cluster import Cluster


def fit_constants(
    run: NcclTestRun,
    name: str | None,
    cluster: str | None,
    file: str,
    others: list[tuple[NcclTestRun, str]],
    algorithm: str | None,
) -> tuple[str, dict[str, Any]]:
    """Return a file of the constants of NCCL's model refitted to all runs, and what is said of it."""
    from foreshard import api

    if cluster is None:
        rule, fix = "NCCL's estimates are of devices and links", "Give it behind FILE, such as 2x8xh100-sxm"
        raise SpecError("constants are refitted on the links of a cluster", key="CLUSTER", rule=rule, fix=fix)
    where = api.load_cluster(cluster)
    stated = None if algorithm is None else _label(algorithm)
    runs = [_measured(run, name, where, stated, file)]
    runs += [_measured(other, other.collective, where, stated, path) for other, path in others]
    found = refit_nccl(runs)
    text = constants_text(
        found.constants, measured_with=run.release, measured_on=where.name, shared=found.shared
    )
    summary = {
        "measured_with": run.release or None,
        "constants": dict(found.constants),
        "shared": [list(group) for group in found.shared],
        "kept": list(found.kept),
        "reached": {_spelled(label): share for label, share in found.reached.items()},
        "too_few_sizes": [_spelled(label) for label in found.few],
        "median_error_before": found.median_error_before,
        "median_error": found.median_error,
    }
    return text, summary


def _label(text: str) -> Label:
    """Return algorithm and protocol of ``Ring/LL``."""
    algorithm, slash, protocol = text.partition("/")
    names = {spelled.lower(): own for own, spelled in ALGORITHMS.items()} | {own: own for own in ALGORITHMS}
    protocols = {own.lower(): own for own in PROTOCOLS}
    own, kept = names.get(algorithm.strip().lower()), protocols.get(protocol.strip().lower())
    if own is None or kept is None or not slash:
        known = [f"{spelled}/{own}" for spelled in ALGORITHMS.values() for own in PROTOCOLS]
        raise unknown("algorithm", text, known, key="--algorithm", rule="An algorithm and a protocol are")
    return own, kept


def _spelled(label: Label) -> str:
    return f"{ALGORITHMS[label[0]]}/{label[1]}"


def _measured(run: NcclTestRun, name: str | None, where: Cluster, stated: Label | None, file: str) -> NcclRun:
    """Return the rows of a run that move something, with what ran at each size."""
    if name is None:
        what = "the file does not say which collective ran"
        rule = "NCCL has constants of each algorithm of a collective"
        fix = "Give --collective all-reduce, or what it was"
        raise SpecError(what, file=file, key="--collective", rule=rule, fix=fix)
    ranks = run.num_ranks or where.num_devices
    if ranks > where.num_devices:
        what = f"{ranks} ranks on {where.num_devices} devices"
        rule, fix = "A fit needs the cluster that was measured", "Give the cluster on which the file was made"
        raise SpecError(what, file=file, key="CLUSTER", value=where.name, rule=rule, fix=fix)
    release = ".".join(run.release.split(".")[:2])
    comm = communicator_of(where, ranks, release=release if release in releases() else "")
    rows = [row for row in run.rows if row.size_bytes > 0 and row.time_s > 0.0]
    sizes = [row.size_bytes for row in rows]
    picks: dict[int, Label] = dict.fromkeys(sizes, stated) if stated else dict(run.picks)
    return NcclRun(
        collective=name,
        communicator=comm,
        num_bytes=np.array(sizes, dtype=float),
        time_s=np.array([row.time_s for row in rows]),
        labels=labels_of(name, sizes, comm, picks),
    )


def notes_of(summary: dict[str, Any]) -> list[str]:
    """Return what was refitted, in sentences."""
    before, after = (quantity.percent(summary[key]) for key in ("median_error_before", "median_error"))
    moved = ", ".join(f"{name} {value:.4g}" for name, value in summary["constants"].items())
    notes = [f"NCCL's constants refitted: median error {before} before, {after} after ({moved or 'none'})."]
    notes += [
        f"Of {' and '.join(group)} the times tell a common factor only; several numbers of ranks (--also) "
        "tell more."
        for group in summary["shared"]
    ]
    if summary["reached"]:
        shares = ", ".join(f"{name} {quantity.percent(share)}" for name, share in summary["reached"].items())
        notes.append(f"Bandwidths of channels have no constant; of NCCL's the times reach: {shares}.")
    if summary["kept"]:
        notes.append(f"Not told by these times, and as NCCL ships them: {', '.join(summary['kept'])}.")
    if summary["too_few_sizes"]:
        notes.append(f"Too few sizes for a fit: {', '.join(summary['too_few_sizes'])}.")
    notes.append(f"{summary['file']} is for comm predict --library {summary['file']}.")
    return notes
