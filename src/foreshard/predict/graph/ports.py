"""The network that the tasks of a step share: for each distinct stage the ports of one rank, for all of it.

Symmetric ranks send the same bytes at the same time, so one of them tells how long a port is busy. What the
devices of a node or a leaf have in common (a NIC, an uplink) every device has an even part of, as in the
closed forms; the parts add up to the whole, which therefore binds nowhere else. A link between racks is one
resource in each direction for all stages: a transfer there stands for those of all devices that drive the
link with it. Other jobs on the cluster leave less of these links, and of the NICs of nodes that they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreshard.comm.fabric import Fabric
from foreshard.comm.jobs.background import IN, OUT, BackgroundLoad
from foreshard.comm.jobs.job import TrainingJob
from foreshard.graph.program import Kind
from foreshard.predict.batch import PlannedRun, crossed_by, crossed_by_gradients
from foreshard.predict.graph.prices import GroupPrices
from foreshard.predict.placement import first_of_equals
from foreshard.sim.contention import Burst, OtherJob, SharedNetwork

_SLOWER = 1.0 - 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTransfer:
    """Bytes of one transfer, and the route they take."""

    num_bytes: float
    route: int
    alone_s: float  # that the bytes take by themselves


NOTHING = PortTransfer(num_bytes=0.0, route=-1, alone_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """Resources of the rank that stands for a stage."""

    link: tuple[int, int]
    nic: tuple[int, int]
    link_bytes_per_s: float
    nic_bytes_per_s: float
    over_pcie: bool  # its bytes to the NIC pass the slot that joins it to its neighbours


class StepNetwork:
    """Ports of all distinct stages of a step, and the routes of its transfers over them."""

    def __init__(
        self, case: PlannedRun, prices: list[GroupPrices], slow_link: Mapping[int, float] | None = None
    ):
        """Build the ports of a step; ranks of `slow_link` carry so many times less."""
        self.network = SharedNetwork()
        self._case = case
        self._slower = _slower(case, slow_link or {})
        self.machines = {price.index: price.machines for price in prices}
        self._crosses = {price.index: price.crosses for price in prices}
        self._ports: dict[tuple[int, int], _Ports] = {}
        self._paths: dict[tuple[int, int, str, str], int] = {}
        self._ranks: dict[tuple[int, int], int] = {}
        self._others = BackgroundLoad(case.cluster, () if case.bursts else case.other_jobs)
        self._links = [
            tuple(
                self.network.resource(
                    f"link {a} to {b}",
                    link.bandwidth_bytes_per_s,
                    self._others.link_share(index, way),
                    of_all=True,
                )
                for way, (a, b) in enumerate((link.between, link.between[::-1]))
            )
            for index, link in enumerate(case.cluster.links)
        ]
        for price in prices:
            for s, stage in enumerate(price.group.stages):
                self._ranks[price.index, s] = stage.ranks[0]
                self._ports[price.index, s] = self._new(case, price, s)
        if case.bursts:
            others = [self._other(case, job) for job in case.other_jobs]
            self.network.others = [job for job in others if any(burst.route >= 0 for burst in job.phases)]

    def _other(self, case: PlannedRun, job: TrainingJob) -> OtherJob:
        """Return another job by what its phases send over links and NICs.

        A phase takes as long as it would alone at the least, on whichever of the cluster's links that is.
        """
        found = []
        for phase, load in zip(job.phases, self._others.phases(job), strict=True):
            if not load.alone_s:
                found.append(Burst(compute_s=phase.compute_s, num_bytes=0.0, route=-1))
                continue
            sent = max(load.num_bytes.values())
            alone = self.network.resource(f"{job.name} elsewhere", sent / load.alone_s)
            busy_s: dict[int, float] = {alone: load.alone_s}
            for (kind, index, way), size in load.num_bytes.items():
                if kind == "link":
                    resource = self._links[index][way]
                    busy_s[resource] = size / self.network.capacity_bytes_per_s[resource]
            for (group, s), ports in self._ports.items():
                ranks = case.plan.groups[group].stages[s].ranks
                for way in (OUT, IN):
                    busy_s[ports.nic[way]] = self._others.nic_load(load, ranks, way)
            usage = {
                resource: seconds * self.network.capacity_bytes_per_s[resource] / sent
                for resource, seconds in busy_s.items()
                if seconds > 0.0
            }
            route = self.network.route(tuple(usage), tuple(usage.values()))
            found.append(
                Burst(
                    compute_s=phase.compute_s,
                    num_bytes=sent,
                    route=route,
                    overlaps=phase.overlaps,
                )
            )
        return OtherJob(name=job.name, phases=tuple(found), start_s=job.arrival_s)

    def _new(self, case: PlannedRun, price: GroupPrices, s: int) -> _Ports:
        fabric, rank = price.machines[s].fabric, price.group.stages[s].ranks[0]
        link, nic = float(fabric.intra_bytes_per_s), _share(fabric)
        slower, ranks = self._slower.get((price.index, s), 1.0), price.group.stages[s].ranks
        free = [self._others.nic_share(ranks, way) for way in (OUT, IN)]

        def add(name: str, bytes_per_s: float, left: float = 1.0) -> int:
            return self.network.resource(name, bytes_per_s / slower, left)

        return _Ports(
            link=(add(f"rank {rank} links out", link), add(f"rank {rank} links in", link)),
            nic=(add(f"rank {rank} NIC out", nic, free[OUT]), add(f"rank {rank} NIC in", nic, free[IN])),
            link_bytes_per_s=link,
            nic_bytes_per_s=nic,
            over_pcie=case.cluster.node_group_of(rank).nvlink_domain <= 1,
        )

    def collective(self, group: int, stage: int, link_s: float, nic_s: float, *, whole: bool) -> PortTransfer:
        """Return what a collective moves through the ports of a stage, out and in.

        `whole` is of gradient collectives, which may leave the stage's own fabric for that of all groups.
        """
        machine, ports = self.machines[group][stage], self._ports[group, stage]
        fabric = machine.sync if whole else machine.fabric
        sides, where = [(ports, OUT), (ports, IN)], (group, stage)
        streams = crossed_by_gradients(self._case, where) if whole else crossed_by(self._case, where)
        crossed = {way: count for index, count in streams.items() for way in self._links[index]}
        return self._moved(sides, (*where, "gradients"), fabric, link_s, nic_s, crossed)

    def message(self, group: int, stage: int, kind: int, link_s: float, nic_s: float) -> PortTransfer:
        """Return what a message to the next stage, or to the one before, moves."""
        count = len(self.machines[group])
        to = (stage + (1 if kind == Kind.SEND_FORWARD else -1)) % count
        boundary = stage if kind == Kind.SEND_FORWARD else to
        here, there = self._ports[group, stage], self._ports[group, to]
        if self._crosses[group][boundary] and not here.over_pcie:
            link_s = min(link_s, 0.0)  # from the device to its NIC, past the links to its neighbours
        fabric = self.machines[group][stage].link
        rack = self._case.cluster.node_group_of(self._ranks[group, stage]).rack
        crossed = {
            self._links[index][rack != self._case.cluster.links[index].between[0]]: count
            for index, count in crossed_by(self._case, (group, stage), to).items()
        }
        sides = [(here, OUT), (there, IN)]
        return self._moved(sides, (group, stage, "messages"), fabric, link_s, nic_s, crossed)

    def _moved(
        self,
        sides: list[tuple[_Ports, int]],
        path: tuple[int, int, str],
        fabric: Fabric,
        link_s: float,
        nic_s: float,
        crossed: Mapping[int, float],
    ) -> PortTransfer:
        """Return bytes and route of what occupies links and NICs of a fabric for so many seconds.

        `crossed` are links between racks, with the streams like this one that each carries.
        """
        alone_s = max(link_s, nic_s)
        if alone_s <= 0.0:
            return NOTHING
        rates = float(fabric.intra_bytes_per_s), _share(fabric)
        moved = link_s * rates[0], nic_s * rates[1]
        unit = moved[0] if link_s >= nic_s else moved[1]
        usage: dict[int, float] = {}
        for ports, way in sides:
            link = moved[0]
            if ports.over_pcie:
                link = max(link, min(moved[1], alone_s * ports.link_bytes_per_s))
            usage[ports.link[way]] = min(link, alone_s * ports.link_bytes_per_s)
            usage[ports.nic[way]] = min(moved[1], alone_s * ports.nic_bytes_per_s)
        slowest = (
            min(ports.link_bytes_per_s for ports, _ in sides),
            min(ports.nic_bytes_per_s for ports, _ in sides),
        )
        for name, rate, own, num_bytes in zip(("links", "NIC"), rates, slowest, moved, strict=True):
            if rate < own * _SLOWER and num_bytes > 0.0:
                usage[self._path(path, name, rate)] = num_bytes
        for resource, streams in crossed.items():
            most = alone_s * self.network.capacity_bytes_per_s[resource]
            usage[resource] = min(streams * moved[1], most)
        used = {resource: value / unit for resource, value in usage.items() if value > 0.0}
        route = self.network.route(tuple(used), tuple(used.values()))
        return PortTransfer(num_bytes=unit, route=route, alone_s=alone_s)

    def _path(self, path: tuple[int, int, str], name: str, rate: float) -> int:
        """Return the resource that bounds a stage's transfers elsewhere: a slower peer, a link of racks."""
        key = (*path, name)
        if key not in self._paths:
            rank = self._ranks[path[:2]]
            label = f"rank {rank} slowest {name} on the way of {path[2]}"
            self._paths[key] = self.network.resource(label, rate)
        return self._paths[key]


def _slower(case: PlannedRun, slow_link: Mapping[int, float]) -> dict[tuple[int, int], float]:
    """Return by how much the slowest links of a stage, in any group like it, are slower."""
    found: dict[tuple[int, int], float] = {}
    if not slow_link:
        return found
    for group, like in zip(case.plan.groups, first_of_equals(case.cluster, case.plan), strict=True):
        for s, stage in enumerate(group.stages):
            slower = [factor for rank, factor in slow_link.items() if rank in stage.ranks]
            found[like, s] = max([*slower, found.get((like, s), 1.0)])
    return found


def _share(fabric: Any) -> float:
    """Return the part of a node's NICs that each of its devices has, bytes/s."""
    return float(np.asarray(fabric.nic_bytes_per_s / fabric.nic_sharers))
