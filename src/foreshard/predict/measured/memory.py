"""What a rank holds under a plan, from the bytes that were measured of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foreshard.cost.memory_activations import recompute_of
from foreshard.graph.pipeline_schedules import Op, stage_order
from foreshard.predict.measured.costs import LayerCost, MeasuredCosts
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.prediction import MEMORY_PARTS, Memory

GATHERED_LAYERS = 2
"""Layers whose values ZeRO 3 holds whole: the one that computes, and the next."""


def measured_memory(costs: MeasuredCosts, cluster: Cluster, plan: Plan) -> Memory:
    """Return what the fullest rank holds, tensors only, and every stage's peak."""
    peaks, worst, where = [], None, 0
    for group in plan.groups:
        row = []
        for s, stage in enumerate(group.stages):
            parts = _stage_bytes(costs, group, stage, s)
            row.append(sum(parts.values()))
            for rank in stage.ranks:
                full = sum(parts.values()) / cluster.device_of(rank).capacity_bytes
                if worst is None or full > worst[0]:
                    worst, where = (full, parts), rank
        peaks.append(tuple(row))
    assert worst is not None
    peak, capacity = sum(worst[1].values()), cluster.device_of(where).capacity_bytes
    return Memory(
        peak_bytes=peak,
        peak_allocated_bytes=peak,
        peak_rank=where,
        capacity_bytes=capacity,
        fits=peak <= capacity,
        breakdown_bytes=dict.fromkeys(MEMORY_PARTS, 0.0) | worst[1],
        per_stage_peak_bytes=tuple(peaks),
    )


def _stage_bytes(costs: MeasuredCosts, group: Group, stage: Stage, place: int) -> dict[str, float]:
    table = costs.layers_on("", stage.tp)
    places = [layer for lo, hi in stage.layers for layer in range(lo, hi)]
    layers = [table[layer] for layer in places]
    twice = costs.held_twice(places, stage.tp)
    samples = max(counts_of(stage, group.micro_batch))
    kept, temporary = zip(*(_saved_bytes(costs, stage, span, samples) for span in stage.layers), strict=True)
    shards = stage.inner_dp if stage.zero >= 1 else 1
    own = sum(layer.parameter_bytes for layer in layers) - sum(size for _, size in twice)
    states = sum(layer.state_bytes for layer in layers)
    states -= sum(size * table[i].state_bytes / table[i].parameter_bytes for i, size in twice)
    held, frozen = own, sum(layer.frozen_bytes for layer in layers)
    whole = 0.0
    if stage.zero >= 3 and shards > 1:
        sizes = [costs.gathered_share * layer.parameter_bytes for layer in layers]
        whole = max(sum(sizes[i : i + GATHERED_LAYERS]) for i in range(len(sizes)))
        held = own / shards
    parts = {
        "parameters": held + frozen + whole,
        "gradients": held + whole,
        "optimizer": states / shards,
        "activations": _most_kept(group, place, kept),
        "temporary": max(temporary),
    }
    step = sum(layer.step_bytes for layer in layers)
    step = (step - sum(size * table[i].step_bytes / table[i].parameter_bytes for i, size in twice)) / shards
    if step > parts["activations"] + parts["temporary"]:  # nothing is kept by then
        return parts | {"activations": 0.0, "temporary": step}
    return parts


def _saved_bytes(
    costs: MeasuredCosts, stage: Stage, span: tuple[int, int], samples: int
) -> tuple[float, float]:
    """Return the bytes of a micro-batch kept until its backward, and those made in it, or again."""
    layers = costs.layers_on("", stage.tp)[slice(*span)]
    saved = sum(layer.saved_bytes(samples) for layer in layers)
    again = recomputed_share(stage)
    if not again:
        return saved, _beside(layers, samples)
    size = int(recompute_of(stage.recompute, len(layers)).unit)
    units = [layers[start : start + size] for start in range(0, len(layers), size)]
    later, most = 0.0, 0.0  # when a unit runs again, what later ones handed on is gone
    for unit in reversed(units):
        made = sum(layer.saved_bytes(samples) for layer in unit) + _beside(unit, samples)
        most = max(most, made - again * later)
        later += unit[-1].boundary_bytes(samples)
    return saved * (1 - again) + again * later, most


def _beside(layers: Sequence[LayerCost], samples: int) -> float:
    """Return the most bytes that backward holds beyond what layers kept; what later ones kept goes first."""
    later, most = 0.0, 0.0
    for layer in reversed(layers):
        most = max(most, layer.beside_bytes(samples) - later)
        later += layer.saved_bytes(samples)
    return most


def _most_kept(group: Group, place: int, bytes_of_chunk: Sequence[float]) -> float:
    """Return the largest sum of what a stage keeps of the micro-batches under way."""
    order = stage_order(
        group.schedule,
        num_stages=len(group.stages),
        num_micro_batches=group.num_micro_batches,
        num_chunks=group.num_chunks,
    )[place]
    op, chunk = order[:, 0], order[:, 1]
    change = np.where(op == Op.FORWARD, 1.0, np.where(op == Op.BACKWARD_INPUT, 0.0, -1.0))
    return float(np.cumsum(change * np.array(bytes_of_chunk)[chunk]).max())


def counts_of(stage: Stage, size: int) -> list[int]:
    """Return the samples of a micro-batch that each rank of a stage takes."""
    weights = stage.rank_shares or (1,) * stage.inner_dp
    bounds = [size * int(seen) // sum(weights) for seen in np.cumsum((0, *weights))]
    return [hi - lo for lo, hi in pairwise(bounds)]


def recomputed_share(stage: Stage) -> float:
    """Return the part of the forward that runs again in the backward; the runtime recomputes whole layers."""
    if stage.recompute.startswith("selective"):
        return 1.0
    return float(recompute_of(stage.recompute, max(hi - lo for lo, hi in stage.layers)).full)
