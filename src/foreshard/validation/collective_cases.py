"""Measured collectives as cases: predicted seconds of every row of a table.

Sizes are what nccl-tests prints, times are out of place; rows of a shape the cost model lacks say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from typing import Any

import numpy as np

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.devices import resolve_device
from foreshard.catalog.fabrics import harness_s
from foreshard.catalog.instances import usual_node_size
from foreshard.catalog.shipped import shipped
from foreshard.catalog.transports import transport_of
from foreshard.comm.collectives import send_s
from foreshard.comm.fabric import Fabric, fabric_of
from foreshard.comm.intervals import collective_evidence, collective_intervals, left_out_evidence
from foreshard.comm.nccl.choice import nccl_choice
from foreshard.comm.nccl.communicator import Communicator, communicator_of, has_nccl
from foreshard.comm.nccl.constants import releases
from foreshard.comm.prediction import CLOSED_FORMS, bus_factor
from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.validation.facts import integer, number
from foreshard.validation.row_cluster import nic_rate
from foreshard.validation.tables import MeasuredTable

_ROUNDED = 0.02  # bandwidths of another number of ranks differ by more


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """One measured time and the time predicted for it; `reason` says why there is none.

    Intervals are by level, from residuals of other systems than the row's; `evidence` is what they rest on.
    """

    measured_s: float | None
    predicted_s: float | None = None
    reason: str | None = None
    intervals_s: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    evidence: str | None = None


NOT_MODELLED = "not modelled"


def reason_of(error: SpecError) -> str:
    """Return why a row is not predicted; an error that says nothing else is its own reason."""
    return str(error) if error.rule or error.fix else error.what


def era_of(library: str, system: str) -> str:
    """Return the NCCL era of a row: of the release that it states, else of the newest when it was published.

    Examples
    --------
    >>> era_of("nccl 2.27.3", "8x A100 node"), era_of("nccl", "8x A100 node")
    ('2.2x', '2.1x')
    """
    stated = re.search(r"\bnccl v?2\.(\d+)", library, re.IGNORECASE)
    minor = int(stated[1]) if stated else _minor_of(system)
    return "old" if minor <= 10 else "2.1x" if minor < 20 else "2.2x"


@cache
def _minor_of(system: str) -> int:
    """Return the minor release of NCCL behind times of a system that state none."""
    sources: dict[str, Any] = shipped("collective_sources.toml", "foreshard.validation")
    if system in sources["older"]:
        return _minor(sources["older"][system]["release"])
    day = sources["published"].get(system, {}).get("day", date.max)
    return max(_minor(release) for release, first in sources["releases"].items() if first <= day)


def _minor(release: str) -> int:
    return int(release.partition(".")[2])


CLOSED_FORM, NCCL = "closed form", "NCCL's estimate"
MODELS = (CLOSED_FORM, NCCL)
"""What can predict a row: the closed form of `predict`, and the estimate by which NCCL chooses."""
OWN = "own"
"""For `exclude`: every row by constants that have not seen its own family."""


@cache
def _cluster(gpu: str, num_ranks: int, num_nodes: int, network: str) -> Cluster:
    """Return a row's machine."""
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
    transport = transport_of(network)
    if transport is None:
        return cluster
    groups = (replace(group, nic_latency_s=transport[1]) for group in cluster.nodes)
    return replace(cluster, nodes=tuple(groups))


@cache
def _fabric(cluster: Cluster, era: str, exclude: str, *, in_switch: bool) -> Fabric:
    """Return what collectives see of a row's machine; `in_switch`: the switch may reduce."""
    fabric = fabric_of(cluster.nodes[0], nccl=era, exclude=exclude)
    return fabric if in_switch else replace(fabric, in_network=0.0)


@cache
def _communicator(cluster: Cluster, num_ranks: int, release: str) -> Communicator:
    return communicator_of(cluster, num_ranks, release=release)


def _sizes(row: Mapping[str, str]) -> tuple[int, float]:
    """Return the ranks and the bytes of a row."""
    megabytes = number(row, "data_size_mb") if "data_size_mb" in row else None
    num_bytes = megabytes * 1e6 if megabytes is not None else number(row, "size_bytes") or 0.0
    ranks = integer(row, "num_gpus")
    if ranks is None or num_bytes <= 0:
        raise SpecError("size or number of devices not stated")
    return ranks, num_bytes * _gathered(row, ranks)


def _gathered(row: Mapping[str, str], ranks: int) -> int:
    """Return the factor to gathered output: oneCCL's benchmark prints what one rank gives."""
    given = row.get("library", "").startswith("oneccl") and _kind(row["collective"]) == "all-gather"
    return ranks if given else 1


def _check_ranks(row: Mapping[str, str], misnumbered: Container[tuple[str, ...]]) -> None:
    """Refuse a row whose bandwidths, or those of its group of ranks, are of another number than it names."""
    if _is_misnumbered(row):
        raise SpecError(f"its bandwidths are not those of {integer(row, 'num_gpus')} ranks")
    if (group := _group(row)) and group in misnumbered:
        raise SpecError(f"other rows of its group are not of {integer(row, 'num_gpus')} ranks")


def _is_misnumbered(row: Mapping[str, str]) -> bool:
    """Return whether the two bandwidths of a row are those of another number of ranks than it names.

    Bandwidths are printed in hundredths: a small one tells nothing.
    """
    ranks, algorithm, bus = integer(row, "num_gpus"), number(row, "algbw_GBps"), number(row, "busbw_GBps")
    kind = _kind(row["collective"])
    if not ranks or ranks < 2 or kind not in CLOSED_FORMS or not algorithm or not bus:
        return False
    factor = bus_factor(kind, ranks)
    return abs(bus / algorithm / factor - 1.0) > _ROUNDED + 0.01 / min(algorithm, bus)


def _group(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return the system, group of ranks and their number of a row of a trace that names its groups."""
    named = re.search(r"\bgroup=(\S+)", row.get("algo_or_setting", ""))
    return (row.get("system", ""), named[1], row.get("num_gpus", "")) if named else ()


def _is_misnumbered_group(row: Mapping[str, str]) -> bool:
    """Return whether a row shows that its group has another number of ranks than it names."""
    try:
        return bool(_group(row)) and _is_misnumbered(row)
    except SpecError:  # the row is refused for it
        return False


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
        passes = 2.0 if _kind(row["collective"]) == "all-reduce" else 1.0
        return num_bytes * passes * (ranks - 1) / ranks / (bus * 1e9)
    in_place = number(row, "inplace_busbw_GBps")
    if in_place and ranks > 1 and _kind(row["collective"]) == "all-reduce":
        return num_bytes * 2.0 * (ranks - 1) / ranks / (in_place * 1e9)
    return None


def _kind(text: str) -> str:
    """Return the collective a cell names, whatever its case and joints; other text as it is."""
    bare = re.sub(r"[^a-z0-9]", "", text.lower())
    return next((name for name in CLOSED_FORMS if name.replace("-", "") == bare), text.strip())


def _predicted_s(
    row: Mapping[str, str], exclude: str, model: str, misnumbered: Container[tuple[str, ...]]
) -> float:
    kind, library = _kind(row["collective"]), row.get("library", "")
    if (kind not in CLOSED_FORMS and kind != "p2p") or re.search("gloo|neuron", library.lower()):
        raise SpecError(NOT_MODELLED)
    ranks, num_bytes = _sizes(row)
    _check_ranks(row, misnumbered)
    nodes = integer(row, "num_nodes") or 1
    cluster = _cluster(row["gpu"], ranks, nodes, row.get("inter_network", ""))
    if model == NCCL:
        return _estimate_s(kind, num_bytes, cluster, ranks, library)
    era = era_of(f"{library} {row.get('notes', '')}", row.get("system", ""))
    in_switch = "NVLS_ENABLE=0" not in row.get("algo_or_setting", "")
    fabric = _fabric(cluster, era, exclude, in_switch=in_switch)
    host_s = harness_s("torch", exclude=exclude) if "torch" in library else 0.0
    if kind == "p2p":
        return host_s + float(send_s(num_bytes, nodes > 1, fabric))
    return host_s + float(CLOSED_FORMS[kind](num_bytes, ranks, 1, fabric))


def _estimate_s(kind: str, num_bytes: float, cluster: Cluster, ranks: int, library: str) -> float:
    """Return NCCL's own estimate of what it picks."""
    if not has_nccl(cluster, ranks) or not library.startswith("nccl"):
        raise SpecError("not a run of NCCL")
    release = re.search(r"\b2\.\d+", library)
    known = release[0] if release and release[0] in releases() else ""
    choice = nccl_choice("send" if kind == "p2p" else kind, num_bytes, _communicator(cluster, ranks, known))
    if choice.best is None:
        raise SpecError("NCCL estimates no messages between pairs")
    return choice.best.time_s


def _evidence(row: Mapping[str, str]) -> str:
    ranks, _ = _sizes(row)
    cluster = _cluster(row["gpu"], ranks, integer(row, "num_nodes") or 1, row.get("inter_network", ""))
    return collective_evidence(cluster, ranks, float(fabric_of(cluster.nodes[0]).domain))


def _case(
    row: Mapping[str, str], family: str, exclude: str, model: str, misnumbered: Container[tuple[str, ...]]
) -> TimedCase:
    measured = None
    try:
        measured = _measured_s(row)
        predicted = _predicted_s(row, exclude, model, misnumbered)
    except SpecError as error:
        return TimedCase(measured_s=measured, reason=reason_of(error))
    if measured is None or not np.isfinite(predicted):
        reason = "no time or bandwidth stated" if measured is None else "the prediction is not finite"
        return TimedCase(measured_s=measured, reason=reason)
    if model == NCCL:
        return TimedCase(measured_s=measured, predicted_s=predicted)
    evidence, (_, num_bytes) = _evidence(row), _sizes(row)
    if exclude == family:  # its generation may have no other system
        evidence = left_out_evidence(family) or evidence
    ends = collective_intervals(predicted, num_bytes, evidence, exclude=family)
    return TimedCase(measured_s=measured, predicted_s=predicted, intervals_s=ends, evidence=evidence)


def collective_cases(table: MeasuredTable, *, exclude: str = "", model: str = CLOSED_FORM) -> list[TimedCase]:
    """Return one case per row of a table of collectives, predicted by one of `MODELS`.

    `exclude` is a family of measured rows that the constants must not have seen, or `OWN`.
    """
    misnumbered = {_group(row) for row in table.rows if _is_misnumbered_group(row)}
    return [
        _case(row, family, family if exclude == OWN else exclude, model, misnumbered)
        for row, family in zip(table.rows, table.families, strict=True)
    ]
