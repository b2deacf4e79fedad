"""Constants of NCCL's cost model in SI units, read from ``catalog/data/nccl_tuning.toml``.

Those of ``OWN`` may be others of a machine (`Communicator.constants`): in the units of the table, by names
such as ``hop_latency_us.nvlink.ring.LL`` and ``ll_max.hopper.1`` (1, 2, or more nodes).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from foreshard.catalog.shipped import shipped

ALGORITHMS = {
    "tree": "Tree",
    "ring": "Ring",
    "collnet-direct": "CollNetDirect",
    "collnet-chain": "CollNetChain",
    "nvls": "NVLS",
    "nvls-tree": "NVLSTree",
    "pat": "PAT",
}
"""Algorithms in the order in which NCCL compares them, with the names that NCCL_ALGO takes."""
PROTOCOLS = ("LL", "LL128", "Simple")
"""Protocols in the order in which NCCL compares them."""
OWN = (
    "base_latency_us",
    "hop_latency_us",
    "ll_max",
    "ring_ll128_max",
    "tree_ll128_max",
    "tree_max",
    "nvls_tree_max",
)
"""Tables that a machine may have constants of its own for: those that NCCL lets a tuner replace."""
Constants = Mapping[str, float]
_OWN_SPEEDS_FROM = 100  # compute capability from which on releases search channels of different speeds
_DATA_CENTRE_AMPERE = ("a100", "a800", "a30")
GIGA, MICRO = 1e9, 1e-6


@cache
def tuning() -> dict[str, Any]:
    """Return the table as parsed, in NCCL's units (microseconds, GB/s)."""
    table: dict[str, Any] = shipped("nccl_tuning.toml")
    return table


def factor(name: str) -> float:
    """Return a factor of section ``factors``; those in microseconds as they are written."""
    return float(tuning()["factors"][name])


def limit(name: str) -> int:
    """Return a limit of section ``limits``."""
    return int(tuning()["limits"][name])


def releases() -> tuple[str, ...]:
    """Return the releases whose rules and constants are known, beside those of the tables."""
    return tuple(tuning()["releases"])


def release_rule(release: str, name: str) -> float | None:
    """Return a number that a release has in place of the constants; None where it does not differ."""
    value = tuning()["releases"].get(release, {}).get(name)
    return None if value is None else float(value)


@cache
def shipped_constants(release: str = "") -> Constants:
    """Return every constant of ``OWN`` by its name, as the tables or a release of its own rules have it."""
    table, of_release = tuning(), tuning()["releases"].get(release, {})
    found = {
        f"base_latency_us.{algorithm}.{protocol}": value
        for algorithm, row in table["base_latency_us"].items()
        for protocol, value in zip(PROTOCOLS, row, strict=True)
    }
    found |= {
        f"hop_latency_us.{medium}.{algorithm}.{protocol}": value
        for medium, rows in table["hop_latency_us"].items()
        for algorithm, row in rows.items()
        for protocol, value in zip(PROTOCOLS, row, strict=True)
    }
    found |= {
        f"{name}.{row}.{nodes}": value
        for name in OWN[2:]
        for row, values in (table[name] | of_release.get(name, {})).items()
        for nodes, value in enumerate(values, start=1)
    }
    for protocol in PROTOCOLS:
        name = f"hop_latency_us.network.nvls-tree.{protocol}"
        found[name] = of_release.get("nvls_tree_hop_us", found[name])
    return found


def constant(name: str, release: str, own: Constants) -> float:
    """Return a constant of ``OWN`` in the table's units: that of the machine, else that of the release."""
    value = own.get(name)
    return float(shipped_constants(release)[name] if value is None else value)


def network_overhead_s(cpu: str) -> float:
    """Return the time of posting one message to the network."""
    return float(tuning()["network_overhead_us"][cpu]) * MICRO


def nvls_efficiency(row: str) -> float:
    """Return the share of a channel's bandwidth that reduction in the switch reaches."""
    return float(tuning()["nvls_efficiency"][row])


def tree_correction(protocol: str, num_bytes: float, sizes: int) -> float:
    """Return the factor on the bandwidth of a tree of a message size; 1 beyond the first `sizes` entries."""
    step = (int(num_bytes) >> 6).bit_length() - 1
    return float(tuning()["tree_correction"][protocol][step]) if 0 <= step < sizes else 1.0


def capability_of(arch: str, name: str) -> int | None:
    """Return the compute capability (times 10) of a device of NVIDIA, None for an unknown architecture."""
    family = (arch.lower().split() or [""])[0]
    if family == "ampere" and not name.startswith(_DATA_CENTRE_AMPERE):
        family = "ampere_cards"
    found = tuning()["capability"].get(family)
    return None if found is None else int(found)


def row_of(capability: int) -> str:
    """Return the row of the tables that describes a compute capability."""
    rows: dict[str, int] = tuning()["rows"]
    return max((row for row in rows if rows[row] <= capability), key=lambda row: rows[row])


def nvlink_bytes_per_s(datasheet_bytes_per_s: float, capability: int) -> float:
    """Return the NVLink bandwidth of a device as NCCL counts it, from the datasheet's."""
    rows = [row for row in tuning()["nvlink"] if row["capability"] <= capability]
    row = max(rows, key=lambda row: int(row["capability"])) if rows else tuning()["nvlink"][0]
    return datasheet_bytes_per_s * float(row["nccl"]) / float(row["datasheet"])


def pcie_bytes_per_s(datasheet_bytes_per_s: float) -> float:
    """Return the bandwidth of a PCIe slot as NCCL counts it: that of the nearest generation."""
    table = tuning()["pcie"]
    pairs = zip(table["datasheet"], table["per_generation"], strict=True)
    return float(min(pairs, key=lambda pair: abs(pair[0] * GIGA - datasheet_bytes_per_s))[1]) * GIGA


def channel_speeds(capability: int, *, over_network: bool, release: str = "") -> tuple[float, ...]:
    """Return the bytes/s of one channel that the search tries, fastest first."""
    rows = [row for row in tuning()["channel_speeds"] if row["capability"] <= capability]
    own = tuning()["releases"].get(release, {}).get("channel_speeds")
    last = rows[-1] if own is None or capability < _OWN_SPEEDS_FROM else own
    speeds = last["nodes" if over_network else "one_node"]
    return tuple(float(speed) * GIGA for speed in speeds)
