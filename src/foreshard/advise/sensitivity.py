"""Sensitivity to hardware: the search repeated on clusters that differ in one property."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from foreshard.errors import ForeshardError
from foreshard.spec.cluster import Cluster
from foreshard.spec.device import Device

if TYPE_CHECKING:
    from foreshard.planner.result import PlanResult

Search = Callable[[Cluster], "PlanResult"]
_MAX_NODE_GROUPS = 4  # node groups that are tried with one node more; each takes a search
_MORE_MEMORY = 1.2  # about the step between memory sizes of a device generation
_FASTER_NIC = 2.0  # the step between generations of networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One change of the cluster, the best step found with it, and what that gains."""

    change: str
    step_time_s: float | None  # none where nothing fits
    # tokens per second more, as a fraction. A change never takes the present plan away, so 0 is the least
    gain: float | None
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the object that ``plan --explain --json`` prints for one change."""
        return asdict(self)


def sensitivity(search: Search, cluster: Cluster, base: PlanResult) -> tuple[Gain, ...]:
    """Return what each change of the cluster gains, the most first.

    `search` has everything but the cluster fixed, its budget should be short; `base` is its result on the
    cluster as it is, with at least one plan.
    """
    found = [_gain(search, change, changed, base) for change, changed in changes(cluster)]
    return tuple(sorted(found, key=lambda gain: -1.0 if gain.gain is None else gain.gain, reverse=True))


def changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield a node more of each kind, twice the NIC rate (of several nodes), and 20 % more memory."""
    for g, nodes in enumerate(cluster.nodes[:_MAX_NODE_GROUPS]):
        text = f"one node more of {nodes.per_node} {nodes.device.name}"
        groups = list(cluster.nodes)
        groups[g] = replace(nodes, count=nodes.count + 1)
        yield text, replace(cluster, nodes=tuple(groups))
    if cluster.num_nodes > 1:
        faster = tuple(replace(n, nic_bytes_per_s=_FASTER_NIC * n.nic_bytes_per_s) for n in cluster.nodes)
        yield "NICs twice as fast", replace(cluster, nodes=faster)
    larger = tuple(replace(n, device=_larger(n.device)) for n in cluster.nodes)
    yield "20 % more device memory", replace(cluster, nodes=larger)


def _larger(device: Device) -> Device:
    return replace(
        device,
        memory_bytes=_MORE_MEMORY * device.memory_bytes,
        capacity_bytes=_MORE_MEMORY * device.capacity_bytes,
    )


def _gain(search: Search, change: str, changed: Cluster, base: PlanResult) -> Gain:
    try:
        result = search(changed)
    except ForeshardError as error:
        return Gain(change=change, step_time_s=None, gain=None, note=str(error))
    now = base.plans[0].prediction.step_time_s
    if not result.plans or result.infeasible is not None:
        return Gain(change=change, step_time_s=None, gain=None, note=str(result.infeasible))
    found = min(now, result.plans[0].prediction.step_time_s)
    note = "at least: the search stopped at its budget" if result.interrupted else ""
    return Gain(change=change, step_time_s=found, gain=now / found - 1.0, note=note)
