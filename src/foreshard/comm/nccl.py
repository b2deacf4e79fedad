"""Which algorithm and protocol NCCL would pick, by its own cost model, and by what margin.

NCCL prices every (algorithm, protocol) as ``latency + bytes / bandwidth`` from tables compiled into it and
runs the cheapest. The formulas are restated from the description of its tuner; the tables are in
``catalog/data/comm_constants.json`` section ``nccl``. The times explain the choice; predictions use the
fitted closed forms of ``foreshard.comm.collectives``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log2
from typing import Any

from foreshard.catalog.fabrics import comm_constants
from foreshard.comm.fabric import Fabric
from foreshard.errors import SpecError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
_ROWS = ("Volta", "Ampere", "Hopper", "Blackwell")
# Per-direction NVLink rate that NCCL's topology search credits a device with, over the datasheet rate:
# topo.h gives 20 of 25, 20 of 25, 20.6 of 25, 40.1 of 50 GB/s per link.
_SEARCH_EFF = (0.8, 0.8, 0.824, 0.802)
# Channels NCCL opens on a full NVLink box; 24 and 32 are printed in its logs, the others assumed alike.
_CHANNELS = (24, 24, 32, 32)
# Factors that NVIDIA/nccl 5067397c src/graph/tuning.cc writes out (ncclTopoTuneModel, ncclTopoGetAlgoTime).
_RING_PLATEAU_VOLTA, _RING_PLATEAU = 1.9, 1.4  # latency of long rings over nodes, below and from Ampere on
_RING_PLATEAU_BYTES = 64  # per channel and rank, from which that holds
_RING_LL = 0.5  # of the ring's bandwidth: LL sends a flag with every word
_LL128 = 0.92  # of the ring's bandwidth
_TREE = 0.92  # of the bandwidth found by the search
_TREE_LL = 1.0 / 3.8  # of the tree's bandwidth
_TREE_LL128_NODE, _TREE_LL128 = 7.0 / 9.0, 120.0 / 128.0  # inside one node, across nodes
_TREE_PASSES = 0.5  # up and down the tree
_PAT = 0.75  # of the bandwidth found by the search
_PAT_HOPS_AT_ONCE = 3.5  # network hops whose latency overlaps
_PAT_RANK_US = 2.8  # latency that grows with ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The winner of NCCL's cost model.

    Attributes
    ----------
    algorithm, protocol : str
    time_s : float
        By NCCL's own model, not by the fitted forms.
    runner_up : str
        ``algorithm/protocol`` of the second, empty when nothing else is possible.
    margin : float
        Time of the second over time of the winner, minus 1; infinite without a second.
    """

    algorithm: str
    protocol: str
    time_s: float
    runner_up: str
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One collective in the terms of the tuner: bytes, ranks, domains, and GB/s of the search."""

    kind: str
    num_bytes: float
    ranks: int
    domains: int
    pcie: bool
    row: int
    intra_gb_per_s: float
    inter_gb_per_s: float

    @property
    def steps(self) -> int:
        return 2 * (self.ranks - 1) if self.kind == "all_reduce" else self.ranks - 1

    @property
    def nodes_key(self) -> str:
        return f"{_ROWS[self.row]}/{('N1', 'N2', 'N4')[min(self.domains, 3) - 1]}"


def collective_choice(kind: str, num_bytes: float, num_ranks: int, stride: int, fabric: Fabric) -> Choice:
    """Return the algorithm and protocol that NCCL's tuner prefers for one collective.

    Parameters
    ----------
    kind
        One of ``KINDS``.
    num_bytes, num_ranks, stride
        As in ``foreshard.comm.collectives``; scalars.
    fabric
        Scalar fields.
    """
    if kind not in KINDS:
        raise SpecError("no such collective", key="kind", value=kind, fix=f"Known: {', '.join(KINDS)}")
    if num_ranks <= 1 or num_bytes <= 0:
        return Choice(algorithm="none", protocol="none", time_s=0.0, runner_up="", margin=float("inf"))
    job = _job(kind, float(num_bytes), int(num_ranks), int(stride), fabric)
    table = comm_constants()["nccl"]
    priced = sorted((time, algo, proto) for algo, proto, time in _candidates(job, fabric, table))
    time, algorithm, protocol = priced[0]
    if len(priced) == 1:
        return Choice(algorithm=algorithm, protocol=protocol, time_s=time, runner_up="", margin=float("inf"))
    second = priced[1]
    return Choice(
        algorithm=algorithm,
        protocol=protocol,
        time_s=time,
        runner_up=f"{second[1]}/{second[2]}",
        margin=second[0] / time - 1.0,
    )


def _job(kind: str, num_bytes: float, ranks: int, stride: int, fabric: Fabric) -> _Job:
    inside = min(ranks, max(1, floor(float(fabric.domain) / stride)))
    row, pcie = int(fabric.nccl_row) % 10, int(fabric.nccl_row) >= 10
    intra = float(fabric.intra_bytes_per_s) * (1.0 if pcie else _SEARCH_EFF[row]) / 1e9
    inter = inside * float(fabric.nic_bytes_per_s) / float(fabric.per_node) / 1e9
    return _Job(
        kind=kind,
        num_bytes=num_bytes,
        ranks=ranks,
        domains=ceil(ranks / inside),
        pcie=pcie,
        row=row,
        intra_gb_per_s=intra,
        inter_gb_per_s=inter,
    )


def _candidates(job: _Job, fabric: Fabric, table: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield every (algorithm, protocol, seconds) that the collective admits."""
    if job.kind in ("all_to_all", "send"):
        yield "P2P", "Simple", _direct_s(job, table)
        return
    protocols = ("LL", "Simple") if job.pcie else ("LL", "LL128", "Simple")
    for protocol in protocols:
        yield "Ring", protocol, _ring_s(job, protocol, table)
        if job.kind == "all_reduce":
            yield "Tree", protocol, _tree_s(job, protocol, table)
    one_per_node = job.domains == job.ranks > 1
    if job.kind in ("all_gather", "reduce_scatter") and one_per_node:
        yield "PAT", "Simple", _pat_s(job, table)
    if job.kind == "all_reduce" and fabric.in_network and job.ranks // job.domains > 2:
        yield ("NVLS" if job.domains == 1 else "NVLSTree"), "Simple", _in_switch_s(job, table)


def _bus(job: _Job) -> float:
    """Return GB/s of a ring: the slower of link and NIC."""
    return job.intra_gb_per_s if job.domains == 1 else min(job.intra_gb_per_s, job.inter_gb_per_s)


def _hop_us(job: _Job, algorithm: str, protocol: str, table: dict[str, Any]) -> tuple[float, float]:
    """Return latency of one hop inside a node and of one between nodes."""
    kind = "PCI" if job.pcie else "NVLINK"
    hops = table["hwLatencies"]
    return hops[f"{kind}/{algorithm}/{protocol}"], hops[f"NET/{algorithm}/{protocol}"]


def _seconds(latency_us: float, num_bytes: float, gb_per_s: float) -> float:
    return latency_us * 1e-6 + num_bytes / (gb_per_s * 1e9)


def _ring_s(job: _Job, protocol: str, table: dict[str, Any]) -> float:
    bus, channels = _bus(job), _CHANNELS[job.row]
    if protocol == "LL":
        bus = min(table["llMaxBws"][job.nodes_key], _RING_LL * bus)
    elif protocol == "LL128":
        bus = min(_LL128 * bus, channels * table["perChMaxRingLL128Bws"][job.nodes_key])
    intra, inter = _hop_us(job, "Ring", protocol, table)
    crossings = (2 if job.kind == "all_reduce" else 1) * (job.domains - 1)
    latency = table["baseLatencies"][f"Ring/{protocol}"] + (job.steps - crossings) * intra + crossings * inter
    per_rank = job.num_bytes / (_CHANNELS[job.row] * job.ranks)
    if (
        job.kind == "all_reduce"
        and protocol == "Simple"
        and job.domains > 1
        and per_rank >= _RING_PLATEAU_BYTES
    ):
        latency *= _RING_PLATEAU_VOLTA if _ROWS[job.row] == "Volta" else _RING_PLATEAU
    return _seconds(latency, job.num_bytes, bus * job.ranks / job.steps)


def _tree_s(job: _Job, protocol: str, table: dict[str, Any]) -> float:
    # A tree inside one node is a chain; over two nodes NCCL credits it with the link, not the NIC.
    bus = job.intra_gb_per_s if job.domains == 1 else min(job.intra_gb_per_s, job.inter_gb_per_s)
    channels = _CHANNELS[job.row]
    bus = min(_TREE * bus, channels * table["perChMaxTreeBws"][job.nodes_key])
    if protocol == "LL":
        bus = min(_TREE_LL * bus, table["llMaxBws"][job.nodes_key])
    elif protocol == "LL128":
        share = _TREE_LL128_NODE if job.domains == 1 else _TREE_LL128
        bus = min(share * bus, channels * table["perChMaxTreeLL128Bws"][job.nodes_key])
    octave = floor(log2(max(job.num_bytes, 64.0) / 64.0))
    corrections = table["treeCorrectionFactor"][protocol]
    bus *= corrections[octave] if octave < len(corrections) else 1.0
    intra, inter = _hop_us(job, "Tree", protocol, table)
    depth = (job.ranks / job.domains - 1.0) * intra + log2(job.domains) * inter
    return _seconds(
        table["baseLatencies"][f"Tree/{protocol}"] + 2.0 * depth, job.num_bytes, _TREE_PASSES * bus
    )


def _in_switch_s(job: _Job, table: dict[str, Any]) -> float:
    """Return the time of NVLS, or of NVLS inside nodes with a tree between them."""
    inside = job.ranks / job.domains
    # A device sends its buffer once and its share of the result once: 1 + 1/n buffers per direction.
    algbw = table["nvlsEfficiency"][_ROWS[job.row]] * job.intra_gb_per_s * inside / (inside + 1.0)
    if job.domains == 1:
        return _seconds(_hop_us(job, "NVLS", "Simple", table)[0], job.num_bytes, algbw)
    intra, inter = _hop_us(job, "NVLSTree", "Simple", table)
    between = job.inter_gb_per_s * job.domains / (2.0 * (job.domains - 1.0))
    return _seconds(intra + 2.0 * log2(job.domains) * inter, job.num_bytes, min(algbw, between))


def _pat_s(job: _Job, table: dict[str, Any]) -> float:
    inter = _hop_us(job, "PAT", "Simple", table)[1]
    hops_us = log2(job.domains) * inter / _PAT_HOPS_AT_ONCE
    latency = table["baseLatencies"]["PAT/Simple"] + hops_us + _PAT_RANK_US * job.ranks
    return _seconds(latency, job.num_bytes, _PAT * _bus(job) * job.ranks / job.steps)


def _direct_s(job: _Job, table: dict[str, Any]) -> float:
    """Return the time of direct sends; NCCL has one way, so nothing is weighed."""
    intra, inter = _hop_us(job, "Ring", "Simple", table)
    inside = job.ranks / job.domains
    wire = job.num_bytes * (1.0 if job.kind == "send" else (job.ranks - 1.0) / job.ranks)
    bus = job.intra_gb_per_s if job.domains == 1 else min(job.intra_gb_per_s, job.inter_gb_per_s / inside)
    hop = intra if job.domains == 1 else inter
    return _seconds(table["baseLatencies"]["Ring/Simple"] + hop, wire, bus)
