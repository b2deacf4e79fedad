"""What launchers share: the nodes a plan needs (how many, of what, with how many devices each), and notes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from foreshard.errors import SpecError
from foreshard.interop.exporters.exported import ExportRequest
from foreshard.interop.exporters.uniform import uniform
from foreshard.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Equal nodes in a row; the plan uses `per_node` devices of each."""

    count: int
    device: str
    per_node: int


def hosts(request: ExportRequest) -> tuple[Hosts, ...]:
    """Return the nodes with a rank of the plan, in cluster order, equal neighbours together."""
    plan, cluster = request.plan, request.cluster
    if cluster is None:
        rule = "A launcher asks for nodes and devices by number and name"
        fix = "Give MODEL and CLUSTER after the plan"
        raise SpecError(f"{request.target} needs the cluster", key="CLUSTER", rule=rule, fix=fix)
    used = Counter(cluster.node_of(rank) for rank in plan.ranks)
    device = {cluster.node_of(rank): cluster.device_of(rank).name for rank in plan.ranks}
    alike = groupby(sorted(used), key=lambda node: (device[node], used[node]))
    return tuple(
        Hosts(count=len(list(nodes)), device=name, per_node=per_node) for (name, per_node), nodes in alike
    )


def uneven_note(plan: Plan) -> tuple[str, ...]:
    """Return what a launch script cannot state of a plan whose ranks do not all do the same."""
    if uniform(plan)[0] is not None:
        return ()
    return ("The plan is uneven: the training script must read it; most frameworks cannot.",)
