"""ZeRO 3 of a stage alone: values gathered before each layer, gradients summed and split after it.

Each layer that has parameters is gathered for its forward and again for its backward, one layer ahead of what
computes, and its gradients are reduced and scattered while the backward goes on. Transfers run one at a time,
gathers first: the next layer waits for them. A layer takes longer by the transfers that run beside it, and by
copies out of what was gathered and into what is scattered.

Source
------
Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277, sections 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreshard.graph.program import Kind, ProgramBuilder
from foreshard.predict.measured.costs import MeasuredCosts
from foreshard.predict.measured.memory import GATHERED_LAYERS, counts_of
from foreshard.predict.measured.passes import PassSeconds, layer_shares
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTasks:
    """Tasks of a stage with ZeRO 3."""

    passes: tuple[int, ...]  # that compute, in order
    gradients: dict[int, int]  # the last backward of each layer
    reduced: int  # the last reduction; the last backward where no layer has parameters


def add_sharded(
    builder: ProgramBuilder,
    costs: MeasuredCosts,
    cluster: Cluster,
    g: int,
    group: Group,
    passes: PassSeconds,
) -> ShardedTasks:
    """Append forward and backward of every micro-batch, layer by layer, with their transfers."""
    stage = group.stages[0]
    ranks = stage.ranks[:: stage.tp]  # that hold the same part of the layers
    visits = [
        (kind, layer, seconds)
        for m in range(len(passes.sizes))
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for layer, seconds in _layer_seconds(costs, cluster, group, passes, m, kind)
    ]
    moved = [costs.moved_share * layer.parameter_bytes for layer in costs.layers_on("", stage.tp)]
    speed = costs.speed("data_comm")
    moved_s = [costs.gather_s(cluster, ranks, size) / speed if size else 0.0 for size in moved]
    gathers: list[list[int]] = []

    def transfer(layer: int, after: list[int], kind: Kind) -> list[int]:
        """Append a transfer of a layer's parameters or gradients, if it has any."""
        return (
            [builder.add(f"group{g} links", moved_s[layer], after, kind=kind, group=g, stage=0)]
            if moved_s[layer]
            else []
        )

    for _, layer, _ in visits[:GATHERED_LAYERS]:
        gathers.append(transfer(layer, [], Kind.PARAMETER_GATHER))
    device = cluster.device_of(ranks[0]).name
    copied_s = [costs.copied_s.get(device, 0.0) * size / speed for size in moved]
    done: list[int] = []
    gradients: dict[int, int] = {}
    reduced: list[int] = []
    for kind, layer, seconds in visits:
        place = len(done)
        done.append(builder.add(f"group{g}", seconds, gathers[place], kind=kind, group=g, stage=0))
        times, beside = (1, Kind.PARAMETER_GATHER) if kind is Kind.FORWARD else (2, Kind.GRADIENT_REDUCE)
        longer_s = costs.contention * min(seconds, times * moved_s[layer]) + times * copied_s[layer]
        end = builder.add(f"group{g}", longer_s, [done[-1]], kind=beside, group=g, stage=0)
        if place + GATHERED_LAYERS < len(visits):
            ahead = visits[place + GATHERED_LAYERS][1]
            gathers.append(transfer(ahead, [end], Kind.PARAMETER_GATHER))
        if kind is Kind.BACKWARD:
            gradients[layer] = end
            reduced += transfer(layer, [end], Kind.GRADIENT_REDUCE)
    return ShardedTasks(passes=tuple(done), gradients=gradients, reduced=[end, *reduced][-1])


def _layer_seconds(
    costs: MeasuredCosts, cluster: Cluster, group: Group, passes: PassSeconds, m: int, kind: Kind
) -> list[tuple[int, float]]:
    """Return (layer, seconds) of a pass in the order in which it runs."""
    stage = group.stages[0]
    layers, forward = list(range(*stage.layers[0])), kind is Kind.FORWARD
    device, samples = cluster.device_of(stage.ranks[0]).name, max(counts_of(stage, passes.sizes[m]))
    name, seconds = ("forward_s", passes.forward) if forward else ("backward_s", passes.backward)
    shares = layer_shares(costs, device, stage, name, samples)
    each = list(zip(layers, (shares * seconds[0, 0, m]).tolist(), strict=True))
    return each if forward else each[::-1]
