"""Fit the constants of collectives on measured tables; print errors in the fit and with systems left out.

Writes ``src/foreshard/catalog/data/comm_constants.json``; ``--check`` refits and compares instead.
Needs the tables named in docs/derivations/collectives.md (``FORESHARD_MEASURED``).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from refit import differences
from scipy.optimize import least_squares

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.fabrics import LinkConstants
from foreshard.comm.collectives import all_gather_s, all_reduce_s, all_to_all_s
from foreshard.comm.fabric import fabric_from
from foreshard.validation.tables import measured_folder

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src/foreshard/catalog/data/comm_constants.json"
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A measured machine: its link generation, datasheet rate per device, and what its timing holds."""

    generation: str
    bytes_per_s: float
    domain: int = 8
    in_network: bool = False
    min_bytes: float = 0.0  # not fitted below: smaller sizes measure the host loop, not the collective
    min_ranks: int = 2
    era: str = "2.2x"
    fitted: bool = True
    harness: str = ""  # a loop that adds host work to every call; "" for nccl-tests
    unseen: str = ""  # row that a device of its kind gets when it was never measured, if not its generation's


SYSTEMS = {
    "a100_sxm": System(generation="ampere-nvlink", bytes_per_s=300 * GB),
    # A release before 2.20 (`validation/data/collective_sources.toml`): small messages tell of era 2.1x.
    "8x A100 node": System(generation="ampere-nvlink", bytes_per_s=300 * GB, min_bytes=2e6),
    "vTrain profiled A100 server": System(
        generation="ampere-nvlink", bytes_per_s=300 * GB, era="old", fitted=False
    ),
    # Launched from a torch loop: the published time holds 80-200 us of host work below 16 MB.
    "sailor A100-40": System(generation="ampere-nvlink", bytes_per_s=300 * GB, min_bytes=16e6, fitted=False),
    "h100_sxm": System(generation="hopper-nvlink", bytes_per_s=450 * GB, in_network=True),
    "8x H200 node": System(
        generation="hopper-nvlink", bytes_per_s=450 * GB, in_network=True, min_bytes=2e6, harness="torch"
    ),
    "b200_sxm": System(generation="blackwell-nvlink", bytes_per_s=900 * GB, in_network=True),
    "b300_sxm": System(generation="blackwell-nvlink", bytes_per_s=900 * GB, in_network=True),
    "gb200": System(generation="blackwell-nvlink", bytes_per_s=900 * GB, in_network=True),
    "AWS p6-b200.48xlarge": System(generation="blackwell-nvlink", bytes_per_s=900 * GB, in_network=True),
    "AWS p6-b200.48xlarge x1": System(
        generation="blackwell-nvlink", bytes_per_s=900 * GB, in_network=True, min_bytes=2e6, harness="torch"
    ),
    "Azure ND_A100_v4 (1 node)": System(
        generation="ampere-nvlink", bytes_per_s=300 * GB, era="2.1x", fitted=False
    ),
    "Azure ND_H100_v5 (1 node)": System(
        generation="hopper-nvlink", bytes_per_s=450 * GB, in_network=True, era="2.1x", fitted=False
    ),
    "sailor V100-16": System(generation="volta-nvlink", bytes_per_s=150 * GB, min_bytes=16e6),
    "sailor GH-96": System(generation="hopper-c2c", bytes_per_s=450 * GB, domain=4, min_bytes=16e6),
    "l40s": System(generation="l40s-pcie", bytes_per_s=31.5 * GB, unseen="pcie4"),
    "b60": System(generation="xe2-pcie", bytes_per_s=31.5 * GB, unseen="pcie"),
    # Pairs of this server are joined by NVLink bridges (40 GB/s measured, above PCIe).
    "sailor RTX-3090": System(
        generation="rtx-3090-pcie", bytes_per_s=31.5 * GB, min_bytes=1e6, min_ranks=3, unseen="pcie4"
    ),
    "sailor RTX-2080": System(generation="turing-pcie", bytes_per_s=15.75 * GB, min_bytes=1e6),
    "sailor Titan-RTX": System(generation="turing-pcie", bytes_per_s=15.75 * GB, min_bytes=1e6),
}
KINDS = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 1, "alltoall": 2, "all_to_all": 2}
FUNCTIONS = (all_reduce_s, all_gather_s, all_to_all_s)

START = {
    "launch_s": 6e-6,
    "hop_s": 1e-6,
    "exchange_launch_s": 9e-6,
    "exchange_hop_s": 3e-7,
    "switch_launch_s": 25e-6,
    "ring_eff": 0.8,
    "gather_eff": 0.8,
    "exchange_eff": 0.8,
    "switch_eff": 0.65,
    "ramp": 0.6,
    "exchange_ramp": 0.6,
    "switch_ramp": 0.8,
    "copy": 0.5,
    "exchange_copy": 0.4,
}
LATENCIES = ("launch_s", "hop_s", "exchange_launch_s", "exchange_hop_s")
# Rows: which constants a generation's data can move; the others stay at the row named ``base``.
SCALING = ("scaling", "exchange_scaling")
BANDWIDTH = ("ring_eff", "exchange_eff", "ramp", "exchange_ramp", *SCALING)
NVLINK = tuple(START)
NO_SWITCH = tuple(n for n in START if not n.startswith("switch"))
SHARED_BUS = (*(n for n in NO_SWITCH if "copy" not in n), "scaling")  # a copy shows at two ranks only
ROWS = {
    "nvlink": ("start", NVLINK, ("ampere-nvlink", "hopper-nvlink", "blackwell-nvlink")),
    "single-die": ("nvlink", LATENCIES, ("ampere-nvlink", "hopper-nvlink")),
    "ampere-nvlink": ("single-die", NO_SWITCH, ("ampere-nvlink",)),
    "hopper-nvlink": ("single-die", NVLINK, ("hopper-nvlink",)),
    "blackwell-nvlink": ("nvlink", NVLINK, ("blackwell-nvlink",)),
    "volta-nvlink": ("nvlink", BANDWIDTH, ("volta-nvlink",)),
    "hopper-c2c": ("nvlink", BANDWIDTH, ("hopper-c2c",)),
    "pcie": ("nvlink", (*NO_SWITCH, *SCALING), ("l40s-pcie", "rtx-3090-pcie", "turing-pcie")),
    "l40s-pcie": ("pcie", (*NO_SWITCH, *SCALING), ("l40s-pcie",)),
    "rtx-3090-pcie": ("pcie", BANDWIDTH, ("rtx-3090-pcie",)),
    "turing-pcie": ("pcie", BANDWIDTH, ("turing-pcie",)),
    "pcie4": ("single-die", SHARED_BUS, ("l40s-pcie", "rtx-3090-pcie")),
    "xe2-pcie": ("pcie", (*NO_SWITCH, *SCALING), ("xe2-pcie",)),
}
# Rows whose latencies are cycles, the same on every device: a launch and a hop are instructions. They are
# stored at this clock (Hz, boost, catalog). Not for Blackwell: the way between its two dies is on top.
REFERENCE_HZ = resolve_device("a100-sxm-80gb").clock_hz
CLOCKED = ("single-die", "pcie4")
CLOCKS = {
    "ampere-nvlink": resolve_device("a100-sxm-80gb").clock_hz,
    "hopper-nvlink": resolve_device("h100-sxm").clock_hz,
    "l40s-pcie": resolve_device("l40s").clock_hz,
    "rtx-3090-pcie": resolve_device("rtx-3090").clock_hz,
}
HARNESS_BYTES = 2**20  # below, host work shows
# Where ``scaling`` counts from: 0 = the full domain (every pair linked), else that many ranks.
REFERENCE = {"hopper-c2c": 0.0}
# NIC bytes/s per node of the multi-node systems whose largest messages fix the ring efficiency.
NETWORK_SYSTEMS = {"CoreWeave H100 HGX, 64 GPUs (sharp example)": 400 * GB, "GCP a3-megagpu-8g x2": 200 * GB}
# Stated, not fitted: the tables hold no row that identifies them alone (docs/derivations/collectives.md).
STATED_NETWORK = {"tree_eff": 0.85, "exchange_eff": 0.9, "launch_s": 10e-6}
NCCL_TABLES = (
    "baseLatencies",
    "hwLatencies",
    "llMaxBws",
    "perChMaxRingLL128Bws",
    "perChMaxTreeLL128Bws",
    "perChMaxTreeBws",
    "perChMaxNVLSTreeBws",
    "nvlsEfficiency",
    "treeCorrectionFactor",
)
EARLY = ("2.1x", "old")  # eras of the library whose latencies differ: 2.11 to 2.19, and 2.10 and before
NO_HARNESS: Mapping[str, float] = {}
RIDGE = 0.3  # pull of an unidentified constant to its base row, in residuals per e-fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measured configurations of one system and kind of collective, medians over repeats."""

    table: str
    system: str
    kind: str
    num_bytes: np.ndarray
    ranks: np.ndarray
    time_s: np.ndarray
    weight: np.ndarray


def rows_of(name: str) -> Iterable[dict[str, str]]:
    with gzip.open(measured_folder() / name, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def time_of(row: Mapping[str, str], kind: str, ranks: int, num_bytes: float) -> float | None:
    """Return the out-of-place time, or the one that the row's bandwidth implies."""
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    passes = 2.0 if kind == "all_reduce" else 1.0
    if row["algbw_GBps"]:
        return num_bytes / float(row["algbw_GBps"]) / GB
    if row["busbw_GBps"]:
        return num_bytes * passes * (ranks - 1) / ranks / float(row["busbw_GBps"]) / GB
    if kind == "all_reduce" and row["inplace_busbw_GBps"]:
        return num_bytes * passes * (ranks - 1) / ranks / float(row["inplace_busbw_GBps"]) / GB
    return None


def load() -> list[Points]:
    """Read the tables: single-node rows of known systems, library left to choose its algorithm."""
    repeats: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for name in ("comm_collectives.csv.gz", "comm_vtrain_allreduce_a100.csv.gz"):
        for row in rows_of(name):
            forced = "NVLS_ENABLE=0" in row["algo_or_setting"]
            if (
                row["system"] not in SYSTEMS
                or row["collective"] not in KINDS
                or forced
                or not row["size_bytes"]
            ):
                continue
            if float(row["num_nodes"] or 1) > 1:
                continue
            ranks, size = int(float(row["num_gpus"])), float(row["size_bytes"])
            if row["library"].startswith("oneccl") and row["collective"] == "all_gather":
                size *= ranks  # its benchmark prints what one rank gives
            time_s = time_of(row, row["collective"], ranks, size)
            if time_s is not None:
                identity = (row["library"], row["gpu"], row["dtype"])
                repeats[(name, row["system"], row["collective"], ranks, size, identity)].append(time_s)
    for row in rows_of("comm_sailor_profiles.csv.gz"):
        system, size = f"sailor {row['gpu']}", float(row["data_size_mb"]) * 1e6
        # List-of-tensors gathers and scatters of that harness copy every block once more: left out.
        if system in SYSTEMS and row["collective"] in ("all_reduce", "all_to_all") and size > 0:
            key = ("sailor", system, row["collective"], int(row["num_gpus"]), size, row["precision_set"])
            repeats[key].append(float(row["time_ms"]) * 1e-3)
    cells: dict[tuple[str, str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for (table, system, kind, ranks, size, _), times in sorted(
        repeats.items(), key=lambda item: repr(item[0])
    ):
        cells[(table, system, kind)].append((size, ranks, median(times)))
    return [points_of(key, rows) for key, rows in cells.items()]


def points_of(key: tuple[str, str, str], rows: Sequence[tuple[float, float, float]]) -> Points:
    """Weigh so that every octave of size and every number of ranks counts alike."""
    size, ranks, time_s = (np.array(column) for column in zip(*rows, strict=True))
    cell = list(zip(np.round(np.log2(size)), ranks, strict=True))
    count: dict[Any, int] = defaultdict(int)
    for item in cell:
        count[item] += 1
    weight = np.array([1.0 / np.sqrt(count[item]) for item in cell])
    weight[(size < SYSTEMS[key[1]].min_bytes) | (ranks < SYSTEMS[key[1]].min_ranks)] = 0.0
    return Points(
        table=key[0],
        system=key[1],
        kind=key[2],
        num_bytes=size,
        ranks=ranks,
        time_s=time_s,
        weight=weight / np.sqrt(np.sum(weight**2)) * 4.0,
    )


def predicted_s(
    values: Mapping[str, float], points: Points, harness: Mapping[str, float] = NO_HARNESS
) -> np.ndarray:
    """Return the predicted times, with the host work of the loop that measured them."""
    system = SYSTEMS[points.system]
    fabric = fabric_from(
        LinkConstants(**{name: value for name, value in values.items() if name != "clock_hz"}),
        intra_bytes_per_s=system.bytes_per_s,
        domain=system.domain,
        per_node=system.domain,
        nic_bytes_per_s=GB,
        nic_latency_s=0.0,
        in_network=system.in_network,
    )
    host_s = harness.get(system.harness, 0.0)
    return host_s + FUNCTIONS[KINDS[points.kind]](points.num_bytes, points.ranks, 1.0, fabric)


def at_clock(values: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the constants with their latencies longer by a factor."""
    return {**values, **{name: values[name] * factor for name in LATENCIES}}


def encode(name: str, value: float) -> float:
    return value if name in SCALING else float(np.log(value))


def fit(
    base: Mapping[str, float],
    names: Sequence[str],
    data: Sequence[Points],
    harness: Mapping[str, float],
    *,
    clocked: bool = False,
) -> dict[str, float]:
    """Return ``base`` with ``names`` moved to the least soft-L1 error of log time, pulled to ``base``.

    With `clocked` the latencies are those at the reference clock, and as many cycles on every device.
    """
    if not data:
        return dict(base)
    origin = np.array([encode(name, base[name]) for name in names])

    def unpack(x: np.ndarray) -> dict[str, float]:
        moved = {n: float(v) if n in SCALING else float(np.exp(v)) for n, v in zip(names, x, strict=True)}
        if "scaling" in moved and "exchange_scaling" not in moved:  # one bus slows both alike
            moved["exchange_scaling"] = moved["scaling"]
        return {**base, **moved}

    def residuals(x: np.ndarray) -> np.ndarray:
        values = unpack(x)
        parts = [
            p.weight * np.log(predicted_s(at_clock(values, slower(p)), p, harness) / p.time_s) for p in data
        ]
        return np.concatenate([*parts, RIDGE * (x - origin)])

    def slower(points: Points) -> float:
        return REFERENCE_HZ / CLOCKS[SYSTEMS[points.system].generation] if clocked else 1.0

    # A link carries no more than its datasheet says: efficiencies stop at 1.
    top = np.array([0.0 if name.endswith("_eff") else np.inf for name in names])
    solution = least_squares(
        residuals,
        origin,
        bounds=(-np.inf, top),
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=300,
        xtol=1e-12,
        ftol=1e-13,
    )
    moved = unpack(solution.x)
    if "gather_eff" not in names:  # no usable gathers: they keep the base row's relation to all-reduce
        moved["gather_eff"] = min(1.0, base["gather_eff"] * moved["ring_eff"] / base["ring_eff"])
    return moved


def fit_rows(
    data: Sequence[Points], harness: Mapping[str, float], only: str | None = None
) -> dict[str, dict[str, float]]:
    """Fit every row of the table, each starting from its base row; or one row and those it starts from."""
    wanted = set(ROWS)
    if only is not None:
        wanted = {only}
        for name in reversed(ROWS):
            if name in wanted and ROWS[name][0] != "start":
                wanted.add(ROWS[name][0])
    fitted: dict[str, dict[str, float]] = {
        "start": {**START, "scaling": 0.0, "exchange_scaling": 0.0, "reference": 2.0}
    }
    usable = [p for p in data if SYSTEMS[p.system].fitted]
    for name, (base, names, generations) in ROWS.items():
        if name not in wanted:
            continue
        own = [p for p in usable if SYSTEMS[p.system].generation in generations]
        start = {**fitted[base], "reference": REFERENCE.get(name, 2.0)}
        if base in CLOCKED:
            start = at_clock(start, REFERENCE_HZ / CLOCKS.get(name, REFERENCE_HZ))
            del start["clock_hz"]
        if "scaling" in names and name.endswith(("c2c", "-nvlink")):
            start["scaling"] = start["exchange_scaling"] = 0.5
        fitted[name] = fit(start, names, own, harness, clocked=name in CLOCKED)
        if name in CLOCKED:
            fitted[name]["clock_hz"] = REFERENCE_HZ
    del fitted["start"]
    # Eight devices, every pair linked (xGMI): 2 ranks reach 1 of 7 links, 8 reach all. Geometry, no data.
    mesh = float(np.log(7.0) / np.log(4.0))
    fitted["mesh"] = {**fitted["nvlink"], "scaling": mesh, "exchange_scaling": mesh, "reference": 0.0}
    return fitted


def fit_harness(data: Sequence[Points]) -> dict[str, float]:
    """Return the host work of a call in each measuring loop: the median of what small collectives take more.

    More than their prediction by constants fitted on systems that were measured without such a loop.
    """
    bare = [p for p in data if not SYSTEMS[p.system].harness]
    over: dict[str, list[float]] = defaultdict(list)
    rows: dict[str, dict[str, float]] = {}
    for points in data:
        system, small = SYSTEMS[points.system], points.num_bytes < HARNESS_BYTES
        if system.harness:
            if system.generation not in rows:
                rows |= fit_rows(bare, {}, only=system.generation)
            more_s = points.time_s - predicted_s(rows[system.generation], points)
            over[system.harness] += list(more_s[small])
    return {name: float(np.median(values)) for name, values in sorted(over.items())}


def fit_era(era: str, links: Mapping[str, Any], data: Sequence[Points]) -> dict[str, float]:
    """Return the factors of an early library on latency and ramp, from the servers that have it."""
    old = [p for p in data if SYSTEMS[p.system].era == era]
    if not old:
        return {}
    origin = np.zeros(2)

    def factors(x: np.ndarray) -> dict[str, float]:
        latency, ramp = float(np.exp(x[0])), float(np.exp(x[1]))
        named = dict.fromkeys(
            ("launch_s", "hop_s", "exchange_launch_s", "exchange_hop_s", "switch_launch_s"), latency
        )
        return {**named, "ramp": ramp, "exchange_ramp": ramp, "switch_ramp": ramp}

    def residuals(x: np.ndarray) -> np.ndarray:
        found = factors(x)
        rows = {name: {k: v * found.get(k, 1.0) for k, v in row.items()} for name, row in links.items()}
        parts = [
            p.weight * np.log(predicted_s(rows[SYSTEMS[p.system].generation], p) / p.time_s) for p in old
        ]
        return np.concatenate([*parts, RIDGE * (x - origin)])

    return factors(least_squares(residuals, origin, loss="soft_l1", f_scale=0.1, xtol=1e-12).x)


def errors(table: Mapping[str, Any], points: Points) -> np.ndarray:
    """Return signed relative errors of one cell."""
    system = SYSTEMS[points.system]
    era = table["eras"][system.era]
    values = {k: v * era.get(k, 1.0) for k, v in table["links"][system.generation].items()}
    return predicted_s(values, points, table["harness"]) / points.time_s - 1.0


FITTED = ("links", "eras", "harness")


def seen_without(system: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table as it would be without a system."""
    changed = table["left_out"][family_of(system)]
    return {name: {**table[name], **changed[name]} for name in FITTED}


def build(data: Sequence[Points], left_out: Iterable[str] = tuple(sorted(SYSTEMS))) -> dict[str, Any]:
    """Return the table of constants, with what changes in it where each of some systems is left out."""
    harness = fit_harness(data)
    links = fit_rows(data, harness)
    return {
        "links": links,
        "eras": {"2.2x": {}, **{era: fit_era(era, links, data) for era in EARLY}},
        "harness": harness,
        "network": {**STATED_NETWORK, "ring_eff": network_ring_eff()},
        "nccl": nccl_tables(),
        "left_out": {family_of(system): without(system, links, harness, data) for system in left_out},
    }


def family_of(system: str) -> str:
    """Return the family that validation gives the rows of a system."""
    return system.removeprefix("sailor ")


def without(
    system: str, links: Mapping[str, Any], harness: Mapping[str, float], data: Sequence[Points]
) -> dict[str, Any]:
    """Return what changes in the table when a system is not seen: the row of its generation, or its era."""
    rule, others = SYSTEMS[system], [p for p in data if p.system != system]
    if not rule.fitted:
        eras = {rule.era: fit_era(rule.era, links, others)} if rule.era in EARLY else {}
        return {"links": {}, "eras": eras, "harness": {}}
    name = rule.unseen or rule.generation
    if rule.generation in ROWS["nvlink"][2]:  # others move no row that the host work is found by
        harness = fit_harness(others)
    row = fit_rows(others, harness, only=name)[name]
    if name in CLOCKED and name != rule.generation:
        row = at_clock(row, REFERENCE_HZ / CLOCKS[rule.generation])
        del row["clock_hz"]
    return {"links": {rule.generation: row}, "eras": {}, "harness": dict(harness) if rule.harness else {}}


def nccl_tables() -> dict[str, Any]:
    """Return the part of NCCL's own constants that its choice of algorithm needs (us, GB/s, ratios)."""
    kept: dict[str, Any] = {"source": "NVIDIA/nccl 5067397c src/graph/tuning.cc, topo.h"}
    with (measured_folder() / "comm_nccl_tuning_constants.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            keys = [k.split("/")[0] for k in (row["key1"], row["key2"], row["key3"]) if k]
            if row["table"] in NCCL_TABLES and "CollNet" not in keys[0] + keys[-2 if len(keys) > 1 else -1]:
                place = kept.setdefault(row["table"], {})
                if row["table"] == "treeCorrectionFactor":
                    place.setdefault(keys[0], []).append(float(row["value"]))
                else:
                    place["/".join(keys)] = float(row["value"])
    return kept


def network_ring_eff() -> float:
    """Return bus bandwidth over NIC rate of the largest multi-node messages, mean over systems.

    GCP a3-high is left out: its TCPX transport, not the NIC, is the limit (0.71).
    """
    best: dict[str, float] = {}
    for row in rows_of("comm_collectives.csv.gz"):
        if row["system"] in NETWORK_SYSTEMS and row["busbw_GBps"]:
            share = float(row["busbw_GBps"]) * GB / NETWORK_SYSTEMS[row["system"]]
            best[row["system"]] = max(best.get(row["system"], 0.0), share)
    return float(np.mean([best[name] for name in sorted(best)]))


def show(title: str, signed: Sequence[np.ndarray]) -> None:
    e = np.concatenate(signed)
    a = np.abs(e)
    print(f"{title:58s} {len(e):6d}  {np.median(a):6.1%}  {np.quantile(a, 0.9):6.1%}  {np.median(e):+6.1%}")


def report(table: Mapping[str, Any], data: Sequence[Points]) -> None:
    print(f"{'in the fit':58s} {'rows':>6s}  {'median':>6s}  {'p90':>6s}  {'bias':>6s}")
    by_table = defaultdict(list)
    for p in data:
        signed = errors(table, p)
        by_table[p.table].append(signed)
        show(f"{p.system} {p.kind}", [signed])
    for name, signed in by_table.items():
        show(f"TABLE {name}", signed)
        kept = [e[p.weight > 0] for e, p in zip(signed, (q for q in data if q.table == name), strict=True)]
        show(f"TABLE {name}, sizes above the host floor", kept)
    show("ALL", [errors(table, p) for p in data])
    nccl = [p for p in data if p.table.startswith("comm_collectives")]
    print(f"{'left out':58s}")
    everything = []
    for system in sorted({p.system for p in nccl}):
        signed = [errors(seen_without(system, table), p) for p in nccl if p.system == system]
        everything += signed
        show(f"system {system}", signed)
    show("ALL SYSTEMS LEFT OUT", everything)
    for generation in sorted({SYSTEMS[p.system].generation for p in nccl}):
        others = [p for p in data if SYSTEMS[p.system].generation != generation]
        rows = fit_rows(others, table["harness"], only=generation)
        unseen = {"links": rows, "eras": table["eras"], "harness": table["harness"]}
        own = [p for p in nccl if SYSTEMS[p.system].generation == generation]
        show(f"generation {generation}", [errors(unseen, p) for p in own])


REFIT_ERROR = 1e-4
"""Part by which a refitted constant may differ: other processors stop the minimiser elsewhere (6e-6 seen)."""
LEFT_OUT_ERROR = 0.03
"""Part by which times predicted with a system left out may differ after a refit, median over its rows.

Where two algorithms are equally fast the error has a kink, and a fit with a system left out may stop on one.
Where on it depends on the last bit: a start moved by 1e-7 moves constants by 7e-3, and another processor
moved the times of one system by 1.3 %.
"""


def moved(shipped: Mapping[str, Any], refit: Mapping[str, Any], data: Sequence[Points]) -> list[str]:
    """Return what a refit changes: constants, and times predicted with a system left out."""
    links = {name: shipped["links"].get(name, {}) for name in refit["links"]}
    stated = {name: shipped.get(name, {}) for name in refit if name != "left_out"}
    fitted = {name: refit[name] for name in refit if name != "left_out"}
    lines = differences({**stated, "links": links}, fitted, REFIT_ERROR)
    if shipped["left_out"].keys() != refit["left_out"].keys():
        return [*lines, ".left_out: other systems"]
    for system in sorted({p.system for p in data}):
        own = [p for p in data if p.system == system]
        before, after = (
            np.concatenate([1.0 + errors(seen_without(system, table), p) for p in own])
            for table in (shipped, refit)
        )
        change = float(np.median(np.abs(before / after - 1.0)))
        if change > LEFT_OUT_ERROR:
            lines.append(f".left_out.{family_of(system)}: times move by {change:.2%} (median)")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="refit and compare with the shipped constants")
    parser.add_argument("--quiet", action="store_true", help="no error tables")
    args = parser.parse_args()
    data = load()
    table = build(data)
    shipped = json.loads(TABLE.read_text("utf-8"))
    if not args.quiet:
        report(table, data)
    if args.check:
        wrong = moved(shipped, table, data)
        print("\n".join(wrong) or "shipped constants equal the refit")
        return 1 if wrong else 0
    shipped["links"].update(table["links"])
    shipped.update({name: table[name] for name in ("eras", "harness", "network", "nccl", "left_out")})
    TABLE.write_text(json.dumps(shipped, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
