"""What verbs of `foreshard comm` take: a topology, a schedule by name or from a file, measured times."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from foreshard.errors import SpecError

if TYPE_CHECKING:
    from foreshard.catalog.kernels import Tables
    from foreshard.comm.schedules.schedule import Schedule
    from foreshard.comm.topology.graph import Topology
    from foreshard.spec.cluster import Cluster

RATES = ("fitted", "datasheet")
MEASURED_HELP = (
    "Measured times, where they cover it: a table of kernels (.csv), or the output of nccl-tests or of "
    "comm measure --log."
)
MAX_LOG_BYTES = 2**26  # a log of NCCL at its most talkative, a schedule of a million sends
_MAX_RANKS = 2048
"""Ranks whose sends are listed one by one: an all-reduce of as many has 8 million, which take some 6 GB."""
_MAX_SENDS = 2 * _MAX_RANKS**2
_FEW_SENDS = ("send", "broadcast")
"""Collectives of which each piece reaches each rank once at the most: as many sends as ranks."""
_TREES = ("double-tree", "binomial", "nvls-tree")
"""Algorithms that send each piece along a tree; each channel has its own pieces."""
_SWITCHES = ("nvls", "sharp")
"""Algorithms in which each rank sends each piece to a switch."""
_MAX_DEVICES = 2**14  # of a topology, of which a schedule may use a part
_TOPOLOGY_FILES = (".xml", ".yml", ".yaml", ".json")


def topology_at(cluster: str, rates: str) -> tuple[Topology, int | None]:
    """Return the topology of a cluster or of a file, and the devices of each node where all have as many."""
    from foreshard import api
    from foreshard.comm.topology.importers.formats import read_topology
    from foreshard.comm.topology.of_cluster import topology_of

    if Path(cluster).suffix.lower() in _TOPOLOGY_FILES:
        return read_topology(cluster), None
    loaded = api.load_cluster(cluster)
    check_size("CLUSTER", loaded.num_devices, _MAX_DEVICES, "A topology is drawn up link by link")
    sizes = {nodes.per_node for nodes in loaded.nodes}
    return topology_of(loaded, rates=rates), sizes.pop() if len(sizes) == 1 else None  # type: ignore[arg-type]


def check_size(key: str, number: int, most: int, why: str) -> None:
    """Refuse what would take hours and all memory."""
    if number > most:
        fix = f"Give {most:,} or less: comm predict has no limit"
        raise SpecError(f"{number:,} ranks", key=key, value=number, rule=f"{why}: at most {most:,}", fix=fix)


def check_ranks(key: str, collective: str, ranks: int) -> None:
    """Refuse a collective whose sends are too many to list: those between all ranks, of many ranks."""
    if collective not in _FEW_SENDS:
        check_size(key, ranks, _MAX_RANKS, "Every send of a schedule is listed")


def _check_pieces(collective: str, algorithm: str, ranks: int, channels: int, parts: int | None) -> None:
    """Refuse pieces that together are more sends than may be listed."""
    pieces = channels * (parts or 1) if algorithm in _TREES else parts or channels
    sends = pieces * least_sends(collective, algorithm, ranks)
    if sends > _MAX_SENDS:
        raise SpecError(
            f"{pieces:,} pieces over {ranks:,} ranks are {sends:,} sends or more",
            key="--parts" if parts else "--channels",
            value=parts or channels,
            rule=f"Every send of a schedule is listed: at most {_MAX_SENDS:,}",
            fix="Give fewer parts or channels",
        )


def least_sends(collective: str, algorithm: str, ranks: int) -> int:
    """Return how many sends a piece of a schedule is at least."""
    if collective == "send":
        return 1
    few = algorithm in (*_TREES, *_SWITCHES) or collective in _FEW_SENDS
    return (ranks - 1) * (1 if few else ranks)


def load_loops(topology: Topology) -> None:
    """Load the compiled loops with a send between two ranks: the wall time of what follows is its own."""
    from foreshard.comm.flow.places import routing_of
    from foreshard.comm.flow.schedule_run import run_schedule
    from foreshard.comm.schedules.registry import schedule_of
    from foreshard.comm.schedules.schedule import load_rounds

    if find_spec("numba") is not None:
        load_rounds()
        small = schedule_of("all-gather", "ring", 2)
        run_schedule(small, 1.0, topology, routing_of(small, topology, forwarding="any"), compiled=True)


def schedule_named(
    collective: str, algorithm: str, ranks: int, per_node: int | None, channels: int, parts: int | None
) -> Schedule:
    """Return the schedule of an algorithm's name, or of a file that must be one of the collective."""
    from foreshard.comm.schedules.registry import ALGORITHMS, schedule_of

    check_ranks("--ranks", collective, ranks)
    _check_pieces(collective, algorithm, ranks, channels, parts)
    suffix = Path(algorithm).suffix.lower()
    if suffix not in (".json", ".xml"):
        knows_nodes = algorithm in ALGORITHMS and "per_node" in ALGORITHMS[algorithm].options
        nodes = per_node if knows_nodes and per_node and ranks % per_node == 0 else None
        return schedule_of(collective, algorithm, ranks, per_node=nodes, channels=channels, parts=parts)
    made = schedule_file(algorithm)
    if made.collective != collective:
        what = f"the schedule is one of {made.collective}"
        rule = f"It has to be one of {collective}"
        raise SpecError(what, file=algorithm, key="collective", value=made.collective, rule=rule)
    return made


def schedule_file(path: str) -> Schedule:
    """Return the schedule of a JSON or MSCCL file; both readers prove it right."""
    from foreshard.comm.schedules.schedule_file import load_schedule
    from foreshard.interop.collective_schedules.msccl_reader import schedule_of_msccl
    from foreshard.spec.codec import read_text

    if Path(path).suffix.lower() == ".xml":
        return schedule_of_msccl(read_text(path, max_bytes=MAX_LOG_BYTES), file=path)
    return load_schedule(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollectives:
    """Measured times, and of which collective those are that answer for the one that is asked for."""

    tables: Tables
    path: str
    collective: str
    is_named: bool  # by the file; else it is taken to be the one that is asked for


def measured_collectives(path: str, cluster: Cluster, collective: str) -> MeasuredCollectives:
    """Return measured collectives: a table of kernels, or what nccl-tests printed."""
    from foreshard.cost.tables import load_tables
    from foreshard.interop.nccl_tests import read_nccl_tests, tables_of
    from foreshard.spec.codec import read_text

    if path.endswith((".csv", ".csv.gz")):
        held = "all-gather" if collective == "reduce-scatter" else collective
        return MeasuredCollectives(tables=load_tables(path), path=path, collective=held, is_named=True)
    run = read_nccl_tests(read_text(path, max_bytes=MAX_LOG_BYTES), path)
    return MeasuredCollectives(
        tables=tables_of(run, cluster.device_of(0).name, path, collective),
        path=path,
        collective=run.collective or collective,
        is_named=run.collective is not None,
    )
