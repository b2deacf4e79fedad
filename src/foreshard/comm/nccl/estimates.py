"""NCCL's estimate of every algorithm with every protocol: latency, bandwidth and time.

The rules restate ``ncclTopoTuneModel`` and ``ncclTopoGetAlgoTime`` of the release that
``catalog/data/nccl_tuning.toml`` names; sizes are those of ``comm/collectives.py``. An estimate is the
latency plus bytes over the algorithm's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from foreshard.comm.nccl.channels import Channels
from foreshard.comm.nccl.communicator import Communicator
from foreshard.comm.nccl.constants import (
    ALGORITHMS,
    GIGA,
    MICRO,
    PROTOCOLS,
    constant,
    factor,
    limit,
    network_overhead_s,
    nvls_efficiency,
    release_rule,
    tree_correction,
)

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
"""Collectives that NCCL chooses an algorithm for."""
GATHERS = ("all-gather", "reduce-scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """NCCL's estimate of one algorithm with one protocol, or the reason why it cannot run."""

    algorithm: str
    protocol: str
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    time_s: float = inf
    reason: str = ""

    @property
    def name(self) -> str:
        """Return algorithm and protocol as NCCL spells them."""
        return f"{ALGORITHMS[self.algorithm]}/{self.protocol}"

    @property
    def runs(self) -> bool:
        """Return whether NCCL can take it."""
        return not self.reason


def estimate(
    collective: str, num_bytes: float, algorithm: str, protocol: str, comm: Communicator
) -> Estimate:
    """Return NCCL's estimate of an algorithm with a protocol, in seconds."""
    made = Estimate(algorithm=algorithm, protocol=protocol)
    reason = (
        _against_algorithm(collective, algorithm, comm)
        or _against_protocol(algorithm, protocol, comm)
        or _against_nodes(algorithm, comm)
    )
    if reason:
        return replace(made, reason=reason)
    latency = _latency_s(collective, algorithm, protocol, comm)
    bandwidth = _bus_bytes_per_s(collective, algorithm, protocol, comm) * _bytes_ratio(
        collective, algorithm, comm
    )
    bandwidth *= _size_correction(collective, num_bytes, algorithm, protocol, comm)
    latency *= _plateau(collective, num_bytes, algorithm, protocol, comm)
    return replace(made, latency_s=latency, bytes_per_s=bandwidth, time_s=latency + num_bytes / bandwidth)


def _against_algorithm(collective: str, algorithm: str, comm: Communicator) -> str:
    """Return why an algorithm cannot run, empty where it can."""
    name = ALGORITHMS[algorithm]
    if collective == "broadcast" and algorithm != "ring":
        return "broadcast runs on the ring only"
    if collective in GATHERS and algorithm in ("tree", "collnet-chain", "nvls-tree"):
        return f"{name} serves all-reduce only"
    if collective == "all-reduce" and algorithm == "pat":
        return "PAT serves all-gather and reduce-scatter only"
    if algorithm.startswith("collnet") and not comm.collnet:
        return "no reduction in the network is enabled (NCCL_COLLNET_ENABLE)"
    if algorithm.startswith("collnet") and comm.ranks_per_node > limit("collnet_ranks_per_node"):
        return f"{name} takes at most {limit('collnet_ranks_per_node')} ranks per node"
    if algorithm == "collnet-direct" and not comm.switched:
        return "CollNetDirect needs NVSwitch"
    if algorithm.startswith("nvls") and comm.switch is None:
        return "no switch reduces between the ranks of a node (NVLS needs NVSwitch and Hopper or later)"
    if algorithm.startswith("nvls") and comm.switch is not None and comm.switch.count < 2:
        return "NVLS needs two channels"
    return ""


def _against_protocol(algorithm: str, protocol: str, comm: Communicator) -> str:
    if algorithm not in ("ring", "tree") and protocol != "Simple":
        return f"{ALGORITHMS[algorithm]} runs with Simple only"
    if protocol == "LL128" and not comm.nvlink and comm.ranks_per_node > 1:
        return "LL128 needs NVLink between the ranks of a node"
    if protocol == "LL128" and comm.capability < 70:
        return "LL128 needs Volta or later"
    if protocol == "LL128" and comm.far_cards and comm.num_nodes > 1:
        return "LL128 needs network cards that no path through the CPU leads to"
    return ""


def _against_nodes(algorithm: str, comm: Communicator) -> str:
    if algorithm == "pat" and comm.num_nodes != comm.num_ranks:
        return "PAT needs one rank per node"
    if algorithm == "nvls-tree" and comm.num_nodes == 1:
        return "NVLSTree joins several nodes"
    if algorithm == "nvls" and comm.num_nodes > 1 and not comm.collnet:
        return "NVLS over several nodes needs reduction in the network"
    return ""


def ring_steps(collective: str, num_ranks: int) -> int:
    """Return how many times a ring passes a block on."""
    if collective == "all-reduce":
        return 2 * (num_ranks - 1)
    return num_ranks - 1 if collective in GATHERS else num_ranks


def _channels(algorithm: str, comm: Communicator) -> Channels:
    if algorithm.startswith("nvls") and comm.switch is not None:
        return comm.switch
    return comm.ring if algorithm == "ring" else comm.tree


def _bus_bytes_per_s(collective: str, algorithm: str, protocol: str, comm: Communicator) -> float:
    """Return the bandwidth of all channels together, before steps are counted."""
    channels = _channels(algorithm, comm)
    inside = comm.num_nodes <= 2 or algorithm.startswith("collnet")
    bus = channels.count * (channels.intra_bytes_per_s if inside else channels.inter_bytes_per_s)
    if algorithm == "ring":
        return _ring_bus(bus, protocol, comm)
    if algorithm == "tree":
        return _tree_bus(bus, protocol, comm)
    if algorithm == "pat":
        return bus * factor("pat")
    if algorithm.startswith("nvls"):
        return channels.count * _switch_channel(collective, algorithm, channels, comm)
    return _collnet_bus(bus, collective, algorithm, comm)


def _most(table: str, comm: Communicator, row: str = "") -> float:
    """Return the bytes/s of a limit for the devices of the communicator, or of another row."""
    name = f"{table}.{row or comm.row}.{min(comm.num_nodes, 3)}"
    return constant(name, comm.release, comm.constants) * GIGA


def _ll_limit(comm: Communicator) -> float:
    """Return what LL reaches: by device on one node, by CPU on several."""
    by_cpu = "ampere" if comm.cpu == "amd" else "volta"  # rows of the table in NCCL
    return _most("ll_max", comm, comm.row if comm.num_nodes == 1 else by_cpu)


def _ring_bus(bus: float, protocol: str, comm: Communicator) -> float:
    if protocol == "LL":
        return min(_ll_limit(comm), bus * factor("ring_ll"))
    if protocol == "LL128":
        most = comm.ring.count * _most("ring_ll128_max", comm)
        return min(bus * factor("ring_ll128"), most)
    return bus


def _tree_bus(bus: float, protocol: str, comm: Communicator) -> float:
    def most(table: str) -> float:
        return comm.tree.count * _most(table, comm)

    bus = min(bus * factor("tree"), most("tree_max"))
    if protocol == "LL":
        bus = min(bus * factor("tree_ll"), _ll_limit(comm))
    if protocol == "LL128":
        share = factor("tree_ll128_one_node" if comm.num_nodes == 1 else "tree_ll128")
        bus = min(bus * share, most("tree_ll128_max"))
    return bus * (factor("simple_tree") if comm.simple_tree or comm.ranks_per_node == 1 else 1.0)


def _switch_channel(collective: str, algorithm: str, channels: Channels, comm: Communicator) -> float:
    """Return bytes/s of one channel that reduces in the switch."""
    local = comm.ranks_per_node
    if (share := release_rule(comm.release, "nvls_tree_share_of_cards")) is not None:
        inside, across = channels.intra_bytes_per_s, channels.inter_bytes_per_s
        gather_share = release_rule(comm.release, "nvls_gather_share_of_cards")
        if algorithm == "nvls-tree":
            across *= 1.0 if comm.num_nodes <= 2 else share
        elif collective != "all-reduce" and gather_share is not None:
            inside, across = inside * (local - 1.0) / local, across * gather_share
        return min(inside, across)
    intra = channels.intra_bytes_per_s * nvls_efficiency(comm.row) * (channels.count - 1) / channels.count
    intra *= (
        2.0 if collective == "all-reduce" else (local - 1.0) / local
    )  # all-reduce pipelines two operations
    inter, most = channels.inter_bytes_per_s, inf
    if algorithm == "nvls-tree":
        inter *= 2.0 if comm.num_nodes <= 2 else 1.0
        most = _most("nvls_tree_max", comm)
    return min(intra, inter, most)


def _collnet_bus(bus: float, collective: str, algorithm: str, comm: Communicator) -> float:
    local = comm.ranks_per_node
    if algorithm == "collnet-chain":
        return bus
    if collective in GATHERS:
        inter = comm.tree.inter_bytes_per_s * factor("collnet_inter")
        return local * min(comm.tree.intra_bytes_per_s, inter)
    heads = local / comm.tree.count  # devices per channel; half of the excess costs time
    return bus / (heads - (heads - 1.0) / 2.0) * (factor("collnet_hopper") if comm.capability >= 90 else 1.0)


def _bytes_ratio(collective: str, algorithm: str, comm: Communicator) -> float:
    """Return the algorithm's bandwidth (bytes of the caller per second) over the bus bandwidth."""
    if algorithm != "ring" and collective in GATHERS:
        return 1.0
    ratio = release_rule(comm.release, "nvls_ratio")
    if algorithm.startswith("nvls") and ratio is not None:
        return ratio
    if algorithm in ("ring", "nvls", "nvls-tree"):
        return comm.num_ranks / ring_steps(collective, comm.num_ranks)
    return 0.5


def _size_correction(
    collective: str, num_bytes: float, algorithm: str, protocol: str, comm: Communicator
) -> float:
    """Return the factor on a tree's bandwidth at middle sizes."""
    if collective != "all-reduce":
        return 1.0
    if algorithm == "tree":
        return tree_correction(protocol, num_bytes, limit("tree_correction_sizes"))
    if algorithm == "nvls-tree" and comm.capability >= 100:
        return tree_correction(protocol, num_bytes, limit("tree_correction_sizes") + 1)
    return 1.0


def _plateau(collective: str, num_bytes: float, algorithm: str, protocol: str, comm: Communicator) -> float:
    """Return the factor on the latency of a Simple ring that crosses nodes."""
    if (collective, algorithm, protocol) != ("all-reduce", "ring", "Simple") or comm.num_nodes == 1:
        return 1.0
    share = num_bytes // (comm.num_channels * comm.num_ranks)
    if share < limit("plateau_bytes_per_channel_and_rank"):
        return 1.0
    return factor("plateau_before_ampere" if comm.capability < 80 else "plateau")


def _latency_s(collective: str, algorithm: str, protocol: str, comm: Communicator) -> float:
    intra = _hop_s("nvlink" if comm.nvlink else "pcie", algorithm, protocol, comm)
    # With one rank per node nothing hides the network, for which NCCL takes the tree's latency.
    inter = _network_hop_s("tree" if comm.ranks_per_node == 1 else algorithm, protocol, comm)
    base = constant(f"base_latency_us.{algorithm}.{protocol}", comm.release, comm.constants) * MICRO
    levels = comm.num_nodes.bit_length() - 1
    peers = comm.num_ranks // comm.num_nodes - 1  # other ranks of the node
    if algorithm == "ring":
        return base + _ring_latency_s(collective, protocol, intra, inter, comm)
    if algorithm == "tree":
        return base + 2.0 * (peers * intra + levels * inter)
    if algorithm == "collnet-direct":
        arity = peers * factor("collnet_arity_us") * MICRO
        return base + 2.0 * (min(1, peers) * intra + arity) + inter
    if algorithm == "collnet-chain":
        return base + 2.0 * peers * intra + inter
    if algorithm == "nvls":
        return intra + (inter if comm.num_nodes > 1 else 0.0)
    if algorithm == "nvls-tree":
        return base + intra + 2.0 * levels * inter
    return base + levels * inter / factor("pat_log_divisor") + comm.num_ranks * factor("pat_rank_us") * MICRO


def _hop_s(medium: str, algorithm: str, protocol: str, comm: Communicator) -> float:
    """Return the time of a hop over ``nvlink``, ``pcie`` or ``network``."""
    name = f"hop_latency_us.{medium}.{algorithm}.{protocol}"
    return constant(name, comm.release, comm.constants) * MICRO


def _network_hop_s(algorithm: str, protocol: str, comm: Communicator) -> float:
    """Return the time of a hop over the network; Simple flushes, which costs the plugin's latency again."""
    hop_s = _hop_s("network", algorithm, protocol, comm)
    return hop_s + comm.plugin_latency_s * (2.0 if protocol == "Simple" else 1.0)


def _ring_latency_s(collective: str, protocol: str, intra: float, inter: float, comm: Communicator) -> float:
    """Return the time of all hops of a ring; posting a message bounds hops inside a node as well."""
    crosses = comm.num_nodes > 1
    if collective == "broadcast":  # a pipeline, of which one hop shows
        return _network_hop_s("ring", protocol, comm) if crosses else intra
    over = 0
    if crosses:
        over = (2 if collective == "all-reduce" else 1) * (comm.num_nodes - 1)
        intra = max(intra, network_overhead_s(comm.cpu) * (3.0 if protocol == "Simple" else 1.0))
    return (ring_steps(collective, comm.num_ranks) - over) * intra + over * inter


def estimates(collective: str, num_bytes: float, comm: Communicator) -> tuple[Estimate, ...]:
    """Return NCCL's estimates of all algorithms with all protocols, in the order of its comparison."""
    return tuple(
        estimate(collective, num_bytes, algorithm, protocol, comm)
        for algorithm in ALGORITHMS
        for protocol in PROTOCOLS
    )
