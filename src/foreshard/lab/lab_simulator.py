"""A lab step by step in measured costs: who is there, how fast, what moving layers takes."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import product

from foreshard.lab.lab import Lab
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.engine import rank_times
from foreshard.predict.measured.memory import measured_memory
from foreshard.runtime.adaptive.idle_probe import PROBE_EVERY, PROBED_LAYERS
from foreshard.runtime.device_memory import does_not_fit
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Plan
from foreshard.spec.plan_moves import layers_of, moves_between

_PROBE_BYTES = 2.0**20
"""Of a message that measures a link: large enough that its rate and not its latency decides."""


class LabSimulator:
    """The lab step by step, in measured costs."""

    def __init__(self, lab: Lab, costs: MeasuredCosts):
        self.lab, self._costs, self.cluster = lab, costs, lab.cluster()

    def there(self, step: int) -> tuple[int, ...]:
        """Return the ranks that are there in a step."""
        return tuple(rank for rank in range(len(self.lab.slow)) if self.lab.there_at(step, rank))

    def at(self, step: int) -> tuple[MeasuredCosts, Cluster]:
        """Return costs and cluster of a step, every rank a device of its own."""
        lab, slow, tables, nodes = self.lab, {}, {}, []
        for rank, node in enumerate(self.cluster.nodes):
            device, name = node.device.name, f"rank {rank}"
            slow[name] = self._costs.slow_of(device) * lab.slow_at(step, rank) / lab.slow[rank]
            tables[name] = self._costs.layers_on(device)
            rate, latency_s = lab.link_at(step, rank, rank)
            nodes.append(
                replace(
                    node,
                    device=replace(node.device, name=name),
                    nic_bytes_per_s=rate,
                    nic_latency_s=latency_s,
                )
            )
        return (
            replace(self._costs, slow=slow, tables=tables),
            replace(self.cluster, nodes=tuple(nodes)),
        )

    def holds(self, plan: Plan) -> bool:
        """Return whether every rank of a plan has memory for its part, as it runs."""
        return measured_memory(self._costs, self.cluster, plan).fits

    def check_memory(self, plan: Plan, step: int) -> None:
        """Raise where a rank of a plan that runs has no memory for its part: the run would end there."""
        held = measured_memory(self._costs, self.cluster, plan)
        if not held.fits and self.lab.stated("memory_bytes", held.peak_rank) is not None:
            parts = f"with the plan of step {step}"
            raise does_not_fit(held.peak_rank, held.peak_bytes, held.capacity_bytes, parts, self.lab.name)

    def move_s(self, step: int, old: Plan, new: Plan) -> float:
        """Return the seconds in which ranks get what they lack, from who is there, over the links then."""
        layers = self._costs.layers
        size = [layer.parameter_bytes + layer.frozen_bytes + layer.state_bytes for layer in layers]
        there, taken = self.there(step), [0.0]
        held = {rank: kept for rank, kept in layers_of(old).items() if rank in there}
        moves, _ = moves_between(held, layers_of(new), layer_of=int, order=int, weight=size.__getitem__)
        for (source, target), moved in moves.items():
            rate, latency_s = self.lab.link_at(step, source, target)
            taken.append(latency_s + sum(size[layer] for layer in moved) / rate)
        return max(taken)

    def in_vain_s(self, step: int, running: Plan, lost: AbstractSet[int]) -> float:
        """Return what the others have worked when a rank that was lost in a step is missed in its sums."""
        whole = [
            group
            for group in running.groups
            if lost.isdisjoint(rank for stage in group.stages for rank in stage.ranks)
        ]
        if not whole:
            return 0.0  # a pipeline that lacks a rank stands still at once
        at, cluster = self.at(step)
        ranks = rank_times(at, cluster, replace(running, groups=tuple(whole)))
        return max(rank.compute_s + rank.recompute_s + rank.tensor_s + rank.waiting_s for rank in ranks)

    def idle_s(self, step: int, plan: Plan) -> dict[int, float]:
        """Return the seconds per sample of the first layers on ranks that a plan leaves idle."""
        at, cluster = self.at(step)
        size, found = plan.groups[0].micro_batch, {}
        for rank in set(self.there(step)) - set(plan.ranks):
            name = cluster.device_of(rank).name
            passes = [at.work_s(name, (0, PROBED_LAYERS), way, size) for way in ("forward_s", "backward_s")]
            found[rank] = sum(passes) / size
        return found

    def links(self, step: int, plan: Plan) -> dict[tuple[int, int], tuple[float, float]]:
        """Return a message on every link that a plan uses, and where all are measured on a ring of all."""
        pairs = {
            pair
            for group in plan.groups
            for a, b in zip(group.stages[:-1], group.stages[1:], strict=True)
            for sender, receiver in product(a.ranks, b.ranks)
            for pair in ((sender, receiver), (receiver, sender))
        }
        rings = [sorted(stage.ranks) for group in plan.groups for stage in group.stages]
        rings += [sorted(plan.ranks)] if len(plan.groups) > 1 else []
        rings += [list(self.there(step))] if step % PROBE_EVERY == 0 else []
        for ring in rings:
            pairs |= set(zip(ring, [*ring[1:], *ring[:1]], strict=True))
        seen = {}
        for source, target in sorted(pairs):
            if source != target:
                rate, latency_s = self.lab.link_at(step, source, target)
                seen[source, target] = (_PROBE_BYTES, latency_s + _PROBE_BYTES / rate)
        return seen
