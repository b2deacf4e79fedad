"""RCCL's estimates and pick on nodes of eight MI300X: NCCL's model with tables of AMD's own.

The rules restate ``ncclTopoTuneModel`` and ``ncclTopoGetAlgoTime`` of the release that
``catalog/data/rccl_tuning.toml`` names, for the node models that RCCL recognizes by their eight devices with
a link between every two. On these LL128 is off, and the bandwidth of all rings is that of a device's links,
whatever its network cards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foreshard.catalog.shipped import shipped
from foreshard.comm.nccl.choice import MESSAGES, NcclChoice, check_collective
from foreshard.comm.nccl.constants import ALGORITHMS, GIGA, MICRO, PROTOCOLS
from foreshard.comm.nccl.estimates import Estimate, ring_steps

if TYPE_CHECKING:
    from foreshard.spec.cluster import Cluster

_ARCHITECTURE = "cdna3"
_ALGORITHMS = ("tree", "ring")


def rccl_tuning() -> dict[str, Any]:
    """Return the table as parsed, in RCCL's units (microseconds, GB/s)."""
    table: dict[str, Any] = shipped("rccl_tuning.toml")
    return table


def has_rccl_model(cluster: Cluster, num_ranks: int) -> bool:
    """Return whether the first ranks of a cluster are whole nodes of the kind that is modelled."""
    size, left = int(rccl_tuning()["devices_per_node"]), num_ranks
    for group in cluster.nodes:
        if left > 0 and (group.device.arch.lower() != _ARCHITECTURE or group.per_node != size):
            return False
        left -= group.num_devices
    return num_ranks % size == 0


def rccl_choice(collective: str, num_bytes: float, num_ranks: int) -> NcclChoice:
    """Return what RCCL picks for a collective over so many ranks in whole nodes.

    RCCL also ships schedules (MSCCL) that take the place of the pick for some sizes; they are not modelled.

    Raises
    ------
    SpecError
        The collective is none of RCCL's.
    """
    if collective in MESSAGES:
        return NcclChoice(algorithm="P2P", protocol="Simple", estimates=())
    check_collective(collective)
    return NcclChoice.among(
        rccl_estimate(collective, num_bytes, algorithm, protocol, num_ranks)
        for algorithm in _ALGORITHMS
        for protocol in PROTOCOLS
    )


def rccl_estimate(
    collective: str, num_bytes: float, algorithm: str, protocol: str, num_ranks: int
) -> Estimate:
    """Return RCCL's estimate of a ring or a tree with a protocol, in seconds."""
    made = Estimate(algorithm=algorithm, protocol=protocol)
    nodes = num_ranks // int(rccl_tuning()["devices_per_node"])
    if reason := _reason_against(collective, algorithm, protocol, nodes):
        return replace(made, reason=reason)
    latency = _latency_s(collective, algorithm, protocol, num_ranks, nodes)
    bandwidth = _bytes_per_s(collective, num_bytes, algorithm, protocol, num_ranks, nodes)
    return replace(made, latency_s=latency, bytes_per_s=bandwidth, time_s=latency + num_bytes / bandwidth)


def _reason_against(collective: str, algorithm: str, protocol: str, nodes: int) -> str:
    if protocol == "LL128":
        return "LL128 is off on MI300X"
    if algorithm == "tree" and collective != "all-reduce":
        return f"{ALGORITHMS[algorithm]} serves all-reduce only"
    if (algorithm, protocol, nodes) == ("tree", "Simple", 1):
        return "Tree with Simple joins several nodes"
    return ""


def _bytes_per_s(
    collective: str, num_bytes: float, algorithm: str, protocol: str, num_ranks: int, nodes: int
) -> float:
    table, at = rccl_tuning(), PROTOCOLS.index(protocol)
    links = float(table["xgmi_link"]) * (int(table["devices_per_node"]) - 1)
    shares = table["bandwidth_share"]["up_to_two_nodes" if nodes <= 2 else "more_nodes"]
    bus = links * float(shares[algorithm][at])
    if (collective, protocol, nodes) == ("broadcast", "LL", 1):
        bus *= float(table["broadcast_ll"])
    bus *= 0.5 if algorithm == "tree" else num_ranks / ring_steps(collective, num_ranks)
    if algorithm == "tree" or nodes > 1:
        corrections = table["correction"][algorithm][protocol]
        step = max((int(num_bytes) >> 6).bit_length() - 1, 0)
        bus *= float(corrections[min(step, len(corrections) - 1)])
    return bus * GIGA


def _latency_s(collective: str, algorithm: str, protocol: str, num_ranks: int, nodes: int) -> float:
    table, at = rccl_tuning(), PROTOCOLS.index(protocol)
    base = float(table["base_latency_us"][algorithm][at])
    intra, inter = (float(table["hop_latency_us"][m][algorithm][at]) for m in ("xgmi", "network"))
    if algorithm == "tree":
        levels = nodes.bit_length() - 1
        return (base + 2.0 * ((num_ranks // nodes - 1) * intra + levels * inter)) * MICRO
    if collective == "broadcast":  # a pipeline, of which one hop shows
        return (base + (inter if nodes > 1 else intra)) * MICRO
    over = 0
    if nodes > 1:
        over = 2 * nodes if collective == "all-reduce" else nodes - 1
        intra = max(intra, float(table["network_overhead_us"]) * (3.0 if protocol == "Simple" else 1.0))
    return (base + (ring_steps(collective, num_ranks) - over) * intra + over * inter) * MICRO
