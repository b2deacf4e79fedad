"""Plans as MSCCL XML: one schedule for every collective and size of communicator that a plan has.

Source: `collective_schedules/msccl.py`. MSCCL takes a file for communicators of as many ranks as it has.
"""

from __future__ import annotations

from collections.abc import Iterator

from foreshard.comm.schedules.registry import schedule_of
from foreshard.comm.schedules.schedule import Schedule
from foreshard.errors import SpecError
from foreshard.interop.collective_schedules.msccl import COLLECTIVE_NAMES, msccl_xml
from foreshard.interop.exporters.exported import ExportRequest, reject_if
from foreshard.interop.exporters.rank_sets import RankSet, rank_sets
from foreshard.spec.cluster import Cluster

_FIXED = {"ring": "ring", "tree": "double-tree"}
"""The schedule of all-reduces for the `collectives` of a plan."""
_HALVING = {
    "all-reduce": "halving-doubling",
    "all-gather": "recursive-doubling",
    "reduce-scatter": "recursive-halving",
}
"""Schedules whose steps grow with the logarithm of the ranks."""


def export(request: ExportRequest) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Return the XML of every collective of the plan's communicators."""
    plan, cluster = request.plan, request.cluster
    used: dict[tuple[str, int], list[RankSet]] = {}
    for one in rank_sets(plan):
        for collective in one.collectives:
            used.setdefault((collective, len(one.ranks)), []).append(one)
    files, notes, reasons = [], [], []
    for (collective, num_ranks), sets in used.items():
        fixed = _FIXED.get(plan.collectives) if collective == "all-reduce" else None
        name = f"{COLLECTIVE_NAMES[collective]}-{num_ranks}.xml"
        per_node = _per_node(cluster, sets)
        tried: list[str] = []
        for algorithm in (fixed,) if fixed else _candidates(collective, num_ranks, per_node):
            try:
                text = msccl_xml(_schedule(collective, algorithm, num_ranks, per_node))
            except SpecError as error:
                tried.append(f"{algorithm}: {error.what}")
                continue
            files.append((name, text))
            purposes = ", ".join(dict.fromkeys(one.purpose for one in sets))
            notes.append(f"{name}: {algorithm}, for {len(sets)} of the communicators ({purposes}).")
            break
        else:
            reasons.append(f"the {collective} of {num_ranks} ranks ({'; '.join(tried)})")
    reject_if(request.target, reasons)
    if not files:
        what, rule = "no two ranks of the plan sum or gather", "A schedule has at least 2 ranks"
        raise SpecError(what, key="PLAN", rule=rule, fix="Nothing has to be exported")
    return tuple(files), notes


def _candidates(collective: str, num_ranks: int, per_node: int) -> Iterator[str]:
    """Yield the algorithms to try: over nodes in two levels, else a ring, else fewer steps."""
    if collective == "all-to-all":
        yield "direct"
        return
    if 1 < per_node < num_ranks:
        yield "hierarchical"
    yield "ring"
    yield _HALVING[collective]


def _schedule(collective: str, algorithm: str, num_ranks: int, per_node: int) -> Schedule:
    return schedule_of(
        collective, algorithm, num_ranks, per_node=per_node if algorithm == "hierarchical" else None
    )


def _per_node(cluster: Cluster | None, sets: list[RankSet]) -> int:
    """Return the ranks on each node, consecutive in the communicator; 1 where sets or nodes differ."""
    if cluster is None:
        return 1
    found = set()
    for one in sets:
        nodes = [cluster.node_of(rank) for rank in one.ranks]
        width = nodes.count(nodes[0])
        blocks = [nodes[at : at + width] for at in range(0, len(nodes), width)]
        alike = all(len(block) == width and len(set(block)) == 1 for block in blocks)
        found.add(width if alike and len({block[0] for block in blocks}) == len(blocks) else 1)
    return found.pop() if len(found) == 1 else 1
