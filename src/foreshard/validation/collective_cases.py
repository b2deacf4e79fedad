"""Measured collectives as cases: predicted seconds of every row of a table.

Sizes are what nccl-tests prints, times are out of place; rows of a shape the cost model lacks say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.devices import resolve_device
from foreshard.catalog.instances import usual_node_size
from foreshard.comm.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    reduce_scatter_s,
    send_s,
)
from foreshard.comm.fabric import Fabric, fabric_of
from foreshard.errors import SpecError
from foreshard.validation.facts import integer, number
from foreshard.validation.row_cluster import nic_rate
from foreshard.validation.tables import MeasuredTable

_TIMES = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
    "alltoall": all_to_all_s,
    "broadcast": broadcast_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """One measured time and the time predicted for it; `reason` says why there is none."""

    measured_s: float | None
    predicted_s: float | None = None
    reason: str | None = None


NOT_MODELLED = "not modelled"


def reason_of(error: SpecError) -> str:
    """Return why a row is not predicted; an error that says nothing else is its own reason."""
    return str(error) if error.rule or error.fix else error.what


def era_of(library: str, system: str) -> str:
    """Return the NCCL era of a row: 2.10 and before, and servers profiled then, are old."""
    version = re.search(r"\b2\.(\d+)", library)
    if version is None:
        return "old" if "vtrain" in system.lower() else "2.2x"
    minor = int(version[1])
    return "old" if minor <= 10 else "2.1x" if minor < 20 else "2.2x"


def _known_era(era: str) -> str:
    """Return the era the constants know: 2.1x is read as 2.2x where it has no row of its own."""
    from foreshard.catalog.fabrics import comm_constants

    return era if era in comm_constants()["eras"] else "2.2x"


@cache
def _fabric(gpu: str, num_ranks: int, num_nodes: int, network: str, era: str, exclude: str) -> Fabric:
    """Return the fabric of a row's machine."""
    device = resolve_device(gpu)
    usual = usual_node_size(device)
    if num_nodes > 1:
        per_node, nodes = max(1, num_ranks // num_nodes), num_nodes
    else:
        per_node, nodes = max(usual, num_ranks), 1
        if "nvl72" in device.name:  # a tray has four, the domain reaches over trays
            per_node, nodes = usual, math.ceil(num_ranks / usual)
    rate = nic_rate(network) if nodes > 1 else None
    suffix = f"@{rate.replace(' ', '')}" if rate else ""
    cluster = load_cluster(f"{nodes}x{per_node}x{device.name}{suffix}")
    return fabric_of(cluster.nodes[0], nccl=_known_era(era), exclude=exclude)


def _sizes(row: Mapping[str, str]) -> tuple[int, float]:
    """Return the ranks and the bytes of a row."""
    megabytes = number(row, "data_size_mb") if "data_size_mb" in row else None
    num_bytes = megabytes * 1e6 if megabytes is not None else number(row, "size_bytes") or 0.0
    ranks = integer(row, "num_gpus")
    if ranks is None or num_bytes <= 0:
        raise SpecError("size or number of devices not stated")
    return ranks, num_bytes


def _measured_s(row: Mapping[str, str]) -> float | None:
    """Return the out-of-place time, or the one the row's bandwidth implies."""
    ranks, num_bytes = _sizes(row)
    if "time_ms" in row:
        value = number(row, "time_ms")
        return None if not value else value * 1e-3
    time_us = number(row, "time_us")
    if time_us:
        return time_us * 1e-6
    algorithm, bus = number(row, "algbw_GBps"), number(row, "busbw_GBps")
    if algorithm:
        return num_bytes / (algorithm * 1e9)
    if bus and ranks > 1:
        passes = 2.0 if _kind(row["collective"]) == "all_reduce" else 1.0
        return num_bytes * passes * (ranks - 1) / ranks / (bus * 1e9)
    return None


def _kind(text: str) -> str:
    """Return the collective a cell names, whatever its case and joints."""
    bare = re.sub(r"[^a-z0-9]", "", text.lower())
    return next((name for name in _TIMES if name.replace("_", "") == bare), text.strip())


def _predicted_s(row: Mapping[str, str], exclude: str) -> float:
    kind, library = _kind(row["collective"]), row.get("library", "")
    if (kind not in _TIMES and kind != "p2p") or re.search("gloo|neuron", library.lower()):
        raise SpecError(NOT_MODELLED)
    ranks, num_bytes = _sizes(row)
    nodes = integer(row, "num_nodes") or 1
    era = era_of(library, row.get("system", ""))
    fabric = _fabric(row["gpu"], ranks, nodes, row.get("inter_network", ""), era, exclude)
    if kind == "p2p":
        return float(send_s(num_bytes, nodes > 1, fabric))
    return float(_TIMES[kind](num_bytes, ranks, 1, fabric))


def _case(row: Mapping[str, str], exclude: str) -> TimedCase:
    measured = None
    try:
        measured = _measured_s(row)
        predicted = _predicted_s(row, exclude)
    except SpecError as error:
        return TimedCase(measured_s=measured, reason=reason_of(error))
    if measured is None or not np.isfinite(predicted):
        reason = "no time or bandwidth stated" if measured is None else "the prediction is not finite"
        return TimedCase(measured_s=measured, reason=reason)
    return TimedCase(measured_s=measured, predicted_s=predicted)


def collective_cases(table: MeasuredTable, *, exclude: str = "") -> list[TimedCase]:
    """Return one case per row of a table of collectives.

    `exclude` is a family of measured rows that the constants must not have seen.
    """
    return [_case(row, exclude) for row in table.rows]
